"""Whether a policy is better than no policy beyond chance: intervals that allow for the choice of the threshold."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import scipy.stats

from edge.datatypes import Array
from export.reduce.routing import Items, Outcome, Policy, route, shuffled_at_cost
from export.training.intervals import Difference, draws, with_interval

#: Of the items, which candidates for a threshold send to the full tier.
_SHARES = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


class Judged(msgspec.Struct, frozen=True):
    """A policy at a threshold.

    Attributes:
        mean_cost: in units of the full tier's mean time.
        accuracy: share of correct items.
        over_static: gain over the mix of both tiers at the same mean cost.
        over_shuffled: gain over its own permuted scores at the same mean cost.
    """

    policy: str
    threshold: float
    mean_cost: float
    accuracy: float
    over_static: Difference
    over_shuffled: Difference

    @property
    def surest_gain(self) -> float:
        """The lower end of both gains' intervals."""
        return min(self.over_static.interval[0], self.over_shuffled.interval[0])


class Diagnosis(msgspec.Struct, frozen=True):
    """Recommendation: whether to choose a tier for each item, by which policy, and why."""

    adaptive: bool
    recommendation: str
    reason: str


def auc(scores: Array, positive: Array) -> Array:
    """Return the probability that a positive item has a higher score than a negative one, ties counting half.

    This is Mann and Whitney's U over the number of pairs; 0.5 without pairs. ``positive`` [..., n] is 0 or 1.
    """
    positives = positive.sum(axis=-1)
    pairs = positives * (positive.shape[-1] - positives)
    wins = (scipy.stats.rankdata(scores, axis=-1) * positive).sum(axis=-1) - positives * (positives + 1) / 2
    return np.asarray(np.divide(wins, pairs, out=np.full(np.shape(pairs), 0.5), where=pairs > 0))


def thresholds(policy: Policy) -> list[float]:
    """Return candidates for a policy's threshold, quantiles of its scores."""
    return [float(value) for value in np.unique(np.quantile(policy.scores, _SHARES))]


def judge(items: Items, candidates: Sequence[tuple[Policy, float]]) -> list[Judged]:
    """Compare policies at thresholds with the static mix and with shuffled scores, at equal mean cost.

    The intervals are simultaneous: with 95 % probability all of them hold, also that of the best of many candidates
    (studentised maxima of a paired bootstrap over the items; Efron and Tibshirani 1993, "An Introduction to the
    Bootstrap", chapter 12, for one; Westfall and Young 1993 for many).
    """
    outcomes = [route(items, policy, threshold) for policy, threshold in candidates]
    shuffled = [
        shuffled_at_cost(items, policy, float(outcome.cost.mean()))
        for (policy, _), outcome in zip(candidates, outcomes, strict=True)
    ]
    gains = _gains(items, [*outcomes, *shuffled])
    over_static, without_knowledge = gains[:, : len(outcomes)], gains[:, len(outcomes) :]
    return [
        Judged(policy.name, threshold, float(outcome.cost.mean()), float(outcome.right.mean()), *differences)
        for (policy, threshold), outcome, *differences in zip(
            candidates, outcomes, _band(over_static), _band(over_static - without_knowledge), strict=True
        )
    ]


def choose(judged: Sequence[Judged]) -> dict[str, Judged]:
    """Return each policy at the threshold with the largest gain over the static mix."""
    best: dict[str, Judged] = {}
    for one in judged:
        if one.policy not in best or one.over_static.value > best[one.policy].over_static.value:
            best[one.policy] = one
    return best


def diagnose(chosen: Sequence[Judged]) -> Diagnosis:
    """Recommend the policy that is better than the static mix and than its shuffled scores beyond chance, if any.

    Args:
        chosen: on the items that thresholds were chosen on, not on dev.
    """
    best = max(chosen, key=lambda judged: judged.surest_gain)
    adaptive = best.surest_gain > 0
    found = (
        f"at its mean cost of {best.mean_cost:.3f}, {best.policy} gains {_words(best.over_static)} of accuracy over "
        f"the static mix and {_words(best.over_shuffled)} over shuffled scores"
    )
    if adaptive:
        return Diagnosis(True, best.policy, f"Both gains are above 0: {found}.")
    return Diagnosis(False, "ship static tiers", f"No policy's gains are both surely above 0: {found}.")


def _words(difference: Difference) -> str:
    return with_interval(difference.value, difference.interval, "{:+.4f}".format)


def _gains(items: Items, outcomes: Sequence[Outcome]) -> Array:
    """Return the accuracy above the static mix at equal mean cost, [1 + resamples, outcomes]; row 0 is the data."""
    tiers = [items.lean_right, items.full_right, items.lean_cost, items.full_cost]
    columns = np.array([*tiers, *(o.right for o in outcomes), *(o.cost for o in outcomes)])
    means = _means(columns)
    lean_right, full_right, lean_cost, full_cost = (means[:, [index]] for index in range(len(tiers)))
    right, cost = np.split(means[:, len(tiers) :], 2, axis=1)
    share = np.clip((cost - lean_cost) / (full_cost - lean_cost), 0, 1)  # of a mix that costs the same
    share *= items.full_is_better  # as in policies.static
    return np.asarray(right - (lean_right + share * (full_right - lean_right)))


def _means(columns: Array) -> Array:
    """Return the means of columns [k, n] over the items and over resamples of them, [1 + resamples, k]."""
    items = columns.shape[1]
    counts = (np.bincount(rows, minlength=items) for chunk in draws(items) for rows in chunk)
    return np.array([columns.mean(axis=1), *(columns @ one / items for one in counts)])


def _band(samples: Array) -> list[Difference]:
    """Return values with simultaneous intervals for samples [1 + resamples, k], whose first row is the values."""
    values, resampled = samples[0], samples[1:]
    deviation = resampled.std(axis=0)
    relative = (resampled - values) / np.where(deviation > 0, deviation, 1.0)
    above, below = (np.quantile(side.max(axis=1), 0.975) for side in (relative, -relative))
    lows, highs = values - above * deviation, values + below * deviation
    return [Difference(float(v), (float(a), float(b))) for v, a, b in zip(values, lows, highs, strict=True)]
