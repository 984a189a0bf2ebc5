"""Selection of a tier: by name, by policy, by deadline, and by load, without flapping."""

import itertools
import math
import time
from collections import deque
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.bundles.manifest import Measure
from edge.errors import InvalidRequest
from edge.scheduling.latency import LatencyModel
from edge.scheduling.tier_selection import AUTO, Demand, LoadLevel, TierSelector
from tests.support.in_process import running_service
from tests.support.jobs import executor_of
from tests.support.sample_requests import raw_request, with_parameters
from tests.support.server_models import WIDTH, write_tiered_bundle

#: Seconds of a request, of the full tier and of leaner ones.
COSTS = (0.008, 0.004, 0.002)
TIERS = {"full": 0.1, "half": 0.05, "third": 0.03}


def selector(policy, known=MappingProxyType({}), **seconds):
    executors = {}
    for tier, each in (seconds or TIERS).items():
        executors[tier] = executor_of(lambda rows: rows, tier)
        if each:
            executors[tier].latency.observe(1, each)
    return TierSelector("m", executors, policy, known)


def on_dev(**values):
    return {tier: {("cosine", "dev", 100): value} for tier, value in values.items()}


def choose(selector, tier=None, policy=None, *, waiting=0.0, **moment):
    def finish(executor):
        return waiting + (executor.latency.seconds(1) or 0.0)

    demand = Demand(**{"now": 0.0, "size": 1, "left": None, "finish": finish, "fullness": 0.0, "instances": 1} | moment)
    choice = selector.choose(tier, policy, lambda: demand)
    return choice.executor.tier, choice.reason


@pytest.mark.parametrize("policy", ["pinned", "deadline", "load"])
def test_named_tier_answers_whatever_the_policy(policy):
    assert choose(selector(policy), "half", fullness=1.0) == ("half", "requested")
    assert choose(selector(policy), "half", "pinned") == ("half", "requested")
    assert choose(selector(policy), policy="pinned", left=0.001, fullness=1.0) == ("full", "pinned")


def test_router_answers_if_the_model_has_one():
    routed = {**TIERS, "auto": 0.04}
    assert choose(selector("router", **routed)) == (AUTO, "router")
    assert choose(selector("pinned", **routed), AUTO) == (AUTO, "router")
    assert choose(selector("pinned", **routed), policy="router") == (AUTO, "router")
    assert choose(selector("load", **routed), AUTO) == ("full", "full")  # the server's policy goes before the router
    without = selector("router")  # one option for all models of a server
    assert (without.policy, choose(without)) == ("pinned", ("full", "pinned"))
    assert choose(without, AUTO) == ("full", "full")


def test_only_loops_are_cut_at_the_deadline():
    demand = Demand(0.0, 1, 0.05, lambda executor: 1.0, 0.0, 1)
    chosen = selector("deadline").choose(None, None, lambda: demand)
    assert (chosen.reason, chosen.best_effort) == ("deadline", False)


def test_deadline_policy_takes_the_fullest_tier_that_is_in_time():
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


def test_tiers_are_ordered_by_their_measured_times():
    # The name promises a leaner tier, and on this machine it is as slow as the full one.
    measured = selector("deadline", full=0.1, tiny=0.1, third=0.03, half=0.05, new=0.0)
    assert [choose(measured, left=left)[0] for left in (0.08, 0.06, 0.001, 9.0)] == ["half", "third", "third", "full"]
    for unmeasured in ({"full": 0.0, "half": 0.0}, {"full": 0.0, "half": 0.1}):
        for policy in ("deadline", "load"):
            assert choose(selector(policy, **unmeasured), left=0.001, fullness=1.0) == ("full", "full")


#: Half of the layers in FP32 takes longer than all of them in INT8, and is less accurate.
REDUCED = {"full": 3.66, "int8": 2.06, "half": 2.24, "half_int8": 1.61}
COSINES = on_dev(int8=0.994, half=0.948, half_int8=0.945)


