"""Record of ``fewheads bench --on-device``: the machine, its state, the measurements, and reasons not to publish."""

from __future__ import annotations

from typing import Literal

import msgspec

from edge.bench.conditions import BoardState, Range
from edge.bench.timing import Percentiles
from edge.instruments.board import Board

Where = Literal["in process", "served"]


class Plan(msgspec.Struct, frozen=True):
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

    board: Board | None
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
