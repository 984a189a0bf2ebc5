"""Routing policies between a lean and a full tier, and tests of whether they gain more than chance.

Every policy has a score for each item, and sends the lowest scores to the full tier. Where a budget cuts through items
of equal score, each of them goes there with the same probability, so that any mean cost is met exactly; equal scores
for all items are the static mix. Items of infinite score stay with the lean tier at any cost. Costs are in units of the
full tier's time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from edge.datatypes import Array
from export.training.intervals import Difference, draws, simultaneous, with_interval

_PERMUTATIONS = 20
#: Of the items, which candidates for a threshold send to the full tier.
_SHARES = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


class Correctness(NamedTuple):
    """Correctness of both tiers on some items, [n] of 1.0 and 0.0 each, and the cost of the lean tier, below 1."""

    lean_right: Array
    full_right: Array
    lean_cost: float

    @property
    def advantage(self) -> Array:
        """Gain from the full tier's answer: 1, 0 or -1."""
        return self.full_right - self.lean_right


class Policy(NamedTuple):
    """A name, a score of each item [n], low for the full tier, and whether it runs the lean tier first.

    A ``cascade`` does: an escalated item costs the time of both tiers.
    """

    name: str
    scores: Array
    cascade: bool = False


class Judged(msgspec.Struct, frozen=True):
    """A policy at a threshold: its gains over the static mix and over its own permuted scores, at its mean cost."""

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


def right_at_cost(items: Correctness, policy: Policy, mean_cost: float) -> Array:
    """Return the probability of a right answer to each item, [n], at a mean cost, or at the nearest possible one."""
    return np.asarray(items.lean_right + _escalated(items, policy, mean_cost) * items.advantage)


def shuffled_at_cost(items: Correctness, policy: Policy, mean_cost: float) -> Array:
    """Return :func:`right_at_cost`, a mean over permutations of the scores."""
    random = np.random.default_rng(0)
    drawn = [policy._replace(scores=random.permutation(policy.scores)) for _ in range(_PERMUTATIONS)]
    return np.asarray(np.mean([right_at_cost(items, shuffled, mean_cost) for shuffled in drawn], axis=0))


def static(items: Correctness) -> Policy:
    """Return the policy without knowledge, a mix of both tiers; the lean tier alone if the full one is no better."""
    return Policy("static", np.full(len(items.lean_right), 0.0 if items.advantage.mean() > 0 else np.inf))


def oracle(items: Correctness) -> Policy:
    """Return the policy that knows the correct tier in advance."""
    return Policy("oracle", np.where(items.advantage > 0, 0.0, np.inf))


def thresholds(policy: Policy) -> list[float]:
    """Return candidates for a policy's threshold, quantiles of its scores."""
    return [float(value) for value in np.unique(np.quantile(policy.scores, _SHARES))]


def judge(items: Correctness, candidates: Sequence[tuple[Policy, float]]) -> list[Judged]:
    """Compare policies at thresholds with the static mix and with shuffled scores, at equal mean cost.

    The intervals are simultaneous: with 95 % probability all of them hold, also that of the best of many candidates
    (studentised maxima of a paired bootstrap over the items; Efron and Tibshirani 1993, "An Introduction to the
    Bootstrap", chapter 12, for one; Westfall and Young 1993 for many).
    """
    escalated = [(policy.scores < threshold).astype(np.float64) for policy, threshold in candidates]
    costs = [
        items.lean_cost + share * _extra(items, policy)
        for (policy, _), share in zip(candidates, escalated, strict=True)
    ]
    right = [items.lean_right + share * items.advantage for share in escalated]
    shuffled = [
        shuffled_at_cost(items, policy, float(cost.mean())) for (policy, _), cost in zip(candidates, costs, strict=True)
    ]
    over_static = _gains(items, right, costs)
    over_shuffled = over_static - _gains(items, shuffled, costs)
    bands = zip(*(simultaneous(gains[0], gains[1:]) for gains in (over_static, over_shuffled)), strict=True)
    return [
        Judged(policy.name, threshold, float(cost.mean()), float(answers.mean()), *differences)
        for (policy, threshold), cost, answers, differences in zip(candidates, costs, right, bands, strict=True)
    ]


def choose(judged: Sequence[Judged]) -> dict[str, Judged]:
    """Return each policy at the threshold with the largest gain over the static mix, the first of equal ones."""
    best: dict[str, Judged] = {}
    for candidate in judged:
        if candidate.over_static.value > best.setdefault(candidate.policy, candidate).over_static.value:
            best[candidate.policy] = candidate
    return best


def diagnose(chosen: Sequence[Judged]) -> Diagnosis:
    """Recommend the policy that is better than the static mix and than its shuffled scores beyond chance, if any.

    Args:
        chosen: on the items that thresholds were chosen on, not on dev.
    """
    best = max(chosen, key=lambda judged: judged.surest_gain)
    over_static, over_shuffled = (
        with_interval(gain.value, gain.interval, "{:+.4f}".format) for gain in (best.over_static, best.over_shuffled)
    )
    found = (
        f"at its mean cost of {best.mean_cost:.3f}, {best.policy} gains {over_static} of accuracy over the static mix "
        f"and {over_shuffled} over shuffled scores"
    )
    if best.surest_gain > 0:
        return Diagnosis(True, best.policy, f"Both gains are above 0: {found}.")
    return Diagnosis(False, "ship static tiers", f"No policy's gains are both surely above 0: {found}.")


def _extra(items: Correctness, policy: Policy) -> float:
    return 1.0 if policy.cascade else 1.0 - items.lean_cost


def _escalated(items: Correctness, policy: Policy, mean_cost: float) -> Array:
    """Return the probability of each item to go to the full tier, [n], so that the mean cost is met."""
    _, group, sizes = np.unique(policy.scores, return_inverse=True, return_counts=True)
    budget = (mean_cost - items.lean_cost) * len(group) / _extra(items, policy)
    escalated = np.clip((budget - np.cumsum(sizes) + sizes) / sizes, 0, 1)[group]
    return np.where(np.isinf(policy.scores), 0.0, escalated)


def _gains(items: Correctness, right: Sequence[Array], costs: Sequence[Array]) -> Array:
    """Return the accuracy above the static mix at equal mean cost, [1 + resamples, policies]; row 0 is the data."""
    columns, number = np.array([items.lean_right, items.full_right, *right, *costs]), len(items.lean_right)
    counts = (np.bincount(rows, minlength=number) for chunk in draws(number) for rows in chunk)
    means = np.array([columns.mean(axis=1), *(columns @ drawn / number for drawn in counts)])
    lean, full, accuracy, cost = np.split(means, [1, 2, 2 + len(right)], axis=1)
    share = np.clip((cost - items.lean_cost) / (1 - items.lean_cost), 0, 1)  # of a mix that costs the same
    return np.asarray(accuracy - lean - share * (full - lean) * (items.advantage.mean() > 0))