@pytest.mark.parametrize("policy", ["deadline", "load"])
def test_tier_that_another_beats_in_time_and_accuracy_is_chosen_by_name_alone(policy):
    def reached(selector):
        selector._load._settled = math.inf  # its level stays 0
        return [choose(selector, left=left)[0] for left in (9.0, 3.0, 2.8, 2.5, 0.1)]

    assert reached(selector(policy, **REDUCED)) == ["full", "half", "int8", "half_int8", "half_int8"]
    best = selector(policy, COSINES, **REDUCED)
    assert reached(best) == ["full", "int8", "int8", "half_int8", "half_int8"]
    assert choose(best, "half") == ("half", "requested")
    for unlike in (
        COSINES | on_dev(half=0.995),  # it is slower, and better
        COSINES | {"half": {("cosine", "test", 100): 0.948}},  # on other data
        COSINES | {"half": {("cosine", "dev", 100): 0.948, ("pearson", "dev", 100): 1.0}, "int8": {
            **COSINES["int8"], ("pearson", "dev", 100): 0.9}},  # by one of two metrics
        {tier: known for tier, known in COSINES.items() if tier != "int8"},
    ):  # fmt: skip
        assert reached(selector(policy, unlike, **REDUCED))[1] == "half"
    assert reached(selector(policy, COSINES, **REDUCED | {"int8": 0.0}))[1] == "half"  # it was not measured
    for _ in range(20):
        best._executors["int8"].latency.observe(1, 3.0)  # on this machine, its runs are slow
    assert [choose(best, left=left)[0] for left in (4.0, 3.0)] == ["int8", "half"]


def test_load_keeps_a_tier_whose_batches_take_less_time():
    both = {policy: selector(policy, COSINES, **REDUCED) for policy in ("deadline", "load")}
    for one in both.values():
        one._load._settled = math.inf
        one._executors["half"].latency.observe(8, 8.0)
    assert [choose(one, left=3.0)[0] for one in both.values()] == ["int8", "half"]


def test_tiers_are_compared_at_a_size_that_all_of_them_were_measured_at():
    one = selector("deadline")
    one._full.latency.observe(64, 0.5)  # less than 64 times what "half" takes for one element
    assert choose(one, left=0.08, size=64) == ("half", "deadline")


Seconds = st.sampled_from((0.0, 0.01, 0.02, 0.03, 0.05))
Known = st.dictionaries(st.sampled_from(("dev", "test")), st.sampled_from((0.7, 0.8, 0.9)))


@given(st.lists(st.tuples(Seconds, Known), min_size=1, max_size=7), Seconds)
def test_no_tier_of_the_ladder_is_beaten_and_no_other_one_is_left_out(tiers, full):
    names = [f"tier{number}" for number in range(len(tiers))]
    seconds = {"full": full} | {name: each for name, (each, _) in zip(names, tiers, strict=True)}
    values = {name: known for name, (_, known) in zip(names, tiers, strict=True)}
    known = {name: {("f1", data, 9): value for data, value in of.items()} for name, of in values.items()}
    chosen = selector("deadline", known, **seconds)
    first, *ladder = [each.tier for each in chosen._ladder(1, "deadline")]
    assert first == "full"
    assert ladder == sorted(ladder, key=lambda name: -seconds[name])
    for name in names:
        beaten = any(
            0 < seconds[other] < seconds[name]
            and values[name].keys() & values[other].keys()
            and all(
                values[other].get(data, 1.0) >= value for data, value in values[name].items() if data in values[other]
            )
            for other in names
        )
        assert (name in ladder) == (0 < seconds[name] < full and not beaten)


@pytest.mark.parametrize(("measured", "tier"), [({}, "half"), ({"half": 0.7, "third": 0.8}, "third")])
async def test_served_model_leaves_out_the_tier_that_its_measures_and_times_rule_out(tmp_path, measured, tier):
    def write(repository):
        measures = [Measure("accuracy", f"dev, tier {name}", value, 100) for name, value in measured.items()]
        write_tiered_bundle(repository / "m", layers={"full": 3, "half": 2, "third": 1}, measures=measures)

    async with running_service(tmp_path, write) as running:
        for executor, seconds in zip(running.model("tiered").executors.values(), (100.0, 10.0, 1.0), strict=True):
            executor.latency = LatencyModel()
            executor.latency.observe(1, seconds)
        request = with_parameters(raw_request("tiered", x=np.zeros((1, WIDTH), np.float32)), {"policy": "deadline"})
        parameters = (await running.infer(request, time.monotonic() + 50)).parameters
        assert (parameters["tier"].string_param, parameters["tier_reason"].string_param) == (tier, "deadline")


