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
from itertools import product
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from edge import __version__
from edge.bench.closed_loop import Call, in_process, served, server_for
from edge.bench.conditions import BoardWatch, cpu_name
from edge.bench.inputs import Inputs, golden_inputs
from edge.bench.on_device import DeviceRecord, IdleGap, Machine, Plan, Ratio, Series, Where
from edge.bench.timing import Percentiles
from edge.bundles.bundle import Bundle
from edge.client import ONCE, Client
from edge.datatypes import Array
from edge.programs.tier_program import golden_loops, load_tier
from edge.runtimes.build import build
from edge.runtimes.runtime import Source

#: Number of unmeasured requests before each series, which refill the caches after another tier.
_WARM_REQUESTS = 3
#: Longest time of a series in one round, so that a large batch of a slow model does not take hours.
_SERIES_SECONDS = 2.0
#: Shortest time of a series in one round on a board that measures its power.
_POWER_SECONDS = 0.5
_SETTLE_SECONDS, _IDLE_SECONDS = 1.0, 3.0
_RESAMPLES = 2000

#: Receives the current step, and the number of its finished parts and of all its parts.
Advanced = Callable[[str, int, int], None]


class _Round(NamedTuple):
    durations: list[float]
    elapsed_seconds: float
    watts: float | None


class _Subject(NamedTuple):
    facts: Series  # without the latency
    call: Call
    inputs: list[Inputs]
    rounds: list[_Round]


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

    The board's files are below ``root``.
    """
    bundles = [Bundle.open(path) for path in paths]
    with ExitStack() as stack, BoardWatch(root) as watch:
        loaded, platforms = _load(stack, bundles, target, cache, advanced)
        url = stack.enter_context(server_for(bundles, None, target, cache))
        client = stack.enter_context(Client(url, retries=ONCE))
        doubts = served_elsewhere(client, platforms)
        subjects = [each for one in loaded for each in _subjects(client, *one)]
        for subject in subjects:
            _series(subject, max(plan.requests // 10, _WARM_REQUESTS))
        idle_watts = _idle_watts(watch, advanced)
        _take_turns(subjects, plan, watch, advanced)
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
        series=tuple(_result(subject, idle_watts) for subject in subjects),
        idle_gaps=tuple(gaps),
        ratios=tuple(_ratios(subjects)),
        doubts=doubts,
        publishable=not doubts,
    )


def _load(
    stack: ExitStack, bundles: list[Bundle], target: str, cache: Path | None, advanced: Advanced
) -> tuple[list[tuple[Bundle, Series, Call]], dict[str, str]]:
    tiers = [(bundle, tier.name) for bundle in bundles for tier in bundle.manifest.tiers]
    loaded: list[tuple[Bundle, Series, Call]] = []
    platforms: dict[str, str] = {}
    for done, (bundle, tier) in enumerate(tiers):
        advanced("building", done, len(tiers))
        for role in bundle.manifest.roles:
            build(bundle, target, cache, tier=tier, role=role)
        program = load_tier(bundle, target, cache, tier=tier)
        stack.callback(program.close)
        ready = program.main
        platforms.setdefault(bundle.manifest.name, ready.runner.platform)
        source = Source.of(bundle, ready.runtime, tier, ready.artifact.role)
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
            loops=golden_loops(program) if program.loop else None,
        )
        loaded.append((bundle, facts, in_process(program)))
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


def _subjects(client: Client, bundle: Bundle, facts: Series, local: Call) -> Iterator[_Subject]:
    manifest, tier = bundle.manifest, facts.tier if len(bundle.manifest.tiers) > 1 else ""
    remote = served(client, manifest.name, version=str(manifest.version), tier=tier)
    for rows in sorted({1, manifest.max_batch_size or 1}):
        inputs = golden_inputs(bundle, rows)
        for where, call in (("in process", local), ("served", remote)):
            yield _Subject(msgspec.structs.replace(facts, rows=rows, where=where), call, inputs, [])


def _series(subject: _Subject, count: int, least_seconds: float = 0.0) -> list[float]:
    """Send ``count`` requests, more within ``least_seconds``, fewer if they take too long; return their durations."""
    durations: list[float] = []
    started = time.perf_counter()
    while True:
        elapsed = time.perf_counter() - started
        if durations and (elapsed > _SERIES_SECONDS or (len(durations) >= count and elapsed >= least_seconds)):
            return durations
        durations.append(_seconds_of_call(subject, len(durations)))


def _seconds_of_call(subject: _Subject, index: int) -> float:
    begun = time.perf_counter()
    subject.call(subject.inputs[index % len(subject.inputs)])
    return time.perf_counter() - begun


def _take_turns(subjects: list[_Subject], plan: Plan, watch: BoardWatch, advanced: Advanced) -> None:
    per_round, total = max(plan.requests // plan.rounds, 1), plan.rounds * len(subjects)
    least_seconds = _POWER_SECONDS if watch.measures_power else 0.0
    for number in range(plan.rounds):
        for turn in range(len(subjects)):
            subject = subjects[(number + turn) % len(subjects)]  # each comes first in some round
            _series(subject, _WARM_REQUESTS)
            begun = time.monotonic()
            durations = _series(subject, per_round, least_seconds)
            ended = time.monotonic()
            subject.rounds.append(_Round(durations, ended - begun, watch.watts(begun, ended)))
            advanced("warm", number * len(subjects) + turn + 1, total)


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
    pairs, found = list(product(served, plan.idle_gaps_seconds)), []
    for number, (subject, gap) in enumerate(pairs):
        durations = []
        for index in range(plan.idle_requests):
            time.sleep(gap)
            durations.append(_seconds_of_call(subject, index))
            advanced("after idle", number * plan.idle_requests + index + 1, len(pairs) * plan.idle_requests)
        latency = Percentiles.of(np.array(durations))
        found.append(IdleGap(subject.facts.model, subject.facts.tier, gap, latency))
    return found


def _result(subject: _Subject, idle_watts: float | None) -> Series:
    latency = Percentiles.of(np.concatenate([part.durations for part in subject.rounds]))
    parts = [(part, part.watts) for part in subject.rounds if part.watts is not None]
    power = energy = None
    if parts:
        elapsed = sum(part.elapsed_seconds for part, _ in parts)
        requests = sum(len(part.durations) for part, _ in parts)
        power = sum(watts * part.elapsed_seconds for part, watts in parts) / elapsed
        energy = None if idle_watts is None else (power - idle_watts) * elapsed / requests * 1e3
    return msgspec.structs.replace(subject.facts, latency=latency, power_watts=power, energy_millijoules=energy)


def _ratios(subjects: list[_Subject]) -> list[Ratio]:
    full: dict[tuple[str, int, Where], tuple[str, Array]] = {}
    found = []
    for facts, _, _, rounds in subjects:
        medians = np.array([np.median(part.durations) for part in rounds])
        first, slower = full.setdefault((facts.model, facts.rows, facts.where), (facts.tier, medians))
        if facts.tier == first:
            continue
        logs = np.log(slower / medians)
        picks = np.random.default_rng(0).integers(len(logs), size=(_RESAMPLES, len(logs)))
        low, high = np.exp(np.percentile(logs[picks].mean(axis=1), [2.5, 97.5])).tolist()
        ratio, same = float(np.exp(logs.mean())), (facts.rows, facts.where)
        found.append(Ratio(facts.model, facts.tier, first, *same, ratio=ratio, low=low, high=high, rounds=len(logs)))
    return found
