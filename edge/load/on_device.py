"""Latency and energy of bundles on a board, with the board's state, as a record that tables are made from.

All tiers, batch sizes and ways, in process and served, take turns within each round, so that a board that warms up
disturbs all of them alike. Ratios are taken within a round.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from edge import __version__
from edge.bundles.bundle import Bundle
from edge.client import ONCE, Client
from edge.datatypes import Array
from edge.load.bench import direct_inputs, in_process, server_for
from edge.load.board_watch import BoardWatch
from edge.load.device_record import DeviceRecord, IdleGap, Machine, Plan, Quantiles, Ratio, Series, Where
from edge.profiling.conditions import cpu_name
from edge.runtimes.build import build, load_runner
from edge.runtimes.runtime import Source

#: Requests before a series that are not measured: the ones after another tier's, whose weights filled the caches.
_WARM_REQUESTS = 3
#: Time of a series in one round at most, so that a large batch of a slow model does not take hours.
_SERIES_SECONDS = 2.0
#: Where the board measures its power, a series in one round takes at least this long.
_POWER_SECONDS = 0.5
_SETTLE_SECONDS, _IDLE_SECONDS = 1.0, 3.0
_RESAMPLES = 2000

Call = Callable[[dict[str, Array]], None]


class _Subject(NamedTuple):
    """What is measured: the result's fields so far, the call and its requests."""

    facts: Series
    call: Call
    inputs: list[dict[str, Array]]


class _Round(NamedTuple):
    """The requests of one series in one round."""

    durations_ns: list[int]
    wall_seconds: float
    watts: float | None