def test_unknown_and_contradictory_parameters_are_rejected():
    for tier, policy, text in (
        ("huge", None, "'tier' of 'm': got 'huge', expected one of full, half, third, auto. Leave it out for the"),
        ("half", "load", "'tier' of 'm': got 'half', expected auto with the policy load. Name a tier or a policy"),
        (None, "router", "'policy' of 'm': got 'router', expected one of pinned, deadline, load. Leave it out"),
        (AUTO, "", "got '', expected one of pinned, deadline, load"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            choose(selector("pinned"), tier, policy)
        assert text in str(caught.value)


def test_load_policy_weighs_the_queue_the_deadline_and_the_arrivals():
    def chosen(**moment):
        return choose(selector("load"), **moment)[0]

    # One element in the last second: any tier keeps up, so the next one is enough.
    assert [chosen(fullness=fullness) for fullness in (0.5, 0.51)] == ["full", "half"]
    assert [chosen(left=left, waiting=0.1) for left in (0.41, 0.39)] == ["full", "half"]
    assert [chosen(fullness=1.0, size=size) for size in (19, 20, 21, 33, 50)] == ["half", *["third"] * 4]
    assert [chosen(fullness=1.0, size=size, instances=2) for size in (39, 40)] == ["half", "third"]
    assert choose(selector("load"), fullness=1.0) == ("half", "load")


def simulate(level, rate, seconds, start):
    """Levels of requests that come evenly to one worker with a queue of 100; those that do not fit are rejected."""
    levels = []
    waiting = deque()
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


def changes(levels):
    return sum(one != other for one, other in itertools.pairwise(levels))


def test_burst_is_met_by_the_tier_that_keeps_up_until_it_is_over():
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
def test_constant_load_settles(rate, start):
    levels = simulate(LoadLevel(), rate, seconds=15, start=start)
    assert changes(levels) <= len(COSTS) - 1
    assert levels == sorted(levels)  # it never goes up, only to come down again
    assert rate * COSTS[levels[-1]] < 1.1


def test_level_steps_at_its_limits():
    """Down above a pressure of 0.5, again once it has settled and not fallen; up below 0.25, after two calm seconds."""
    level = LoadLevel()

    def update(now, pressure, waiting=0.0):
        return level.update(now, pressure, waiting, (0.01, 0.01, 0.01, 0.01))

    down = {0.0: 0.5, 1.0: 0.6, 1.2: 0.9, 1.25: 0.6, 1.45: 0.9, 1.5: 0.59, 1.75: 0.59}
    assert [update(now, pressure) for now, pressure in down.items()] == [0, 1, 1, 1, 1, 1, 2]
    assert [update(now, 0.9, 0.5) for now in (2.0, 2.25, 2.49, 2.5, 3.5, 9.9)] == [2, 2, 2, 3, 3, 3]
    assert [update(now, pressure) for now, pressure in ((10.0, 0.24), (11.0, 0.25), (12.0, 0.2))] == [3, 3, 3]
    assert [update(now, 0.2) for now in (12.9, 13.0, 14.9, 15.0, 17.0)] == [3, 2, 2, 1, 0]


def test_level_steps_up_only_if_the_fuller_tier_has_room():
    for size, expected in ((69, 0), (70, 1)):
        level = LoadLevel()
        level.level = 1
        level._rate, level._seen = 0.0, 0.0
        level.arrived(10.0, size)
        assert level.update(10.0, 0.0, 0.0, (0.01, 0.001)) == expected
    level.arrived(11.0, 1)
    assert level._rate == pytest.approx(70 / math.e + 1)
    assert level.update(11.0, 0.0, 0.0, (0.01,)) == 0  # a model that is loaded again with fewer tiers
