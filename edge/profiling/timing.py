"""Timing of models in turns, because clocks and other load change times more than their ratios."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np

from edge.bench.layer_latencies import Comparison
from edge.datatypes import Array
from edge.runner import Runner

#: Number of uncounted calls before the others.
WARM_UP = 5
#: Lower bound of a model's time above an empty one's, as a share of the dense model's.
_LEAST_SHARE = 0.01

K = TypeVar("K")


def times_in_turns(runners: Mapping[K, Runner], feeds: Mapping[str, Array], calls: int) -> dict[K, Array]:
    """Return the seconds of each runner for the same inputs, call by call, [calls], after uncounted calls."""
    seconds: dict[K, Array] = {key: np.zeros(calls) for key in runners}
    for call in range(-WARM_UP, calls):
        for key in turns(list(runners), call):
            started = time.perf_counter()
            runners[key].infer(feeds)
            if call >= 0:
                seconds[key][call] = time.perf_counter() - started
    return seconds


def turns(keys: Sequence[K], number: int) -> Sequence[K]:
    """Return the keys in a random order that depends on ``number``, so that none always follows the same other one."""
    return random.Random(number).sample(keys, len(keys))


def compared(dense: Array, other: Array) -> Comparison:
    """Return the comparison of two models from their seconds, call by call: neighbouring calls share the clock."""
    ratio = float(np.median(dense / other))
    return Comparison(_median_ms(other), _median_ms(dense), ratio, len(dense))


def compared_above(floor: Array, dense: Array, other: Array) -> Comparison:
    """Return the comparison of two models without the time of an empty one, such as copies to a device."""
    beyond = float(np.median(dense - floor))
    own = max(float(np.median(other - floor)), _LEAST_SHARE * beyond)
    return Comparison(_median_ms(other), _median_ms(dense), beyond / own, len(dense), _median_ms(floor))


def _median_ms(seconds: Array) -> float:
    return float(1e3 * np.median(seconds))
