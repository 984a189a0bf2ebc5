"""Tier selection: by name, by the router, or the fullest tier that meets the deadline or carries the load.

A tier that another one beats in both time and accuracy is chosen by name alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

from edge.bundles.manifest import Measure
from edge.errors import InvalidRequest
from edge.programs.program import AUTO
from edge.scheduling.tier_executor import TierExecutor

#: Metrics of which more is better. Others do not compare tiers.
_MORE_IS_BETTER: Final = frozenset(
    ("accuracy", "agreement", "cosine", "exact_match", "f1", "macro_f1", "matthews", "pearson", "spearman")
)
_SPLIT: Final = re.compile(r"(?P<data>.+), tier (?P<tier>[^\s,]+)(?: on (?P<runtime>[^\s,]+))?")

#: Values of a tier, more of which is better, by metric, data and number of items.
Accuracies = Mapping[tuple[str, str, int], float]
#: A tier must be predicted to use at most this part of the time, because a late answer is worth nothing.
_ROOM = 0.75
PINNED, ROUTER, DEADLINE, LOAD = POLICIES = ("pinned", "router", "deadline", "load")


def accuracies(measures: Iterable[Measure], runtimes: Mapping[str, str]) -> dict[str, Accuracies]:
    """Return what is known of each tier.

    A measure is of the tier that its split ends with: ``DATA, tier NAME``, or ``DATA, tier NAME on RUNTIME`` if it is
    of the file for this runtime alone. ``runtimes`` are those of the files that compute, by tier.
    """
    by_tier: dict[str, dict[tuple[str, str, int], float]] = {tier: {} for tier in runtimes}
    for measure in measures:
        split = _SPLIT.fullmatch(measure.split)
        if not split or measure.metric not in _MORE_IS_BETTER:
            continue
        tier, runtime = split["tier"], split["runtime"]
        if tier in by_tier and runtime in (None, runtimes[tier]):
            by_tier[tier][measure.metric, split["data"], measure.n] = measure.value
    return {**by_tier}


def is_as_accurate(candidate: Accuracies, reference: Accuracies) -> bool:
    """Return whether a tier is known to be at least as accurate as another one, by all measures that both have."""
    common = candidate.keys() & reference.keys()
    return bool(common) and all(candidate[key] >= reference[key] for key in common)


class Choice(NamedTuple):
    """The executor of the selected tier, and the reason: that the request names it (``requested``), or the policy.

    If the policy ``deadline`` or ``load`` did not choose a leaner tier, the reason is ``full``.
    """

    executor: TierExecutor
    reason: str
    best_effort: bool = False  # whether a loop is cut at the deadline, and answers with its current prediction


class Demand(NamedTuple):
    """A request and the state of the server, for policies that depend on them. Times are in seconds."""

    now: float  # by ``time.monotonic()``
    size: int  # elements of the request, as the assembler counts them
    left: float | None  # until its deadline
    finish: Callable[[TierExecutor], float]  # predicts the time until an executor answers it
    fullness: float  # of the queue, 0 to 1
    instances: int  # runs computed at once


class LoadLevel:
    """Number of tiers that a model steps down under load: down at once, up only when that will last.

    It steps down at a pressure above :attr:`HIGH`, to the first tier that keeps up with the arrivals, and up after
    :attr:`HOLD` seconds in which the fuller tier would have been busy for less than :attr:`HEADROOM` of the time.
    """

    HIGH, LOW = 0.5, 0.25
    SETTLE, HOLD = 0.25, 2.0
    HEADROOM = 0.7

    def __init__(self) -> None:
        self.level = 0
        self._rate = 0.0  # elements per second, averaged over about one
        self._seen = self._changed = self._settled = -math.inf
        self._before: float | None = 0.0
        self._calm_since = math.inf

    def arrived(self, now: float, size: int) -> None:
        """Count a request, whether it is admitted later or not."""
        self._rate = self._rate * math.exp(self._seen - now) + size

    def update(self, now: float, pressure: float, waiting_seconds: float, costs: Sequence[float]) -> int:
        """Return the level for a request that arrives now.

        ``pressure`` is 0 if no request waits, 1 if requests are about to be rejected; ``waiting_seconds`` is the time
        of those that wait; ``costs`` are device seconds per element of each tier, the fullest first.
        """
        level = min(self.level, len(costs) - 1)
        if pressure > self.HIGH:
            self._calm_since = math.inf
            if level + 1 < len(costs) and now >= self._settled:
                if self._before is not None and pressure >= self._before:
                    keeping_up = (tier for tier in range(level + 1, len(costs)) if self._rate * costs[tier] < 1)
                    level = next(keeping_up, len(costs) - 1)
                    self._changed, self._before = now, None
                else:
                    self._before = pressure
                self._settled = now + max(waiting_seconds, self.SETTLE)
        elif level and pressure < self.LOW and self._rate * costs[level - 1] < self.HEADROOM:
            # No request has arrived since the last one, so that time was calm, too.
            self._calm_since = min(self._calm_since, max(self._seen, self._changed))
            if now - self._calm_since >= self.HOLD:
                level -= 1
                self._changed, self._calm_since = now, math.inf
        else:
            self._calm_since = math.inf
        if pressure <= self.HIGH:
            self._before = 0.0
        self.level, self._seen = level, now
        return level


class TierSelector:
    """Selects the tier of each request to one model; ``policy`` is for those that name neither a tier nor a policy.

    ``executors`` begin with the full tier; the router's is under :data:`AUTO`. ``known`` are accuracies of tiers.
    """

    def __init__(
        self,
        model: str,
        executors: Mapping[str, TierExecutor],
        policy: str,
        known: Mapping[str, Accuracies] = MappingProxyType({}),
    ) -> None:
        self._model, self._executors = model, executors
        self._full = next(iter(executors.values()))
        #: The tiers that are known to be as accurate as a tier.
        self._rivals = {
            executors[tier]: [
                executors[other] for other in known if other != tier and is_as_accurate(known[other], accuracy)
            ]
            for tier, accuracy in known.items()
        }
        self._load = LoadLevel()
        self.policy = PINNED if policy == ROUTER and AUTO not in executors else policy

    def choose(self, tier: str | None, policy: str | None, demand: Callable[[], Demand]) -> Choice:
        """Return the choice for a request with these parameters; ``demand`` is called only if the policy needs it.

        Raise an InvalidRequest if the tier or policy is unknown, or they contradict each other.
        """
        if tier not in (None, AUTO):
            return Choice(self._named(tier, policy), "requested")
        policy = self._policy(tier, policy)
        if policy == ROUTER:
            return Choice(self._executors[AUTO], "router")
        if policy == PINNED:
            return Choice(self._full, "pinned")
        return self._elastic(demand(), policy)

    def _named(self, tier: str, policy: str | None) -> TierExecutor:
        subject = f"parameter 'tier' of {self._model!r}"
        if tier not in self._executors:
            expected = f"one of {', '.join([name for name in self._executors if name != AUTO] + [AUTO])}"
            fix = f"Leave it out for the policy of this model, {self.policy}."
            raise InvalidRequest(subject, given=tier, expected=expected, fix=fix)
        if policy not in (None, PINNED):
            fix = "Name a tier or a policy, not both."
            raise InvalidRequest(subject, given=tier, expected=f"{AUTO} with the policy {policy}", fix=fix)
        return self._executors[tier]

    def _policy(self, tier: str | None, policy: str | None) -> str:
        if policy is None:
            if tier is None or self.policy != PINNED:
                return self.policy
            return ROUTER if AUTO in self._executors else LOAD
        known = [known for known in POLICIES if known != ROUTER or AUTO in self._executors]
        if policy not in known:
            subject, fix = f"parameter 'policy' of {self._model!r}", f"Leave it out for {self.policy}."
            raise InvalidRequest(subject, given=policy, expected=f"one of {', '.join(known)}", fix=fix)
        return policy

    def _elastic(self, demand: Demand, policy: str) -> Choice:
        ladder = self._ladder(demand.size, policy)
        first = self._level(demand, ladder) if policy == LOAD else 0
        left = math.inf if demand.left is None else _ROOM * demand.left
        fitting = (executor for executor in ladder[first:] if left == math.inf or demand.finish(executor) <= left)
        executor = next(fitting, ladder[-1])  # without any, admission decides
        reason = policy if executor is not ladder[0] else "full"
        return Choice(executor, reason, best_effort=policy == DEADLINE and executor.iterative)

    def _ladder(self, size: int, policy: str) -> list[TierExecutor]:
        """Return the full tier and those measured to be faster, the slowest first, without those that another one
        beats.

        Times are compared at a size that all were measured up to, because predictions beyond that err towards slow.
        """
        tiers = [each for name, each in self._executors.items() if name != AUTO and each.latency.largest]
        size = min([size, *(each.latency.largest for each in tiers)])
        seconds = {each: each.latency.seconds(size) or math.inf for each in tiers}
        limit = seconds.get(self._full, 0.0)
        faster = [each for each in tiers if seconds[each] < limit]

        def beaten(tier: TierExecutor) -> bool:
            others = [other for other in self._rivals.get(tier, ()) if seconds.get(other, math.inf) < seconds[tier]]
            return any(policy != LOAD or _cost(other) <= _cost(tier) for other in others)

        left = [each for each in faster if not beaten(each)]
        return [self._full, *sorted(left, key=lambda each: -seconds[each])]

    def _level(self, demand: Demand, ladder: list[TierExecutor]) -> int:
        self._load.arrived(demand.now, demand.size)
        executor = ladder[min(self._load.level, len(ladder) - 1)]
        pressure, finish = demand.fullness, demand.finish(executor)
        if demand.left is not None:
            pressure = max(pressure, finish / demand.left if demand.left > 0 else math.inf)
        costs = [_cost(each) / demand.instances for each in ladder]
        return self._load.update(demand.now, pressure, finish, costs)


def _cost(executor: TierExecutor) -> float:
    return executor.latency.seconds_per_element() or 0.0
