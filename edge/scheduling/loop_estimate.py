"""Predictions of how many loops a request takes, learnt by tolerance, or by budget where there is none."""

from __future__ import annotations

import math

from edge.programs.program import LoopLimits
from edge.scheduling.latency import LatencyModel

#: Weights of a new sample, as in :mod:`edge.scheduling.latency`.
_MEAN_WEIGHT, _DEVIATION_WEIGHT = 1 / 8, 1 / 4


class LoopEstimate:
    """Exponentially weighted means and mean deviations of the loops that requests take, by octaves of their tolerance.

    Texts have no tolerance: their tokens, a loop for each, are learnt by ``max_loops``. Above all known ones they are
    the same share of it; that errs towards many.

    Any thread may read and write; of two samples written at the same moment, one may be lost.
    """

    def __init__(self) -> None:
        self._means: dict[int, float] = {}
        self._deviations: dict[int, float] = {}
        self._by_budget = LatencyModel()  # of loops instead of seconds

    def observe(self, limits: LoopLimits, loops: float) -> None:
        """Add a request. One that used up its budget shows only that it needs at least as many loops."""
        if not limits.tolerance:
            self._by_budget.observe_step(limits.max_loops, loops)
            return
        bucket = _bucket(limits)
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

        The prediction for an unknown tolerance is that of the nearest known one if it is coarser. If it is finer, the
        loops grow with its octaves, as they do where each loop removes an equal share of the residual.
        """
        if not limits.tolerance:
            return min(self._by_budget.step_seconds(limits.max_loops, deviations) or math.inf, limits.max_loops)
        if not self._means:
            return limits.max_loops
        bucket = _bucket(limits)
        known = min(list(self._means), key=lambda other: abs(other - bucket))
        loops = self._means[known] + deviations * self._deviations[known]
        return min(loops * max(bucket, known, 1) / max(known, 1), limits.max_loops)


def _bucket(limits: LoopLimits) -> int:
    return round(-math.log2(limits.tolerance))
