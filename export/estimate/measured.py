"""Latency of a tier put together from a measured latency table: the sum of its layers' halves, embeddings and head."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from edge.profiling.table import LatencyTable, Shape, check_key
from export.estimate.devices import DEVICES
from export.estimate.model import RUNTIME
from export.estimate.operations import Halves

_FIX = "Give the table of this board and power mode with TensorRT, or leave --latency-table out."


class MeasuredTable(NamedTuple):
    """A measured latency table, and its file."""

    path: Path
    table: LatencyTable

    @classmethod
    def read(cls, path: Path, device: str, power_mode: str) -> MeasuredTable:
        """Read a table.

        Args:
            device: a name in :data:`export.estimate.devices.DEVICES`.

        Raises:
            UsageError: it is no table, a prediction itself, or of another runtime, board or power mode.
        """
        table = LatencyTable.read(path)
        board = table.key.get("device", "")
        name = DEVICES[device].name
        check_key(
            f"latency table {path}",
            table.key | {"label": table.label, "device": name if _is(board, device) else board},
            {"label": "measured", "runtime": RUNTIME, "device": name, "power_mode": power_mode},
            _FIX,
        )
        return cls(path, table)

    def check_model(self, dense: Halves, dim: int) -> None:
        """Refuse a table of another model.

        Raises:
            UsageError: the layers of the first tier are not the table's dense layer.
        """
        shapes = {Shape(*heads, units) for heads, units in zip(dense.attention, dense.feed_forward, strict=False)}
        found = " and ".join(sorted(shape.name for shape in shapes)) or "no layers"
        check_key(
            f"latency table {self.path}",
            self.table.key,
            {"dim": str(dim), "dense": found},
            "Give a table of this model, or leave --latency-table out.",
        )

    def milliseconds(self, halves: Halves, layers: int, precision: str, tokens: int | None) -> float | None:
        """Return the latency of a tier; None where the table lacks its precision, length or a shape.

        Args:
            layers: of the original; where it has more than the tier, the tier's halves were removed.
        """
        if precision != self.table.key.get("precision") or tokens is None:
            return None
        dense = next((t.shape for t in self.table.timings if t.shape.name == self.table.key.get("dense")), None)
        rest = self.table.find_rest(tokens)
        whole = self.table.find(dense, tokens) if dense else None
        if dense is None or whole is None or rest is None:
            return None
        removed = [(0, 0)] * (layers - len(halves.attention)), [0] * (layers - len(halves.feed_forward))
        shapes = [Shape(*heads, dense.ffn_dim) for heads in (*halves.attention, *removed[0])]
        shapes += [Shape(dense.num_heads, dense.head_dim, units) for units in (*halves.feed_forward, *removed[1])]
        found = [self.table.find(shape, tokens) for shape in shapes]
        times = [1 / comparison.ratio - 0.5 for comparison in found if comparison]
        if len(times) < len(shapes):
            return None
        return (whole.dense_milliseconds - whole.floor_milliseconds) * (sum(times) + rest.dense_layers)


def _is(board: str, device: str) -> bool:
    """Return whether a name such as "NVIDIA Jetson Orin Nano Super Developer Kit" is that of a device."""
    words = board.lower().split()
    return {"orin", "nano"} <= set(words) and ("super" in words) == device.endswith("super")
