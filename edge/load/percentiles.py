"""Latency percentiles."""

from __future__ import annotations

import msgspec
import numpy as np

from edge.datatypes import Array

_PERCENTS = (50.0, 90.0, 95.0, 99.0, 99.9)


class Percentiles(msgspec.Struct, frozen=True):
    """Exact percentiles in ms, interpolated between neighbours; all 0 without any values."""

    count: int = 0
    p50_ms: float = 0.0
    p90_ms: float = 0.0
    p95_ms: float = 0.0
    p99_ms: float = 0.0
    p99_9_ms: float = 0.0
    max_ms: float = 0.0

    @classmethod
    def of(cls, seconds: Array) -> Percentiles:
        """Return the percentiles of durations in seconds [values]."""
        if not len(seconds):
            return cls()
        values = np.percentile(seconds * 1e3, [*_PERCENTS, 100.0]).tolist()
        return cls(len(seconds), *values)
