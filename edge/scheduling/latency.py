"""Latency predictions: run times by size, loops by tolerance, and a correction from observed deadline misses."""

from __future__ import annotations

import math
import time
from bisect import bisect_left, insort
from functools import lru_cache
from typing import NamedTuple

from edge.programs.program import LoopLimits

#: Weights of a new sample in the mean and in the mean deviation, as TCP estimates round trips (RFC 6298).
_MEAN_WEIGHT, _DEVIATION_WEIGHT = 1 / 8, 1 / 4
_MEDIAN_STEP = 1 / 16
_FIRST_RUNS = 8
#: A bucket of sizes spans a fourth root of 2, so the runs in it differ by at most 19 %.
_BUCKETS_PER_OCTAVE = 4
#: About twice the time to wake a worker and return from it.
_BRIEF_SECONDS = 0.00025
#: A run longer than the first makes its tier not brief for the time of the second.
_LONG_SECONDS, _LONG_REMEMBERED_SECONDS = 0.025, 30.0

#: The most that one missed deadline raises the correction, and that one met deadline lowers it. In a simulated queue
#: with three times the load that it can take, whose runs take one or three times as long by turns, 97 % of the admitted
#: requests meet their deadline with these, 86 % without, and 4 % more are answered in time.
_UP, _DOWN = 1.25, 0.999
#: Above this, a busy server would reject so much that it idles in between.
_MOST = 2.5
#: Time constant with which the correction decays to 1, so that a server that rejects everything tries again.
_FORGET_SECONDS = 30.0
#: An estimate below this part of the time to its deadline proves nothing: even a large multiple would be in time.
_SIGNIFICANT = 0.5
#: A client that cancels this shortly before its deadline has given up because of it.
_CLOCK_SECONDS = 0.005


class LatencyModel:
    """Exponentially weighted means and mean deviations of run times, by size: rows, or rows times tokens.

    A program's step and its repeats are learnt apart. Any thread may read and write; a sample may be lost.
    """

    def __init__(self) -> None:
        self._buckets: list[int] = []
        self._means: dict[int, float] = {}
        self._deviations: dict[int, float] = {}
        self._medians: dict[int, float] = {}
        self._runs: dict[int, int] = {}
        self._repeats: float | None = None
        self._repeats_deviation = 0.0
        self._brief_after = 0.0

    def observe(self, size: int, seconds: float, repeats: float = 1.0) -> None:
        """Add one run of ``size`` elements whose program repeated its step ``repeats`` times."""
        self.observe_repeats(repeats)
        if seconds > _LONG_SECONDS:
            self._brief_after = time.monotonic() + _LONG_REMEMBERED_SECONDS
        self.observe_step(size, seconds / repeats)

    def observe_repeats(self, repeats: float) -> None:
        """Add a request whose steps are added one by one."""
        mean = repeats if self._repeats is None else self._repeats
        error = repeats - mean
        self._repeats = mean + _MEAN_WEIGHT * error
        self._repeats_deviation += _DEVIATION_WEIGHT * (abs(error) - self._repeats_deviation)

    def observe_step(self, size: int, seconds: float) -> None:
        """Add one step of ``size`` elements."""
        bucket = _bucket(size)
        mean = self._means.get(bucket)
        if mean is None:
            self._runs[bucket], self._deviations[bucket], self._medians[bucket] = 1, seconds / 8, seconds
            self._means[bucket] = seconds  # last: other threads look here for what is known
            insort(self._buckets, bucket)
            return
        self._runs[bucket] += 1
        error = seconds - mean
        self._means[bucket] = mean + _MEAN_WEIGHT * error
        self._deviations[bucket] += _DEVIATION_WEIGHT * (abs(error) - self._deviations[bucket])
        # Steps of equal size towards each sample converge where half of the samples are on either side. From the first
        # runs, which may take a hundred times as long as later ones, that would take too many.
        median = self._medians[bucket]
        if self._runs[bucket] <= _FIRST_RUNS and seconds < median / 2:
            self._medians[bucket] = seconds
        else:
            self._medians[bucket] = median * (1 + _MEDIAN_STEP if seconds > median else 1 - _MEDIAN_STEP)

    def seconds(self, size: int, deviations: float = 0.0) -> float | None:
        """Predict a run's seconds; ``deviations`` widens it to an upper bound. None without runs."""
        step = self.step_seconds(size, deviations)
        return None if step is None else step * self._expected_repeats(deviations)

    def step_seconds(self, size: int, deviations: float = 0.0) -> float | None:
        """Predict the time of one step; as :meth:`seconds`.

        It is interpolated between known sizes. Above all of them it grows in proportion, below it is the smallest's.
        """
        bucket = _bucket(size)
        if bucket in self._means:
            return self._at(bucket, deviations)
        if not self._buckets:
            return None
        index = bisect_left(self._buckets, bucket)
        if index == len(self._buckets):
            largest = self._buckets[-1]
            return self._at(largest, deviations) * size / _size(largest)
        above = self._buckets[index]
        if not index:
            return self._at(above, deviations)
        below = self._buckets[index - 1]
        share = (size - _size(below)) / (_size(above) - _size(below))
        low, high = self._at(below, deviations), self._at(above, deviations)
        return low + (high - low) * share

    @property
    def largest(self) -> int:
        """The largest size with a run, to a fourth root of 2; 0 without runs."""
        return round(_size(self._buckets[-1])) if self._buckets else 0

    def usual_seconds(self, size: int, least_runs: int = 1) -> float | None:
        """Return about the median of runs of a size, which a few slow ones do not move; None after fewer runs."""
        bucket = _bucket(size)
        known = self._runs.get(bucket, 0) >= least_runs
        return self._medians[bucket] * self._expected_repeats() if known else None

    def is_brief(self, size: int, now: float) -> bool:
        """Return whether a run ends sooner than a worker wakes up, so that the submitting thread may compute it.

        That is the event loop, which serves everyone, so a tier with one long run is not brief for a while.
        """
        seconds = self.usual_seconds(size)
        return seconds is not None and seconds < _BRIEF_SECONDS and now >= self._brief_after

    def seconds_per_element(self) -> float | None:
        """Return the least time per element at any known size, which a busy server can reach."""
        least = min((self._means[bucket] / _size(bucket) for bucket in list(self._buckets)), default=None)
        return None if least is None else least * self._expected_repeats()

    def _at(self, bucket: int, deviations: float) -> float:
        return self._means[bucket] + deviations * self._deviations[bucket]

    def _expected_repeats(self, deviations: float = 0.0) -> float:
        return (1.0 if self._repeats is None else self._repeats) + deviations * self._repeats_deviation


