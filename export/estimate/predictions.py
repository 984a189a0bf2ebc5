"""Predicted times in documents: of models whose measured times they state, or of untrained ones of the same shapes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias

import msgspec

from edge.bench.layer_latencies import PREDICTION, Label
from edge.files import write_whole
from export.estimate.devices import DEFAULT_BOARD, DEVICES
from export.estimate.roofline import Prediction
from export.report.table import Table

#: A model, the size of its run, and its latency.
PredictedRun: TypeAlias = tuple[str, str, Prediction]


class PredictedRow(msgspec.Struct, frozen=True):
    """A model and its run of one size; ``times_faster`` is the latency of the table's first model over its own."""

    model: str
    size: str
    milliseconds: float
    low_ms: float
    high_ms: float
    times_faster: float


class PredictedLatencies(msgspec.Struct, frozen=True):
    """A table's record, for TensorRT."""

    device: str
    power_mode: str
    label: Label
    rows: tuple[PredictedRow, ...]

    @classmethod
    def of(cls, predicted: Iterable[PredictedRun]) -> PredictedLatencies:
        """Return the record of predictions on the default board."""
        first: dict[str, float] = {}  # milliseconds of the first model by size
        rows = (
            PredictedRow(
                name,
                size,
                one.milliseconds,
                one.low_ms,
                one.high_ms,
                first.setdefault(size, one.milliseconds) / one.milliseconds,
            )
            for name, size, one in predicted
        )
        return cls(DEVICES[DEFAULT_BOARD.board].name, DEFAULT_BOARD.power_mode, PREDICTION, tuple(rows))

    def write(self, path: Path) -> None:
        """Write the record."""
        write_whole(path, msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")

    def table(self, precision: str = "FP16", *, speeds: bool = True) -> Table:
        """Return the table of models by sizes, and what it says; ``speeds`` are relative to the first model."""
        cells: dict[str, list[str]] = {}
        for row in self.rows:
            speed = f"{row.times_faster:.2f}×, " if speeds else ""
            band = f"{row.milliseconds:.3g} ms ({row.low_ms:.3g} … {row.high_ms:.3g})"
            cells.setdefault(row.model, []).append(speed + band)
        where = f"{precision} on a {self.device} at {self.power_mode}"
        note = f"A {self.label}: TensorRT in {where}, by `export/estimate`."
        heads = ("", *dict.fromkeys(row.size for row in self.rows))
        return Table("", heads, [(model, *of) for model, of in cells.items()], note=note)


def read_latencies(path: Path) -> PredictedLatencies:
    """Return a committed record."""
    return msgspec.json.decode(path.read_bytes(), type=PredictedLatencies)
