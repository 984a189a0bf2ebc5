"""Latency and energy of bundles on a board, with the board's state.

All tiers and batch sizes, in process and served, take turns within each round, so that a board that warms up affects
all of them alike. Ratios are taken within a round.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from edge.load.bench import in_process, server_for
from edge.load.board_watch import BoardWatch
from edge.load.device_record import DeviceRecord, IdleGap, Machine, Plan, Ratio, Series, Where
from edge.load.inputs import Inputs, golden_inputs
from edge.load.percentiles import Percentiles
from edge.profiling.conditions import cpu_name
from edge.runtimes.build import build, load_runner
from edge.runtimes.runtime import Source

#: Number of unmeasured requests before each series, which refill the caches after another tier.
_WARM_REQUESTS = 3
#: Longest time of a series in one round, so that a large batch of a slow model does not take hours.
_SERIES_SECONDS = 2.0
#: Shortest time of a series in one round on a board that measures its power.
_POWER_SECONDS = 0.5
_SETTLE_SECONDS, _IDLE_SECONDS = 1.0, 3.0
_RESAMPLES = 2000

Call = Callable[[Inputs], object]
#: Receives the current step, and the number of its finished parts and of all its parts.
Advanced = Callable[[str, int, int], None]


class _Subject(NamedTuple):
    """Series to measure: its result without the latency, the function to call and its requests."""

    facts: Series
    call: Call
    inputs: list[Inputs]


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
    advanced: Advanced = lambda step, done, total: None,
) -> DeviceRecord:
    """Build, serve and measure bundles in every tier, in batches of one and of the most rows.

    Args:
        paths: the bundles.
        plan: amount of measurements.
        target: the runtime.
        cache: directory of built models.
        root: the root of the file system with the board's files, another one in tests.
        advanced: reports progress.

    Raises:
        FewheadsError: a bundle is broken or cannot be built, or the server fails.
    """
    bundles = [Bundle.open(path) for path in paths]
    with ExitStack() as stack, BoardWatch(root) as watch:
        loaded, platforms = _load(stack, bundles, target, cache, advanced)
        url = stack.enter_context(server_for(bundles, None, target, cache))
        client = stack.enter_context(Client(url, retries=ONCE))
        doubts = served_elsewhere(client, platforms)
        subjects = [
            each
            for bundle, facts, local in loaded
            for each in _subjects(bundle, facts, local, _remote(client, bundle, facts.tier))
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
    stack: ExitStack, bundles: list[Bundle], target: str, cache: Path | None, advanced: Advanced
) -> tuple[list[tuple[Bundle, Series, Call]], dict[str, str]]:
    """Build and load every tier; return its facts and the function that runs it, and each model's platform."""
    tiers = [(bundle, tier.name) for bundle in bundles for tier in bundle.manifest.tiers]
    loaded: list[tuple[Bundle, Series, Call]] = []
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
            latency=Percentiles(),
        )
        loaded.append((bundle, facts, in_process(bundle, ready.runner)))
    advanced("building", len(tiers), len(tiers))
    return loaded, platforms


def served_elsewhere(client: Client, platforms: Mapping[str, str]) -> tuple[str, ...]:
    """Return a sentence for each model whose platform at the server is not the one given for this process."""
    served = {model.name: model.platform for model in client.telemetry().models}
    return tuple(
        f"{model} is served by {served.get(model, 'nothing')}, and in process by {platform}"
        for model, platform in platforms.items()
        if served.get(model) != platform
    )


def _subjects(bundle: Bundle, facts: Series, local: Call, remote: Call) -> Iterator[_Subject]:
    for rows in sorted({1, bundle.manifest.max_batch_size or 1}):
        inputs = golden_inputs(bundle, rows)
        same = msgspec.structs.replace(facts, rows=rows)
        yield _Subject(same, local, inputs)
        yield _Subject(msgspec.structs.replace(same, where="served"), remote, inputs)


def _remote(client: Client, bundle: Bundle, tier: str) -> Call:
    manifest = bundle.manifest
    tier = tier if len(manifest.tiers) > 1 else ""
    return partial(client.infer, manifest.name, version=str(manifest.version), tier=tier)


def _series(subject: _Subject, count: int, least_seconds: float = 0.0) -> list[int]:
    """Send ``count`` requests, more within ``least_seconds``, fewer if they take too long; return their durations."""
    durations: list[int] = []
    started = time.perf_counter_ns()
    least, most = started + int(least_seconds * 1e9), started + int(_SERIES_SECONDS * 1e9)
    while True:
        begun = time.perf_counter_ns()
        if durations and (begun > most or (len(durations) >= count and begun >= least)):
            return durations
        subject.call(subject.inputs[len(durations) % len(subject.inputs)])
        durations.append(time.perf_counter_ns() - begun)


def _take_turns(subjects: list[_Subject], plan: Plan, watch: BoardWatch, advanced: Advanced) -> list[list[_Round]]:
    rounds: list[list[_Round]] = [[] for _ in subjects]
    per_round, total = max(plan.requests // plan.rounds, 1), plan.rounds * len(subjects)
    least_seconds = _POWER_SECONDS if watch.measures_power else 0.0
    for number in range(plan.rounds):
        for turn in range(len(subjects)):
            index = (number + turn) % len(subjects)  # each comes first in some round
            _series(subjects[index], _WARM_REQUESTS)
            begun = time.monotonic()
            durations = _series(subjects[index], per_round, least_seconds)
            ended = time.monotonic()
            rounds[index].append(_Round(durations, ended - begun, watch.watts(begun, ended)))
            advanced("warm", number * len(subjects) + turn + 1, total)
    return rounds


def _idle_watts(watch: BoardWatch, advanced: Advanced) -> float | None:
    if not watch.measures_power:
        return None
    advanced("idle power", 0, 1)
    time.sleep(_SETTLE_SECONDS)
    begun = time.monotonic()
    time.sleep(_IDLE_SECONDS)
    advanced("idle power", 1, 1)
    return watch.watts(begun, time.monotonic())


def _idle_gaps(subjects: list[_Subject], plan: Plan, advanced: Advanced) -> list[IdleGap]:
    served = [subject for subject in subjects if subject.facts.where == "served" and subject.facts.rows == 1]
    total, done, found = len(served) * len(plan.idle_gaps_seconds) * plan.idle_requests, 0, []
    for subject in served:
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
                found.append(
                    IdleGap(subject.facts.model, subject.facts.tier, gap, Percentiles.of(np.array(durations) / 1e9))
                )
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
    return msgspec.structs.replace(
        facts, latency=Percentiles.of(np.array(durations) / 1e9), power_watts=power, energy_millijoules=energy
    )


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
        if tier == first:
            continue
        logs = np.log(medians[model, rows, where, first] / mine)
        picks = np.random.default_rng(0).integers(len(logs), size=(_RESAMPLES, len(logs)))
        low, high = np.exp(np.percentile(logs[picks].mean(axis=1), [2.5, 97.5])).tolist()
        ratio = float(np.exp(logs.mean()))
        found.append(Ratio(model, tier, first, rows, where, ratio=ratio, low=low, high=high, rounds=len(logs)))
    return found
