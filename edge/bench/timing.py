"""Latency percentiles, and timing in turns, because clocks and other load change times more than their ratios."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import msgspec
import numpy as np

from edge.bench.layer_latencies import Comparison
from edge.datatypes import Array
from edge.runner import Runner

#: Number of uncounted calls before the others.
WARM_UP = 5
#: Lower bound of a model's time above an empty one's, as a share of the dense model's.
_LEAST_SHARE = 0.01

K = TypeVar("K")


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
    def of(cls, seconds: Array | Sequence[float]) -> Percentiles:
        """Return the percentiles of durations in seconds [values]."""
        if not len(seconds):
            return cls()
        return cls(len(seconds), *np.percentile(np.multiply(seconds, 1e3), (50, 90, 95, 99, 99.9, 100)).tolist())


def turns(keys: Sequence[K], number: int) -> Sequence[K]:
    """Return the keys in a random order that depends on ``number``, so that none always follows the same other one."""
    return random.Random(number).sample(keys, len(keys))


def seconds_in_turns(functions: Mapping[K, Callable[[], object]], calls: int) -> dict[K, Array]:
    """Return the seconds of each function, call by call, [calls], after uncounted calls."""
    seconds: dict[K, Array] = {key: np.zeros(calls) for key in functions}
    for call in range(-WARM_UP, calls):
        for key in turns(list(functions), call):
            started = time.perf_counter()
            functions[key]()
            if call >= 0:
                seconds[key][call] = time.perf_counter() - started
    return seconds


def times_in_turns(runners: Mapping[K, Runner], feeds: Mapping[str, Array], calls: int) -> dict[K, Array]:
    """Return the seconds of each runner for the same inputs, call by call, [calls], after uncounted calls."""
    return seconds_in_turns({key: partial(runner.infer, feeds) for key, runner in runners.items()}, calls)


def compared(dense: Array, other: Array) -> Comparison:
    """Return the comparison of two models from their seconds, call by call: neighbouring calls share the clock."""
    ratio = float(np.median(dense / other))
    return Comparison(_median_ms(other), _median_ms(dense), ratio, len(dense))


def compared_above(floor: Array, dense: Array, other: Array) -> Comparison:
    """Return the comparison of two models without the time of an empty one, such as copies to a device."""
    beyond = float(np.median(dense - floor))
    above = max(float(np.median(other - floor)), _LEAST_SHARE * beyond)
    return Comparison(_median_ms(other), _median_ms(dense), beyond / above, len(dense), _median_ms(floor))


def _median_ms(seconds: Array) -> float:
    return float(1e3 * np.median(seconds))
