"""Routing policies, their cost and accuracy by item, and controls of exactly the same cost.

Every policy has a score for each item, and sends the lowest scores to the full tier. Where a budget cuts through items
of equal score, each of them goes there with the same probability, so that any mean cost is met exactly; equal scores
for all items are the static mix. Items of infinite score stay with the lean tier at any cost.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np

from edge.datatypes import Array

_PERMUTATIONS = 20
_CURVE_POINTS = 51


class Items(msgspec.Struct, frozen=True):
    """Correctness and cost of both tiers on some items, [n] each.

    Attributes:
        lean_right: 1.0 where the lean tier is right, else 0.0.
        full_right: 1.0 where the full tier is right, else 0.0.
        lean_cost: the lean tier's time, in units of the full tier's mean time.
        full_cost: the full tier's time, larger for every item.
    """

    lean_right: Array
    full_right: Array
    lean_cost: Array
    full_cost: Array

    @property
    def advantage(self) -> Array:
        """Gain from the full tier's answer: 1, 0 or -1."""
        return self.full_right - self.lean_right

    @property
    def full_is_better(self) -> bool:
        """Whether the full tier is right more often."""
        return bool(self.advantage.mean() > 0)


class Policy(NamedTuple):
    """A name, a score of each item [n], low for the full tier, and whether it runs the lean tier first.

    A ``cascade`` does: an escalated item costs the time of both tiers.
    """

    name: str
    scores: Array
    cascade: bool = False


class Outcome(NamedTuple):
    """Correctness of a policy on each item, 0 to 1, and its cost, [n] both; expected values where chance decides."""

    right: Array
    cost: Array


def route(items: Items, policy: Policy, threshold: float) -> Outcome:
    """Return the outcome of a policy that escalates items with a score below a threshold."""
    return _outcome(items, policy, (policy.scores < threshold).astype(np.float64))


def at_cost(items: Items, policy: Policy, mean_cost: float) -> Outcome:
    """Return the outcome of a policy at a mean cost, or at the nearest one that it can have."""
    return _outcome(items, policy, _escalated(items, policy, mean_cost))


def shuffled_at_cost(items: Items, policy: Policy, mean_cost: float) -> Outcome:
    """Return the mean outcome of a policy at a mean cost with its scores permuted."""
    random = np.random.default_rng(0)
    drawn = (policy._replace(scores=random.permutation(policy.scores)) for _ in range(_PERMUTATIONS))
    return _outcome(items, policy, np.mean([_escalated(items, one, mean_cost) for one in drawn], axis=0))


def static(items: Items) -> Policy:
    """Return the policy without knowledge: a mix on the straight line from the lean to the full tier.

    If the full tier is no better, it is the lean tier alone at any cost.
    """
    return Policy("static", np.full(len(items.lean_right), 0.0 if items.full_is_better else np.inf))


def random(items: Items) -> Policy:
    """Return a random policy; its distance from the static mix is chance."""
    return Policy("random", np.random.default_rng(0).random(len(items.lean_right)))


def oracle(items: Items) -> Policy:
    """Return the policy that knows the correct tier in advance."""
    return Policy("oracle", np.where(items.advantage > 0, 0.0, np.inf))


def mean_costs(items: Items) -> Array:
    """Return mean costs from always lean to always full, where curves are drawn."""
    return np.linspace(items.lean_cost.mean(), items.full_cost.mean(), _CURVE_POINTS)


def curve(items: Items, policy: Policy) -> Array:
    """Return a policy's accuracy at each of :func:`mean_costs`."""
    return np.array([at_cost(items, policy, cost).right.mean() for cost in mean_costs(items)])


def area(items: Items, policy: Policy) -> float:
    """Return the area between a policy's curve and the static line, as a mean of accuracy over the range of costs."""
    above = curve(items, policy) - curve(items, static(items))
    return float((above[1:] + above[:-1]).mean() / 2)  # trapezoids of equal width


def _extra(items: Items, policy: Policy) -> Array:
    return items.full_cost if policy.cascade else items.full_cost - items.lean_cost


def _escalated(items: Items, policy: Policy, mean_cost: float) -> Array:
    """Return the probability of each item to go to the full tier, [n], so that the mean cost is met."""
    _, group = np.unique(policy.scores, return_inverse=True)
    sizes = np.bincount(group, _extra(items, policy))
    before = np.cumsum(sizes) - sizes
    budget = mean_cost * len(group) - items.lean_cost.sum()
    escalated = np.clip((budget - before) / sizes, 0, 1)[group]
    return np.where(np.isinf(policy.scores), 0.0, escalated)


def _outcome(items: Items, policy: Policy, escalated: Array) -> Outcome:
    right = items.lean_right + escalated * items.advantage
    return Outcome(right, items.lean_cost + escalated * _extra(items, policy))
