"""Histograms with fixed buckets, and percentiles estimated from them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

#: Upper bounds of the latency buckets in ns: 5 µs to 15 s, each √2 times the one before. A percentile estimated from
#: them is at most 41 % off, and usually far less, because it is interpolated.
BUCKETS_NS: tuple[int, ...] = tuple(round(5_000 * 2 ** (step / 2)) for step in range(44))


class Histogram:
    """The count, the total and bucket counts of values; of durations in ns by default.

    A bound belongs to the bucket below it. The last bucket holds the values above every bound.
    """

    __slots__ = ("bounds", "count", "counts", "total")

    def __init__(self, bounds: Sequence[int] = BUCKETS_NS) -> None:
        self.bounds = bounds
        self.count = 0
        self.total = 0
        self.counts = [0] * (len(bounds) + 1)

    def observe(self, value: int) -> None:
        """Count one value."""
        self.count += 1
        self.total += value
        self.counts[bisect_left(self.bounds, value)] += 1

    def percentile(self, percent: float) -> int:
        """Estimate a percentile by interpolation inside its bucket; 0 without values."""
        rank = self.count * percent / 100
        for bucket, seen in enumerate(accumulate(self.counts)):
            if seen >= rank and self.counts[bucket]:
                low = self.bounds[bucket - 1] if bucket else 0
                high = self.bounds[min(bucket, len(self.bounds) - 1)]
                into = (rank - (seen - self.counts[bucket])) / self.counts[bucket]
                return round(low + max(into, 0.0) * (high - low))
        return 0

    def copy(self) -> Histogram:
        """Return an independent copy."""
        other = Histogram(self.bounds)
        other.count, other.total, other.counts = self.count, self.total, list(self.counts)
        return other
