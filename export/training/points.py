"""Operating points: sizes of the runs that a model is planned for, and the speed of a plan at each."""

from __future__ import annotations

from itertools import product
from typing import Final

import msgspec

from edge.bench.layer_latencies import Comparison, Label
from edge.errors import UsageError

#: The device of a plan for this machine, whose times are measured.
THIS: Final = "this"
#: Most rows of a run of an exported model.
MAX_BATCH_SIZE = 32
_MOST_TOKENS = 512


class Point(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The size of a run, and its share of all runs relative to the other points."""

    tokens: int
    batch: int = 1
    weight: float = 1.0

    @property
    def name(self) -> str:
        """The size for people, such as ``32 tokens, batch 8``."""
        return f"{self.tokens} tokens, batch {self.batch}"


class PointTimes(Point, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A plan at one operating point.

    Attributes:
        dense_ms, milliseconds: of the original and of the plan, on the device of the plan.
        low_ms, high_ms: the error band of a prediction; None for times that are sums of measurements.
        measured: both models in turns on this machine; None for a plan that was not carried out.
        bound: the largest speed-up that the removed multiplications allow; None as for ``measured``.
    """

    dense_ms: float
    milliseconds: float
    low_ms: float | None = None
    high_ms: float | None = None
    measured: Comparison | None = None
    bound: float | None = None

    @property
    def speedup(self) -> float:
        """On the device of the plan."""
        return self.dense_ms / self.milliseconds


class Planned(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a reduced run was planned for.

    Attributes:
        target_speedup: of the mean time of the points, by their weights.
        device: as ``--for`` takes it, or the device of a latency table.
        label: whether the device's times are measured or predicted.
        kept: the original numbers of the layers that are left, from 0.
        original_layers: their number before.
    """

    target_speedup: float
    device: str
    label: Label
    points: tuple[PointTimes, ...]
    kept: tuple[int, ...]
    original_layers: int

    @property
    def measured_speedup(self) -> float:
        """Of the mean time on this machine, of a plan that was carried out."""
        measured = [(point.weight, point.measured) for point in self.points if point.measured]
        before = [weight * one.dense_milliseconds for weight, one in measured]
        return sum(before) / sum(ms / one.ratio for ms, (_, one) in zip(before, measured, strict=True))


def points_of(tokens: str, batches: str) -> tuple[Point, ...]:
    """Return every combination of the sizes in ``--tokens`` and ``--batch``, in their order.

    Each option has numbers with commas between, and behind a number its weight: ``32:3,128``. A weight that is left out
    is 1; that of a combination is the product of both.

    Raises:
        UsageError: a size is no whole number, or is too large, or a weight is not above 0.
    """
    lengths = _sizes("--tokens", tokens, _MOST_TOKENS, "32:3,128:1")
    rows = _sizes("--batch", batches, MAX_BATCH_SIZE, "1:3,8:1")
    return tuple(Point(length, batch, lengths[length] * rows[batch]) for length, batch in product(lengths, rows))


def _sizes(option: str, text: str, most: int, example: str) -> dict[int, float]:
    try:
        pairs = [part.partition(":") for part in text.split(",")]
        weights = [(int(size), float(weight) if colon else 1.0) for size, colon, weight in pairs]
    except ValueError:
        weights = []
    sizes = dict(weights)
    if len(sizes) < max(len(weights), 1) or not all(1 <= size <= most and 0 < weight < 1e9 for size, weight in weights):
        expected = (
            f"different whole numbers up to {most} with commas between, each with its weight above 0 behind a colon"
        )
        fix = f"Write them like {example}; a weight that is left out is 1."
        raise UsageError(option, given=text, expected=f"{expected}, or without", fix=fix)
    return sizes
