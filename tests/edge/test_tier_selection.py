"""Selection of a tier: by name, by policy, by deadline, and by load, without flapping."""

from __future__ import annotations

import itertools
import math
from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.errors import InvalidRequest
from edge.scheduling.tier_executor import TierExecutor
from edge.scheduling.tier_selection import AUTO, Demand, LoadLevel, TierSelector
from tests.support.jobs import executor_of

#: Seconds of a request, of the full tier and of leaner ones.
COSTS = (0.008, 0.004, 0.002)
TIERS = {"full": 0.1, "half": 0.05, "third": 0.03}


def selector(policy: str, **seconds: float) -> TierSelector:
    executors = {}
    for tier, each in (seconds or TIERS).items():
        executors[tier] = executor_of(lambda rows: rows, tier)
        if each:
            executors[tier].latency.observe(1, each)
    return TierSelector("m", executors, policy)


def choose(
    selector: TierSelector, tier: str | None = None, policy: str | None = None, *, waiting: float = 0.0, **moment: Any
) -> tuple[str, str]:
    def finish(executor: TierExecutor) -> float:
        return waiting + (executor.latency.seconds(1) or 0.0)

    demand = Demand(**{"now": 0.0, "size": 1, "left": None, "finish": finish, "fullness": 0.0, "instances": 1} | moment)
    choice = selector.choose(tier, policy, lambda: demand)
    return choice.executor.tier, choice.reason


@pytest.mark.parametrize("policy", ["pinned", "deadline", "load"])
def test_named_tier_answers_whatever_the_policy(policy: str) -> None:
    assert choose(selector(policy), "half", fullness=1.0) == ("half", "requested")
    assert choose(selector(policy), "half", "pinned") == ("half", "requested")
    assert choose(selector(policy), policy="pinned", left=0.001, fullness=1.0) == ("full", "pinned")


def test_router_answers_if_the_model_has_one() -> None:
    routed = {**TIERS, "auto": 0.04}
    assert choose(selector("router", **routed)) == (AUTO, "router")
    assert choose(selector("pinned", **routed), AUTO) == (AUTO, "router")
    assert choose(selector("pinned", **routed), policy="router") == (AUTO, "router")
    assert choose(selector("load", **routed), AUTO) == ("full", "full")  # the server's policy goes before the router
    without = selector("router")  # one option for all models of a server
    assert (without.policy, choose(without)) == ("pinned", ("full", "pinned"))
    assert choose(without, AUTO) == ("full", "full")


def test_only_loops_are_cut_at_the_deadline() -> None:
    demand = Demand(0.0, 1, 0.05, lambda executor: 1.0, 0.0, 1)
    chosen = selector("deadline").choose(None, None, lambda: demand)
    assert (chosen.reason, chosen.best_effort) == ("deadline", False)


def test_deadline_policy_takes_the_fullest_tier_that_is_in_time() -> None:
    by_load = selector("load")
    by_load._load._settled = math.inf  # its level stays 0
    for left, waiting, tier in (
        (None, 9.0, "full"),
        (0.2, 0.05, "full"),  # three quarters of the time
        (0.2, 0.051, "half"),
        (0.2, 0.11, "third"),
        (0.2, 0.5, "third"),  # admission decides
        (0.0, 0.0, "third"),
    ):
        reasons = ("full", "full") if tier == "full" else ("deadline", "load")
        for one, reason in zip((selector("deadline"), by_load), reasons, strict=True):
            assert choose(one, left=left, waiting=waiting) == (tier, reason)


def test_tiers_are_ordered_by_their_measured_times() -> None:
    # The name promises a leaner tier, and on this machine it is as slow as the full one.
    measured = selector("deadline", full=0.1, tiny=0.1, third=0.03, half=0.05, new=0.0)
    assert [choose(measured, left=left)[0] for left in (0.08, 0.06, 0.001, 9.0)] == ["half", "third", "third", "full"]
    for unmeasured in ({"full": 0.0, "half": 0.0}, {"full": 0.0, "half": 0.1}):
        for policy in ("deadline", "load"):
            assert choose(selector(policy, **unmeasured), left=0.001, fullness=1.0) == ("full", "full")