class LoopEstimate:
    """Exponentially weighted means and mean deviations of the loops that requests take, by octaves of their tolerance.

    Any thread may read and write; of two samples written at the same moment, one may be lost.
    """

    def __init__(self) -> None:
        self._means: dict[int, float] = {}
        self._deviations: dict[int, float] = {}

    def observe(self, limits: LoopLimits, loops: float) -> None:
        """Add a request. One that used up its budget shows only that it needs at least as many loops."""
        bucket = _octave(limits)
        mean = self._means.get(bucket)
        if mean is None:
            self._deviations[bucket] = loops / 8
            self._means[bucket] = loops
        elif loops > mean or loops < limits.max_loops:
            error = loops - mean
            self._means[bucket] = mean + _MEAN_WEIGHT * error
            self._deviations[bucket] += _DEVIATION_WEIGHT * (abs(error) - self._deviations[bucket])

    def loops(self, limits: LoopLimits, deviations: float = 0.0) -> float:
        """Predict the loops of a request, plus some mean deviations, within its budget; without samples, the budget.

        For a tolerance finer than known ones it grows with the octaves, as where each loop removes an equal share.
        """
        if not self._means:
            return limits.max_loops
        bucket = _octave(limits)
        known = min(list(self._means), key=lambda other: abs(other - bucket))
        loops = self._means[known] + deviations * self._deviations[known]
        return min(loops * max(bucket, known, 1) / max(known, 1), limits.max_loops)


class LatencyEstimate(NamedTuple):
    """The prediction that admitted a request."""

    at: float  # when it was made, by ``time.monotonic()``
    seconds: float  # to the answer, without correction
    left_seconds: float  # to the deadline


class LatencyCorrection:
    """Factor of at least 1 for latency predictions, learnt from deadlines met and missed. The scheduler's lock guards
    it.

    It covers a machine that slows down, which averages follow late, and requests that lengthen the runs before others.
    """

    def __init__(self) -> None:
        self._factor = 1.0
        self._at = -math.inf

    def factor(self, now: float) -> float:
        """Return the factor at ``time.monotonic()`` seconds."""
        if self._factor == 1.0:
            return 1.0
        return 1.0 + (self._factor - 1.0) * math.exp(min(self._at - now, 0.0) / _FORGET_SECONDS)

    def answered(self, now: float, estimate: LatencyEstimate) -> None:
        """Learn from a request whose run has ended, in time or too late."""
        if now - estimate.at > estimate.left_seconds:
            self._raise(now, estimate)
        elif self._is_significant(now, estimate):
            self._factor, self._at = max(self.factor(now) * _DOWN, 1.0), now

    def abandoned(self, now: float, estimate: LatencyEstimate) -> None:
        """Learn from a request that left the queue unanswered, if its time had run out."""
        if now - estimate.at > estimate.left_seconds - _CLOCK_SECONDS:
            self._raise(now, estimate)

    def _raise(self, now: float, estimate: LatencyEstimate) -> None:
        if self._is_significant(now, estimate):
            factor = self.factor(now)
            # Up to the error of the prediction, but in several steps: one slow run makes many requests late.
            error = (now - estimate.at) / estimate.seconds
            self._factor, self._at = min(factor * _UP, max(error * _UP, factor), _MOST), now

    def _is_significant(self, now: float, estimate: LatencyEstimate) -> bool:
        return estimate.seconds * self.factor(now) >= _SIGNIFICANT * estimate.left_seconds


@lru_cache
def _bucket(size: int) -> int:
    return round(_BUCKETS_PER_OCTAVE * math.log2(max(size, 1)))


def _size(bucket: int) -> float:
    return float(2 ** (bucket / _BUCKETS_PER_OCTAVE))


def _octave(limits: LoopLimits) -> int:
    return round(-math.log2(limits.tolerance))
