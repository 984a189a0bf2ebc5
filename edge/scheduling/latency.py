"""Table of run times by tier, learnt from finished runs: the basis of admission and tier selection."""

from __future__ import annotations

import math
import time
from bisect import bisect_left, insort

#: Weights of a new sample in the mean and in the mean deviation, as TCP estimates round trips (RFC 6298).
_MEAN_WEIGHT, _DEVIATION_WEIGHT = 1 / 8, 1 / 4
_MEDIAN_STEP = 1 / 16
#: Sizes are kept apart by their fourth root of 2, so that one entry holds runs that differ by 19 % at most.
_STEPS_PER_OCTAVE = 4
#: Waking up a worker and coming back takes about half as long.
_BRIEF_SECONDS = 0.00025
#: How long a run has to take for its tier not to be brief, and for how long.
_LONG_SECONDS, _LONG_REMEMBERED_SECONDS = 0.025, 30.0


class LatencyTable:
    """Exponentially weighted means and mean deviations of run times, by the size of the run.

    A size is the number of elements that the time grows with: rows, or rows times tokens. The time of one repeat of a
    program and the number of its repeats are learnt apart, because inputs of one size may need more or fewer repeats.
    Any thread may write and read: what two writers learn in the same moment may count as one run.
    """

    def __init__(self) -> None:
        self._buckets: list[int] = []
        self._means: dict[int, float] = {}
        self._deviations: dict[int, float] = {}
        self._medians: dict[int, float] = {}
        self._repeats = 1.0
        self._brief_after = 0.0
        self._repeats_deviation = 0.0

    def observe(self, size: int, seconds: float, repeats: float = 1.0) -> None:
        """Add one run of ``size`` elements whose program repeated its step ``repeats`` times."""
        if not self._buckets:
            self._repeats = repeats
        error = repeats - self._repeats
        self._repeats += _MEAN_WEIGHT * error
        self._repeats_deviation += _DEVIATION_WEIGHT * (abs(error) - self._repeats_deviation)
        if seconds > _LONG_SECONDS:
            self._brief_after = time.monotonic() + _LONG_REMEMBERED_SECONDS
        seconds /= repeats
        bucket = _bucket(size)
        mean = self._means.get(bucket)
        if mean is None:
            self._deviations[bucket] = seconds / 8
            self._means[bucket] = self._medians[bucket] = seconds
            insort(self._buckets, bucket)
            return
        error = seconds - mean
        self._means[bucket] = mean + _MEAN_WEIGHT * error
        self._deviations[bucket] += _DEVIATION_WEIGHT * (abs(error) - self._deviations[bucket])
        # One step towards each sample, whatever its distance, comes to rest where half of them are on either side.
        self._medians[bucket] *= 1 + _MEDIAN_STEP if seconds > self._medians[bucket] else 1 - _MEDIAN_STEP

    def seconds(self, size: int, deviations: float = 0.0) -> float | None:
        """Predict a run.

        Between two known sizes the prediction is interpolated. Above all of them it grows in proportion, below all of
        them it is that of the smallest: both err towards slow.

        Args:
            size: of the run.
            deviations: how many mean deviations to add to the mean, for a bound that is seldom exceeded.

        Returns:
            Seconds, or None while nothing is known.
        """
        if not self._buckets:
            return None
        bucket = _bucket(size)
        index = bisect_left(self._buckets, bucket)
        if index == len(self._buckets):
            known = self._buckets[-1]
            return self._at(known, deviations) * size / _size(known) if bucket > known else self._at(known, deviations)
        above = self._buckets[index]
        if above == bucket or index == 0:
            return self._at(above, deviations)
        below = self._buckets[index - 1]
        share = (size - _size(below)) / (_size(above) - _size(below))
        low, high = self._at(below, deviations), self._at(above, deviations)
        return low + (high - low) * min(max(share, 0.0), 1.0)

    def usual_seconds(self, size: int) -> float | None:
        """Return about the median of runs of a size, which a few slow ones do not move; None where it is not known."""
        median = self._medians.get(_bucket(size))
        return None if median is None else median * self._repeats

    def is_brief(self, size: int, now: float) -> bool:
        """Return whether a run is over sooner than a worker wakes up, so that the submitting thread may compute it.

        That thread is the event loop, which serves everyone. So a tier whose time depends on more than the size of its
        inputs, and now and then is long, is not brief, however short most of its runs are.

        Args:
            size: of the run.
            now: in ``time.monotonic()`` seconds.
        """
        seconds = self.usual_seconds(size)
        return seconds is not None and seconds < _BRIEF_SECONDS and now >= self._brief_after

    def seconds_per_element(self) -> float | None:
        """Return the least time for an element that any known size took: what a busy server can reach."""
        least = min((self._means[bucket] / _size(bucket) for bucket in list(self._buckets)), default=None)
        return None if least is None else least * self._repeats

    def _at(self, bucket: int, deviations: float) -> float:
        repeats = self._repeats + deviations * self._repeats_deviation
        return (self._means[bucket] + deviations * self._deviations[bucket]) * repeats


def _bucket(size: int) -> int:
    return round(_STEPS_PER_OCTAVE * math.log2(max(size, 1)))


def _size(bucket: int) -> float:
    return float(2 ** (bucket / _STEPS_PER_OCTAVE))
