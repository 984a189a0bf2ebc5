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
from itertools import cycle, product
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from edge import __version__
from edge.bench.closed_loop import ClosedLoop, RequestFunction, Round, in_process, served, server_for
from edge.bench.conditions import BoardState, BoardWatch, Range, cpu_name
from edge.bench.inputs import golden_inputs
from edge.bench.timing import Percentiles
from edge.bundles.bundle import Bundle
from edge.client import ONCE, Client
from edge.datatypes import Array
from edge.instruments.board import BoardInfo
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

#: Receives the number of finished parts of a step and of all its parts, and the step.
Advanced = Callable[[int, int, str], None]


Where = Literal["in process", "served"]


class MeasurementPlan(msgspec.Struct, frozen=True):
    """Amount of measurements.

    Attributes:
        requests: of each series, in all rounds together. A slow series has fewer, but at least one in a round; on a
            board that measures its power a quick one has more.
        idle_gaps_seconds: pauses before single requests, ``idle_requests`` each.
    """

    requests: int = 1000
    rounds: int = 10
    idle_gaps_seconds: tuple[float, ...] = (0.1, 1.0, 5.0)
    idle_requests: int = 20


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of one kind, one after the other without a pause.

    Attributes:
        where: ``in process`` is preprocessing and the runner alone, ``served`` a client's view on the same machine.
        precision: of the file that the runtime chose, as ``onnx_sha256``; of a looped model, its step's.
        power_watts: mean power of the board; None without rails, or in a series too short for them.
        energy_millijoules: of a request, above the idle power; None likewise.
        loops: mean of the rows of a looped model, within its own limits; None for other models.
    """

    model: str
    version: int
    tier: str
    rows: int
    where: Where
    runtime: str
    runtime_version: str
    device: str
    precision: str
    onnx_sha256: str
    latency: Percentiles
    power_watts: float | None = None
    energy_millijoules: float | None = None
    loops: float | None = None


class IdleGap(msgspec.Struct, frozen=True):
    """Served requests of one row, each after a pause of the server."""

    model: str
    tier: str
    gap_seconds: float
    latency: Percentiles


class Ratio(msgspec.Struct, frozen=True):
    """Speed-up of a tier: the ratio of the full tier's median latency to its own, as geometric mean over rounds.

    ``low`` and ``high`` are the 95 % interval, by resampling the rounds.
    """

    model: str
    tier: str
    full: str
    rows: int
    where: Where
    ratio: float
    low: float
    high: float
    rounds: int


class Machine(msgspec.Struct, frozen=True):
    """Any machine; ``board`` is None except on a Jetson."""

    board: BoardInfo | None
    architecture: str
    processor: str
    python: str
    kernel: str

    @property
    def label(self) -> str:
        """The machine in a few words, which say whether it is a Jetson."""
        if self.board:
            jetpack = f", JetPack {self.board.jetpack}" if self.board.jetpack else ""
            return f"{self.board.model}, {self.board.power_mode or 'unknown power mode'}{jetpack}"
        return f"no Jetson: {self.architecture}, {self.processor}"


class DeviceRecord(msgspec.Struct, frozen=True, kw_only=True, tag=1, tag_field="format_version"):
    """One run of ``fewheads bench --on-device``.

    Attributes:
        observed: ranges during the run, by kind and name.
        idle_watts: power of the board with the models loaded and nothing running; None without rails.
        doubts: reasons not to publish the record.
    """

    created: str
    fewheads_version: str
    machine: Machine
    plan: MeasurementPlan
    before: BoardState
    after: BoardState
    observed: dict[str, dict[str, Range]]
    idle_watts: float | None
    series: tuple[Series, ...]
    idle_gaps: tuple[IdleGap, ...]
    ratios: tuple[Ratio, ...]
    doubts: tuple[str, ...]
    publishable: bool


class _Subject(NamedTuple):
    """What is measured: a series without its latency, its closed loop, and the requests and watts of each round."""

    series: Series
    loop: ClosedLoop
    rounds: list[tuple[Round, float | None]]


def measure_on_device(
    paths: Sequence[Path],
    plan: MeasurementPlan,
    *,
    target: str = "auto",
    cache: Path | None = None,
    root: Path = Path("/"),
    advanced: Advanced = lambda done, total, step: None,
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
        subjects = [subject for of_tier in loaded for subject in _subjects(client, *of_tier)]
        for subject in subjects:
            subject.loop.send(max(plan.requests // 10, _WARM_REQUESTS), most_seconds=_SERIES_SECONDS)
        idle_watts = _idle_watts(watch, advanced)
        _take_turns(subjects, plan, watch, advanced)
        gaps = tuple(_idle_gaps(subjects, plan, advanced))
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
        series=tuple(_measured(subject, idle_watts) for subject in subjects),
        idle_gaps=gaps,
        ratios=tuple(_ratios(subjects)),
        doubts=doubts,
        publishable=not doubts,
    )


def _load(
    stack: ExitStack, bundles: list[Bundle], target: str, cache: Path | None, advanced: Advanced
) -> tuple[list[tuple[Bundle, Series, RequestFunction]], dict[str, str]]:
    """Return bundle, series and function of each tier, and the platform of each model in this process."""
    tiers = [(bundle, tier.name) for bundle in bundles for tier in bundle.manifest.tiers]
    loaded: list[tuple[Bundle, Series, RequestFunction]] = []
    platforms: dict[str, str] = {}
    for done, (bundle, tier) in enumerate(tiers, 1):
        for role in bundle.manifest.roles:
            build(bundle, target, cache, tier=tier, role=role)
        program = load_tier(bundle, target, cache, tier=tier)
        stack.callback(program.close)
        ready = program.main
        platforms.setdefault(bundle.manifest.name, ready.runner.platform)
        source = Source.of(bundle, ready.runtime, tier, ready.artifact.role)
        series = Series(
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
        loaded.append((bundle, series, in_process(program)))
        advanced(done, len(tiers), "building")
    return loaded, platforms


def served_elsewhere(client: Client, platforms: Mapping[str, str]) -> tuple[str, ...]:
    """Return a sentence for each model whose platform at the server is not the one given for this process."""
    at_server = {model.name: model.platform for model in client.telemetry().models}
    return tuple(
        f"{model} is served by {at_server.get(model, 'nothing')}, and in process by {here}"
        for model, here in platforms.items()
        if at_server.get(model) != here
    )


def _subjects(client: Client, bundle: Bundle, series: Series, local: RequestFunction) -> Iterator[_Subject]:
    manifest, tier = bundle.manifest, series.tier if len(bundle.manifest.tiers) > 1 else ""
    remote = served(client, manifest.name, version=str(manifest.version), tier=tier)
    for rows in sorted({1, manifest.max_batch_size or 1}):
        inputs = golden_inputs(bundle, rows)
        for where, call in (("in process", local), ("served", remote)):
            yield _Subject(msgspec.structs.replace(series, rows=rows, where=where), ClosedLoop(call, cycle(inputs)), [])


def _take_turns(subjects: list[_Subject], plan: MeasurementPlan, watch: BoardWatch, advanced: Advanced) -> None:
    per_round, total = max(plan.requests // plan.rounds, 1), plan.rounds * len(subjects)
    least_seconds = _POWER_SECONDS if watch.measures_power else 0.0
    for turn in range(total):
        subject = subjects[(turn + turn // len(subjects)) % len(subjects)]  # each comes first in some round
        subject.loop.send(_WARM_REQUESTS, most_seconds=_SERIES_SECONDS)
        begun = time.monotonic()
        sent = subject.loop.send(per_round, least_seconds, _SERIES_SECONDS)
        subject.rounds.append((sent, watch.watts(begun, begun + sent.elapsed_seconds)))
        advanced(turn + 1, total, "warm")


def _idle_watts(watch: BoardWatch, advanced: Advanced) -> float | None:
    if not watch.measures_power:
        return None
    time.sleep(_SETTLE_SECONDS)
    begun = time.monotonic()
    time.sleep(_IDLE_SECONDS)
    advanced(1, 1, "idle power")
    return watch.watts(begun, time.monotonic())


def _idle_gaps(subjects: list[_Subject], plan: MeasurementPlan, advanced: Advanced) -> Iterator[IdleGap]:
    alone = [subject for subject in subjects if subject.series.where == "served" and subject.series.rows == 1]
    pairs = list(product(alone, plan.idle_gaps_seconds))
    for number, (subject, gap) in enumerate(pairs):
        seconds: list[float] = []
        for index in range(plan.idle_requests):
            time.sleep(gap)
            seconds += subject.loop.send(1).seconds
            advanced(number * plan.idle_requests + index + 1, len(pairs) * plan.idle_requests, "after idle")
        yield IdleGap(subject.series.model, subject.series.tier, gap, Percentiles.of(seconds))


def _measured(subject: _Subject, idle_watts: float | None) -> Series:
    latency = Percentiles.of([seconds for sent, _ in subject.rounds for seconds in sent.seconds])
    rounds = [(sent, watts) for sent, watts in subject.rounds if watts is not None]
    power = energy = None
    if rounds:
        elapsed = sum(sent.elapsed_seconds for sent, _ in rounds)
        power = sum(watts * sent.elapsed_seconds for sent, watts in rounds) / elapsed
        count = sum(len(sent.seconds) for sent, _ in rounds)
        energy = None if idle_watts is None else (power - idle_watts) * elapsed / count * 1e3
    return msgspec.structs.replace(subject.series, latency=latency, power_watts=power, energy_millijoules=energy)


def _ratios(subjects: list[_Subject]) -> Iterator[Ratio]:
    full: dict[tuple[str, int, Where], tuple[str, Array]] = {}
    for series, _, rounds in subjects:
        medians = np.array([np.median(sent.seconds) for sent, _ in rounds])
        first, slower = full.setdefault((series.model, series.rows, series.where), (series.tier, medians))
        if series.tier == first:
            continue
        logs = np.log(slower / medians)
        picks = np.random.default_rng(0).integers(len(logs), size=(_RESAMPLES, len(logs)))
        low, high = np.exp(np.percentile(logs[picks].mean(axis=1), [2.5, 97.5])).tolist()
        ratio, same = float(np.exp(logs.mean())), (series.rows, series.where)
        yield Ratio(series.model, series.tier, first, *same, ratio=ratio, low=low, high=high, rounds=len(logs))