def test_unknown_and_contradictory_parameters_are_rejected() -> None:
    for tier, policy, text in (
        ("huge", None, "'tier' of 'm': got 'huge', expected one of full, half, third, auto. Leave it out for the"),
        ("half", "load", "'tier' of 'm': got 'half', expected auto with the policy load. Name a tier or a policy"),
        (None, "router", "'policy' of 'm': got 'router', expected one of pinned, deadline, load. Leave it out"),
        (AUTO, "", "got '', expected one of pinned, deadline, load"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            choose(selector("pinned"), tier, policy)
        assert text in str(caught.value)


def test_load_policy_weighs_the_queue_the_deadline_and_the_arrivals() -> None:
    def chosen(**moment: Any) -> str:
        return choose(selector("load"), **moment)[0]

    # One element in the last second: any tier keeps up, so the next one is enough.
    assert [chosen(fullness=fullness) for fullness in (0.5, 0.51)] == ["full", "half"]
    assert [chosen(left=left, waiting=0.1) for left in (0.41, 0.39)] == ["full", "half"]
    assert [chosen(fullness=1.0, size=size) for size in (19, 20, 21, 33, 50)] == ["half", *["third"] * 4]
    assert [chosen(fullness=1.0, size=size, instances=2) for size in (39, 40)] == ["half", "third"]
    assert choose(selector("load"), fullness=1.0) == ("half", "load")


def simulate(level: LoadLevel, rate: float, seconds: float, start: float) -> list[int]:
    """Levels of requests that come evenly to one worker with a queue of 100; those that do not fit are rejected."""
    levels: list[int] = []
    waiting: deque[float] = deque()
    worked = start
    for index in range(int(rate * seconds)):
        now = start + index / rate
        while waiting and worked + waiting[0] <= now:
            worked += waiting.popleft()
        if not waiting:
            worked = now
        level.arrived(now, 1)
        levels.append(level.update(now, len(waiting) / 100, sum(waiting), COSTS))
        if len(waiting) < 100:
            waiting.append(COSTS[levels[-1]])
    return levels


def changes(levels: list[int]) -> int:
    return sum(one != other for one, other in itertools.pairwise(levels))


def test_burst_is_met_by_the_tier_that_keeps_up_until_it_is_over() -> None:
    level = LoadLevel()
    assert set(simulate(level, rate=50, seconds=10, start=-10)) == {0}
    burst = simulate(level, rate=200, seconds=10, start=0)  # 1.6 times what the full tier can do
    assert (burst[-1], changes(burst)) == (1, 1)
    after = simulate(level, rate=40, seconds=20, start=10)
    assert (after[-1], changes(after)) == (0, 1)
    assert after.index(0) >= 40 * LoadLevel.HOLD
    simulate(level, rate=200, seconds=5, start=30)
    level.arrived(100.0, 1)
    assert level.update(100.0, 0.0, 0.0, COSTS) == 0  # a pause counts as calm


@given(rate=st.floats(5, 450), start=st.floats(0, 1e6))
@settings(deadline=None, max_examples=20)
def test_constant_load_settles(rate: float, start: float) -> None:
    levels = simulate(LoadLevel(), rate, seconds=15, start=start)
    assert changes(levels) <= len(COSTS) - 1
    assert levels == sorted(levels)  # it never goes up, only to come down again
    assert rate * COSTS[levels[-1]] < 1.1


def test_level_steps_at_its_limits() -> None:
    """Down above a pressure of 0.5, again once it has settled and not fallen; up below 0.25, after two calm seconds."""
    level = LoadLevel()

    def update(now: float, pressure: float, waiting: float = 0.0) -> int:
        return level.update(now, pressure, waiting, (0.01, 0.01, 0.01, 0.01))

    down = {0.0: 0.5, 1.0: 0.6, 1.2: 0.9, 1.25: 0.6, 1.45: 0.9, 1.5: 0.59, 1.75: 0.59}
    assert [update(now, pressure) for now, pressure in down.items()] == [0, 1, 1, 1, 1, 1, 2]
    assert [update(now, 0.9, 0.5) for now in (2.0, 2.25, 2.49, 2.5, 3.5, 9.9)] == [2, 2, 2, 3, 3, 3]
    assert [update(now, pressure) for now, pressure in ((10.0, 0.24), (11.0, 0.25), (12.0, 0.2))] == [3, 3, 3]
    assert [update(now, 0.2) for now in (12.9, 13.0, 14.9, 15.0, 17.0)] == [3, 2, 2, 1, 0]


def test_level_steps_up_only_if_the_fuller_tier_has_room() -> None:
    for size, expected in ((69, 0), (70, 1)):
        level = LoadLevel()
        level.level = 1
        level._rate, level._seen = 0.0, 0.0
        level.arrived(10.0, size)
        assert level.update(10.0, 0.0, 0.0, (0.01, 0.001)) == expected
    level.arrived(11.0, 1)
    assert level._rate == pytest.approx(70 / math.e + 1)
    assert level.update(11.0, 0.0, 0.0, (0.01,)) == 0  # a model that is loaded again with fewer tiers
