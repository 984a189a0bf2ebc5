"""Tier selection for requests that leave it open: a fixed tier, the router's, or one that is lean enough for now."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from edge.errors import InvalidRequest
from edge.programs.cascade import AUTO
from edge.scheduling.lane import Lane

#: A fuller tier is taken if it leaves a part of the time unused: an answer that is late was for nothing.
_ROOM = 0.75
PINNED, ROUTER, DEADLINE, LOAD = POLICIES = ("pinned", "router", "deadline", "load")


class Choice(NamedTuple):
    """A lane, and why it was taken.

    Attributes:
        lane: of the tier, or of the router.
        reason: ``requested`` by name; ``pinned`` or ``router`` by policy; ``full`` where the policy saw no need for a
            leaner tier; ``deadline`` or ``load`` where it did.
    """

    lane: Lane
    reason: str


class Demand(NamedTuple):
    """What a policy has to know of a request and of the moment.

    Attributes:
        now: ``time.monotonic()`` seconds.
        size: of the request, as its joiner counts it.
        left: seconds until its deadline; None where it has none.
        finish: predicts in how many seconds a lane would answer it.
        fullness: of the queue, 0 to 1.
        instances: how many runs are computed at once.
    """

    now: float
    size: int
    left: float | None
    finish: Callable[[Lane], float]
    fullness: float
    instances: int


class LoadLevel:
    """How many tiers down a model serves: down as soon as it is pressed, up only when that will hold.

    Going down needs a pressure above :attr:`HIGH`; then it goes to the first tier that can keep up with what arrives,
    one lower at least, and further only if the pressure does not fall once what had waited until then is done. Going up
    needs :attr:`HOLD` seconds without pressure in which the fuller tier would have been busy for less than
    :attr:`HEADROOM` of the time. Under a constant load it therefore comes to rest: the tier above cannot keep up.
    """

    HIGH, LOW = 0.5, 0.25
    SETTLE, HOLD = 0.25, 2.0
    HEADROOM = 0.7
    #: Seconds over which arrivals are averaged.
    MEMORY = 1.0

    def __init__(self) -> None:
        self.level = 0
        self._rate = 0.0
        self._seen = -math.inf
        self._changed = self._settled = -math.inf
        self._before: float | None = 0.0
        self._calm_since = math.inf

    def arrived(self, now: float, size: int) -> None:
        """Count a request, whether it will be served or not."""
        self._rate = self._rate * math.exp(-(now - self._seen) / self.MEMORY) + size / self.MEMORY

    def update(self, now: float, pressure: float, waiting_seconds: float, costs: Sequence[float]) -> int:
        """Return the level for a request that arrives now.

        Args:
            now: ``time.monotonic()`` seconds.
            pressure: 0 when nothing waits, 1 when requests are about to be refused.
            waiting_seconds: until what waits is done; its tiers have been chosen.
            costs: seconds of the device for an element of a request, of each tier, the fullest first.
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
            # Since the last request nothing has come, so that time was calm too.
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


class Elastic:
    """Chooses the tier of each request to one model.

    Args:
        model: its name, for errors.
        lanes: of its tiers, the full one first, and of the router under :data:`AUTO` where it has one.
        policy: what holds for requests that name neither a tier nor a policy.
    """

    def __init__(self, model: str, lanes: Mapping[str, Lane], policy: str) -> None:
        self._model = model
        self._lanes = lanes
        self._load = LoadLevel()
        self.policy = PINNED if policy == ROUTER and AUTO not in lanes else policy

    def choose(self, tier: str | None, policy: str | None, demand: Callable[[], Demand]) -> Choice:
        """Return the lane for a request.

        Args:
            tier: what its parameter names, if anything.
            policy: what its parameter names, if anything.
            demand: is asked only by the policies that look at the moment.

        Raises:
            InvalidRequest: there is no such tier or policy, or one contradicts the other.
        """
        if tier is not None and tier != AUTO:
            return Choice(self._named(tier, policy), "requested")
        policy = self._policy(tier, policy)
        if policy == ROUTER:
            return Choice(self._lanes[AUTO], "router")
        if policy == PINNED:
            return Choice(self._full, "pinned")
        return self._elastic(demand(), policy)

    @property
    def _full(self) -> Lane:
        return next(iter(self._lanes.values()))

    def _named(self, tier: str, policy: str | None) -> Lane:
        subject = f"parameter 'tier' of {self._model!r}"
        if tier not in self._lanes:
            expected = f"one of {', '.join([name for name in self._lanes if name != AUTO] + [AUTO])}"
            fix = f"Leave it out for the policy of this model, {self.policy}."
            raise InvalidRequest(subject, given=tier, expected=expected, fix=fix)
        if policy not in (None, PINNED):
            fix = "Name a tier or a policy, not both."
            raise InvalidRequest(subject, given=tier, expected=f"{AUTO} with the policy {policy}", fix=fix)
        return self._lanes[tier]

    def _policy(self, tier: str | None, policy: str | None) -> str:
        if policy is None:
            if tier is None or self.policy != PINNED:
                return self.policy
            return ROUTER if AUTO in self._lanes else LOAD
        known = [known for known in POLICIES if known != ROUTER or AUTO in self._lanes]
        if policy not in known:
            fix = f"Leave it out for {self.policy}."
            subject = f"parameter 'policy' of {self._model!r}"
            raise InvalidRequest(subject, given=policy, expected=f"one of {', '.join(known)}", fix=fix)
        return policy

    def _elastic(self, demand: Demand, policy: str) -> Choice:
        ladder = self._ladder(demand.size)
        first, reason = 0, DEADLINE
        if policy == LOAD:
            first, reason = self._level(demand, ladder), LOAD
        for lane in ladder[first:]:
            if demand.left is None or demand.finish(lane) <= _ROOM * demand.left:
                break
        else:
            lane = ladder[-1]  # admission has the last word
        return Choice(lane, reason if lane is not ladder[0] else "full")

    def _ladder(self, size: int) -> list[Lane]:
        """Return the full lane and those that were measured to be faster, the slowest first: names promise nothing."""
        full = self._full
        limit = full.latency.seconds(size)
        timed = [(lane.latency.seconds(size), lane) for name, lane in self._lanes.items() if name != AUTO]
        faster = [(seconds, lane) for seconds, lane in timed if limit and seconds is not None and seconds < limit]
        return [full, *(lane for _, lane in sorted(faster, key=lambda pair: -pair[0]))]

    def _level(self, demand: Demand, ladder: list[Lane]) -> int:
        self._load.arrived(demand.now, demand.size)
        lane = ladder[min(self._load.level, len(ladder) - 1)]
        pressure, finish = demand.fullness, demand.finish(lane)
        if demand.left is not None:
            pressure = max(pressure, finish / demand.left if demand.left > 0 else math.inf)
        costs = [(lane.latency.seconds_per_element() or 0.0) / demand.instances for lane in ladder]
        return self._load.update(demand.now, pressure, finish, costs)