def measure_on_device(
    paths: Sequence[Path],
    plan: Plan,
    *,
    target: str = "auto",
    cache: Path | None = None,
    root: Path = Path("/"),
    advanced: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> DeviceRecord:
    """Build, serve and measure bundles in every tier, in batches of one and of the most rows.

    Args:
        paths: the bundles.
        plan: what to measure.
        target: the runtime.
        cache: directory of built models.
        root: the root of the file system with the board's files, another one in tests.
        advanced: called with the current step, and with how many of how many parts of it are done.

    Raises:
        FewheadsError: a bundle is broken or cannot be built, or the server fails.
    """
    bundles = [Bundle.open(path) for path in paths]
    with ExitStack() as stack, BoardWatch(root) as watch:
        runners, platforms = _load(stack, bundles, target, cache, advanced)
        url = stack.enter_context(server_for(bundles, None, target, cache))
        client = stack.enter_context(Client(url, retries=ONCE))
        doubts = served_elsewhere(client, platforms)
        subjects = [
            each
            for bundle in bundles
            for tier, (facts, local) in runners[bundle].items()
            for each in _subjects(bundle, facts, local, partial(_ask, client, bundle, tier))
        ]
        for subject in subjects:
            _series(subject, max(plan.requests // 10, _WARM_REQUESTS))
        idle_watts = _idle_watts(watch, advanced)
        rounds = _take_turns(subjects, plan, watch, advanced)
        gaps = _idle_gaps(subjects, plan, advanced)
    doubts += watch.doubts
    return DeviceRecord(
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        fewheads_version=__version__,
        machine=Machine(
            watch.before.board, platform.machine(), cpu_name(root), platform.python_version(), platform.release()
        ),
        plan=plan,
        before=watch.before,
        after=watch.after,
        observed=watch.observed,
        idle_watts=idle_watts,
        series=tuple(
            _result(subject.facts, parts, idle_watts) for subject, parts in zip(subjects, rounds, strict=True)
        ),
        idle_gaps=tuple(gaps),
        ratios=tuple(_ratios(subjects, rounds)),
        doubts=doubts,
        publishable=not doubts,
    )


def _load(
    stack: ExitStack,
    bundles: list[Bundle],
    target: str,
    cache: Path | None,
    advanced: Callable[[str, int, int], None],
) -> tuple[dict[Bundle, dict[str, tuple[Series, Call]]], dict[str, str]]:
    """Build and load every tier in this process.

    Returns:
        The facts of every tier and the function that runs it; and the platform of every model's full tier.
    """
    tiers = [(bundle, tier.name) for bundle in bundles for tier in bundle.manifest.tiers]
    loaded: dict[Bundle, dict[str, tuple[Series, Call]]] = {}
    platforms: dict[str, str] = {}
    for done, (bundle, tier) in enumerate(tiers):
        advanced("building", done, len(tiers))
        build(bundle, target, cache, tier=tier)
        ready = load_runner(bundle, target, cache, tier=tier)
        stack.callback(ready.runner.close)
        platforms.setdefault(bundle.manifest.name, ready.runner.platform)
        source = Source.of(bundle, ready.runtime, tier)
        facts = Series(
            model=bundle.manifest.name,
            version=bundle.manifest.version,
            tier=tier,
            rows=1,
            where="in process",
            runtime=ready.runtime.name,
            runtime_version=ready.runtime.version(),
            device=ready.runner.device,
            precision=source.artifact.precision,
            onnx_sha256=source.onnx_sha256,
            latency=Quantiles(0, 0, 0, 0),
        )
        loaded.setdefault(bundle, {})[tier] = facts, in_process(bundle, ready.runner)
    advanced("building", len(tiers), len(tiers))
    return loaded, platforms


def served_elsewhere(client: Client, platforms: Mapping[str, str]) -> tuple[str, ...]:
    """Return a sentence for each model that a server computes on another platform than this process does.

    Args:
        client: of the server.
        platforms: model to its platform in this process.
    """
    served = {model.name: model.platform for model in client.telemetry().models}
    return tuple(
        f"{model} is served by {served.get(model, 'nothing')}, and in process by {platform}"
        for model, platform in platforms.items()
        if served.get(model) != platform
    )


def _subjects(bundle: Bundle, facts: Series, local: Call, remote: Call) -> list[_Subject]:
    found = []
    for rows in sorted({1, bundle.manifest.max_batch_size or 1}):
        inputs = direct_inputs(bundle, rows)
        same = msgspec.structs.replace(facts, rows=rows)
        found.append(_Subject(same, local, inputs))
        found.append(_Subject(msgspec.structs.replace(same, where="served"), remote, inputs))
    return found


def _ask(client: Client, bundle: Bundle, tier: str, inputs: dict[str, Array]) -> None:
    manifest = bundle.manifest
    client.infer(manifest.name, inputs, version=str(manifest.version), tier=tier if len(manifest.tiers) > 1 else "")


def _series(subject: _Subject, count: int, least_seconds: float = 0.0) -> list[int]:
    """Send ``count`` requests and return their durations.

    There are more of them if they take less than ``least_seconds``, and fewer if they take too long.
    """
    durations: list[int] = []
    started = time.perf_counter_ns()
    least, most = started + int(least_seconds * 1e9), started + int(_SERIES_SECONDS * 1e9)
    while True:
        begun = time.perf_counter_ns()
        if durations and (begun > most or (len(durations) >= count and begun >= least)):
            return durations
        subject.call(subject.inputs[len(durations) % len(subject.inputs)])
        durations.append(time.perf_counter_ns() - begun)


def _take_turns(
    subjects: list[_Subject], plan: Plan, watch: BoardWatch, advanced: Callable[[str, int, int], None]
) -> list[list[_Round]]:
    """Return the rounds of each subject."""
    rounds: list[list[_Round]] = [[] for _ in subjects]
    per_round, total = max(plan.requests // plan.rounds, 1), plan.rounds * len(subjects)
    least_seconds = _POWER_SECONDS if watch.measures_power else 0.0
    for number in range(plan.rounds):
        for turn in range(len(subjects)):
            index = (number + turn) % len(subjects)  # nobody is always the first
            _series(subjects[index], _WARM_REQUESTS)
            begun = time.monotonic()
            durations = _series(subjects[index], per_round, least_seconds)
            ended = time.monotonic()
            rounds[index].append(_Round(durations, ended - begun, watch.watts(begun, ended)))
            advanced("warm", number * len(subjects) + turn + 1, total)
    return rounds


def _idle_watts(watch: BoardWatch, advanced: Callable[[str, int, int], None]) -> float | None:
    if not watch.measures_power:
        return None
    advanced("idle power", 0, 1)
    time.sleep(_SETTLE_SECONDS)
    begun = time.monotonic()
    time.sleep(_IDLE_SECONDS)
    advanced("idle power", 1, 1)
    return watch.watts(begun, time.monotonic())


def _idle_gaps(subjects: list[_Subject], plan: Plan, advanced: Callable[[str, int, int], None]) -> list[IdleGap]:
    asked = [subject for subject in subjects if subject.facts.where == "served" and subject.facts.rows == 1]
    total, done, found = len(asked) * len(plan.idle_gaps_seconds) * plan.idle_requests, 0, []
    for subject in asked:
        for gap in plan.idle_gaps_seconds:
            durations = []
            for index in range(plan.idle_requests):
                time.sleep(gap)
                begun = time.perf_counter_ns()
                subject.call(subject.inputs[index % len(subject.inputs)])
                durations.append(time.perf_counter_ns() - begun)
                done += 1
                advanced("after idle", done, total)
            if durations:
                found.append(IdleGap(subject.facts.model, subject.facts.tier, gap, Quantiles.of(durations)))
    return found


def _result(facts: Series, rounds: list[_Round], idle_watts: float | None) -> Series:
    durations = [duration for part in rounds for duration in part.durations_ns]
    seen = [part for part in rounds if part.watts is not None]
    power = energy = None
    if seen:
        wall, requests = sum(part.wall_seconds for part in seen), sum(len(part.durations_ns) for part in seen)
        power = sum(part.watts * part.wall_seconds for part in seen if part.watts is not None) / wall
        if idle_watts is not None:
            energy = (power - idle_watts) * wall / requests * 1e3
    return msgspec.structs.replace(facts, latency=Quantiles.of(durations), power_watts=power, energy_millijoules=energy)


def _ratios(subjects: list[_Subject], rounds: list[list[_Round]]) -> list[Ratio]:
    medians = {
        (one.facts.model, one.facts.rows, one.facts.where, one.facts.tier): np.array(
            [np.median(part.durations_ns) for part in parts]
        )
        for one, parts in zip(subjects, rounds, strict=True)
    }
    full: dict[tuple[str, int, Where], str] = {}
    found = []
    for (model, rows, where, tier), mine in medians.items():
        first = full.setdefault((model, rows, where), tier)
        if tier != first:
            logs = np.log(medians[model, rows, where, first] / mine)
            picks = np.random.default_rng(0).integers(len(logs), size=(_RESAMPLES, len(logs)))
            low, high = np.exp(np.percentile(logs[picks].mean(axis=1), [2.5, 97.5])).tolist()
            found.append(
                Ratio(
                    model=model,
                    tier=tier,
                    full=first,
                    rows=rows,
                    where=where,
                    ratio=float(np.exp(logs.mean())),
                    low=low,
                    high=high,
                    rounds=len(logs),
                )
            )
    return found
