"""Record of ``fewheads bench --on-device``: what was measured on which machine, and whether it may be published."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from edge.instruments.board import Board
from edge.load.board_watch import BoardState, Range

Where = Literal["in process", "served"]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure.

    Attributes:
        requests: of each series in all rounds together. A slow series has fewer, at least one a round; on a board that
            measures its power a quick one has more.
        rounds: how often all series take turns.
        idle_gaps_seconds: pauses before single requests.
        idle_requests: how many of these for each pause.
    """

    requests: int = 1000
    rounds: int = 10
    idle_gaps_seconds: tuple[float, ...] = (0.1, 1.0, 5.0)
    idle_requests: int = 20


class Quantiles(msgspec.Struct, frozen=True):
    """Percentiles of the latency in ms, interpolated between neighbours."""

    count: int
    p50_ms: float
    p90_ms: float
    p99_ms: float

    @classmethod
    def of(cls, durations_ns: Sequence[int]) -> Quantiles:
        """Return the percentiles of durations in nanoseconds."""
        p50, p90, p99 = np.percentile(np.array(durations_ns) / 1e6, [50, 90, 99]).tolist()
        return cls(len(durations_ns), p50, p90, p99)


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of one kind, one after the other without a pause.

    Attributes:
        model: its name.
        version: of the model.
        tier: its name.
        rows: batch size of each request.
        where: ``in process`` is preprocessing and the runner alone, ``served`` a client's view on the same machine.
        runtime: the target's name.
        runtime_version: of the runtime's package.
        device: where the model runs, ``CPU`` or ``GPU``.
        precision: of the file that the runtime chose.
        onnx_sha256: of that file.
        latency: of a request.
        power_watts: of the board meanwhile; None where it has no rails, or the series was too short for them.
        energy_millijoules: of a request, above the power when idle; None as before.
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
    latency: Quantiles
    power_watts: float | None = None
    energy_millijoules: float | None = None


class IdleGap(msgspec.Struct, frozen=True):
    """Served requests of one row, each after a pause in which the server was idle."""

    model: str
    tier: str
    gap_seconds: float
    latency: Quantiles


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """How many times faster a tier is than the full one: medians within each round, and their geometric mean.

    Attributes:
        model: its name.
        tier: the leaner one.
        full: the full tier.
        rows: batch size.
        where: as in :class:`Series`.
        ratio: of the full tier's latency to this one's.
        low: end of the 95 % interval, by resampling the rounds.
        high: the other end.
        rounds: how many.
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
    """The machine, whatever it is.

    Attributes:
        board: a Jetson's facts; None on any other machine.
        architecture: such as ``aarch64``.
        processor: its name; the architecture where the kernel gives none.
        python: version of Python.
        kernel: release of the kernel.
    """

    board: Board | None
    architecture: str
    processor: str
    python: str
    kernel: str

    @property
    def label(self) -> str:
        """The machine in a few words. Only a Jetson is called one."""
        if self.board:
            jetpack = f", JetPack {self.board.jetpack}" if self.board.jetpack else ""
            return f"{self.board.model}, {self.board.power_mode or 'unknown power mode'}{jetpack}"
        return f"no Jetson: {self.architecture}, {self.processor}"


class DeviceRecord(msgspec.Struct, frozen=True, kw_only=True, tag=1, tag_field="format_version"):
    """One run of ``fewheads bench --on-device``.

    Attributes:
        created: when it ended, in UTC.
        fewheads_version: this release.
        machine: where it ran.
        plan: what was asked for.
        before: the board at the start.
        after: the board at the end.
        observed: ranges during the run, by kind and name.
        idle_watts: power of the board while the models are loaded and nothing runs; None without rails.
        series: the measurements.
        idle_gaps: the measurements after pauses.
        ratios: of tiers.
        doubts: why the record must not be published; empty if it may be.
        publishable: whether it may be.
    """

    created: str
    fewheads_version: str
    machine: Machine
    plan: Plan
    before: BoardState
    after: BoardState
    observed: dict[str, dict[str, Range]]
    idle_watts: float | None
    series: tuple[Series, ...]
    idle_gaps: tuple[IdleGap, ...]
    ratios: tuple[Ratio, ...]
    doubts: tuple[str, ...]
    publishable: bool
