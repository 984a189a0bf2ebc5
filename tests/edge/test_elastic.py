"""The choice of a tier: by name, by policy, by what is late, and by load, which must not flap."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.errors import InvalidRequest
from edge.scheduling.elastic import AUTO, Choice, Demand, Elastic, LoadLevel
from edge.scheduling.lane import Lane
from tests.support.lanes import lane_of

#: Seconds of a request, of the full tier and of leaner ones.
COSTS = (0.008, 0.004, 0.002)


def lanes_of(**seconds: float) -> dict[str, Lane]:
    lanes = {}
    for tier, each in seconds.items():
        lanes[tier] = lane_of(lambda rows: rows, tier)
        lanes[tier].latency.observe(1, each)
    return lanes


TIERS = {"full": 0.1, "half": 0.05, "third": 0.03}


def demand(left: float | None = None, fullness: float = 0.0, now: float = 0.0, waiting: float = 0.0) -> Demand:
    def finish(lane: Lane) -> float:
        return waiting + (lane.latency.seconds(1) or 0.0)

    return Demand(now, 1, left, finish, fullness, 1)


def choose(elastic: Elastic, tier: str | None = None, policy: str | None = None, **moment: float) -> tuple[str, str]:
    choice = elastic.choose(tier, policy, lambda: demand(**moment))
    return choice.lane.tier, choice.reason


@pytest.mark.parametrize("policy", ["pinned", "deadline", "load"])
def test_a_tier_that_is_named_answers(policy: str) -> None:
    elastic = Elastic("m", lanes_of(**TIERS), policy)
    assert choose(elastic, "half", fullness=1.0) == ("half", "requested")
    assert choose(elastic, "half", "pinned") == ("half", "requested")


def test_without_a_policy_the_full_tier_answers() -> None:
    elastic = Elastic("m", lanes_of(**TIERS), "pinned")
    assert choose(elastic, left=0.001, fullness=1.0) == ("full", "pinned")


def test_the_router_answers_where_there_is_one() -> None:
    lanes = lanes_of(**TIERS, auto=0.04)
    assert choose(Elastic("m", lanes, "router")) == (AUTO, "router")
    assert choose(Elastic("m", lanes, "pinned"), AUTO) == (AUTO, "router")
    assert choose(Elastic("m", lanes, "pinned"), policy="router") == (AUTO, "router")
    assert choose(Elastic("m", lanes, "load"), AUTO) == ("full", "full")  # the server's policy goes before the router
    without = Elastic("m", lanes_of(**TIERS), "router")  # one option for all models of a server
    assert without.policy == "pinned"
    assert choose(without) == ("full", "pinned")
    assert choose(without, AUTO) == ("full", "full")


@pytest.mark.parametrize(
    ("left", "waiting", "expected"),
    [
        (None, 9.0, ("full", "full")),
        (0.2, 0.0, ("full", "full")),
        (0.2, 0.06, ("half", "deadline")),  # the full tier would be in time, but for nothing unforeseen
        (0.2, 0.11, ("third", "deadline")),
        (0.2, 0.5, ("third", "deadline")),  # admission has the last word
        (0.0, 0.0, ("third", "deadline")),
    ],
)
@pytest.mark.parametrize("policy", ["deadline", "load"])
def test_the_largest_tier_that_is_in_time(
    policy: str, left: float | None, waiting: float, expected: tuple[str, str]
) -> None:
    # The load policy leans down for a deadline too, before anything is refused; its level is its own business.
    elastic = Elastic("m", lanes_of(**TIERS), policy)
    if policy == "load" and left is not None and waiting:
        elastic._load._settled = math.inf
        expected = expected[0], "load"
    if policy == "load" and left == 0.0:
        expected = expected[0], "load"
    assert choose(elastic, policy=policy, left=left, waiting=waiting) == expected


def test_tiers_are_ordered_by_what_was_measured() -> None:
    # The name promises a leaner tier, and on this machine it is slower than the full one.
    elastic = Elastic("m", lanes_of(full=0.1, tiny=0.2, third=0.03, half=0.05), "deadline")
    assert choose(elastic, left=0.08) == ("half", "deadline")
    assert choose(elastic, left=0.06) == ("third", "deadline")
    assert choose(elastic, left=0.001) == ("third", "deadline")
    assert choose(elastic, left=9.0) == ("full", "full")


def test_tiers_that_were_never_measured_are_left_alone() -> None:
    lanes = {tier: lane_of(lambda rows: rows, tier) for tier in ("full", "half")}
    assert choose(Elastic("m", lanes, "deadline"), left=0.001) == ("full", "full")
    assert choose(Elastic("m", lanes, "load"), fullness=1.0) == ("full", "full")


def test_a_model_of_one_tier_takes_every_policy_but_the_routers() -> None:
    elastic = Elastic("m", lanes_of(full=0.1), "load")
    for policy in (None, "pinned", "deadline", "load"):
        assert choose(elastic, policy=policy, left=0.01, fullness=1.0)[0] == "full"


def asked(elastic: Elastic, tier: str | None, policy: str | None) -> Callable[[], Choice]:
    return lambda: elastic.choose(tier, policy, demand)


@pytest.mark.parametrize(
    ("tier", "policy", "message"),
    [
        ("huge", None, "one of full, half, third, auto"),
        ("half", "load", "Name a tier or a policy, not both"),
        (None, "fast", "one of pinned, deadline, load"),
        (None, "router", "one of pinned, deadline, load"),
        (AUTO, "", "one of pinned, deadline, load"),
    ],
)
def test_what_is_refused(tier: str | None, policy: str | None, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        asked(Elastic("m", lanes_of(**TIERS), "pinned"), tier, policy)()
    assert "'m'" in str(caught.value)


def simulate(
    level: LoadLevel, rate: float, seconds: float, start: float, costs: tuple[float, ...] = COSTS
) -> list[int]:
    """Levels of requests that come evenly to one worker, with a queue of 100; what does not fit is refused."""
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
        levels.append(level.update(now, len(waiting) / 100, sum(waiting), costs))
        if len(waiting) < 100:
            waiting.append(costs[levels[-1]])
    return levels


def changes(levels: list[int]) -> int:
    return sum(one != other for one, other in itertools.pairwise(levels))


def test_without_load_nothing_changes() -> None:
    assert set(simulate(LoadLevel(), rate=50, seconds=10, start=0)) == {0}


def test_a_burst_is_met_by_the_tier_that_keeps_up_and_recovers_afterwards() -> None:
    level = LoadLevel()
    burst = simulate(level, rate=200, seconds=10, start=0)  # 1.6 times what the full tier can do
    assert burst[-1] == 1
    assert changes(burst) == 1
    after = simulate(level, rate=40, seconds=20, start=10)
    assert after[-1] == 0
    assert changes(after) == 1
    # Not before the calm has lasted.
    assert after.index(0) >= 40 * LoadLevel.HOLD


@given(rate=st.floats(5, 450), start=st.floats(0, 1e6))
@settings(deadline=None, max_examples=20)
def test_a_constant_load_comes_to_rest(rate: float, start: float) -> None:
    level = LoadLevel()
    levels = simulate(level, rate, seconds=15, start=start)
    assert changes(levels) <= len(COSTS) - 1
    assert levels == sorted(levels)  # it never goes up, which it would have to take back
    assert rate * COSTS[levels[-1]] < 1.1


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0.001, 0.5)), min_size=1, max_size=200))
@settings(deadline=None)
def test_the_level_never_flaps(moments: list[tuple[float, float]]) -> None:
    """Whatever the pressure does: up only a step at a time and after the hold, down again only after it has settled."""
    level, now, last, previous = LoadLevel(), 0.0, -math.inf, 0
    for pressure, pause in moments:
        now += pause
        level.arrived(now, 1)
        used = level.update(now, pressure, 0.0, COSTS)
        if used != previous:
            assert now - last >= (LoadLevel.HOLD if used < previous else LoadLevel.SETTLE) or last == -math.inf
            assert used >= previous - 1
            last, previous = now, used


def test_a_long_pause_counts_as_calm() -> None:
    level = LoadLevel()
    assert simulate(level, rate=200, seconds=5, start=0)[-1] == 1
    level.arrived(100.0, 1)
    assert level.update(100.0, 0.0, 0.0, COSTS) == 0
