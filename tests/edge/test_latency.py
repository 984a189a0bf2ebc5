"""The table of run times: what it learns, what it says of sizes that it has not seen, and how it follows changes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.scheduling.latency import LatencyTable
from tests.support.lanes import lane_of

SIZES = st.integers(1, 10**6)


def table(known: dict[int, float], times: int = 1) -> LatencyTable:
    table = LatencyTable()
    for size, seconds in known.items():
        for _ in range(times):
            table.observe(size, seconds)
    return table


def test_an_empty_table_knows_nothing() -> None:
    assert LatencyTable().seconds(1) is None
    assert LatencyTable().seconds_per_element() is None
    assert lane_of(lambda x: x).run_seconds(1) == 0
    assert lane_of(lambda x: x, max_rows=4).seconds(3, 9, 9) == 0


def test_the_mean_and_the_deviation_are_weighted_exponentially() -> None:
    learnt = table({4: 0.1})
    assert learnt.seconds(4) == 0.1
    assert learnt.seconds(4, 2) == pytest.approx(0.1 + 2 * 0.1 / 8)
    learnt.observe(4, 0.2)
    assert learnt.seconds(4) == pytest.approx(0.1 + 0.1 / 8)
    assert learnt.seconds(4, 1) == pytest.approx(0.1125 + 0.0125 + (0.1 - 0.0125) / 4)


@given(st.floats(1e-6, 10), st.floats(1e-6, 10))
def test_it_follows_a_change(before: float, after: float) -> None:
    learnt = table({8: before}, 20)
    for _ in range(100):
        learnt.observe(8, after)
    assert learnt.seconds(8, 2) == pytest.approx(after, rel=0.01, abs=abs(before - after) * 1e-4)


@given(st.dictionaries(SIZES, st.floats(1e-6, 10), min_size=1, max_size=8), SIZES)
@settings(deadline=None)
def test_any_size_is_between_its_known_neighbours(known: dict[int, float], size: int) -> None:
    seconds = table(known).seconds(size)
    assert seconds is not None
    largest = max(known)
    bound = max(known.values()) * max(size / largest * 1.2, 1)
    assert min(known.values()) * 0.99 <= seconds <= bound * 1.01


@given(st.integers(1, 1000), st.integers(2, 1000))
def test_above_all_known_sizes_it_grows_in_proportion(size: int, factor: int) -> None:
    seconds = table({size: 0.5}).seconds(size * factor)
    assert seconds == pytest.approx(0.5 * factor, rel=0.1)


def test_below_all_known_sizes_it_is_that_of_the_smallest() -> None:
    assert table({64: 0.3, 128: 0.5}).seconds(1) == 0.3


def test_between_two_known_sizes_it_is_interpolated() -> None:
    learnt = table({16: 0.1, 64: 0.4})
    assert learnt.seconds(32) == pytest.approx(0.2)
    found = [learnt.seconds(size) or 0 for size in (16, 20, 32, 50, 64)]
    assert all(one <= other for one, other in itertools.pairwise(found))


def test_the_least_time_for_an_element() -> None:
    assert table({1: 0.1, 16: 0.4, 64: 3.2}).seconds_per_element() == pytest.approx(0.025)


def test_a_lane_adds_up_the_runs_of_what_waits() -> None:
    joined = lane_of(lambda x: x, max_rows=4)
    for size, seconds in ((1, 0.1), (2, 0.15), (4, 0.2)):
        for _ in range(50):  # until the deviation is nothing
            joined.latency.observe(size, seconds)
    assert joined.seconds(0, 0, 0) == 0
    assert joined.seconds(3, 8, 8) == pytest.approx(0.4)
    assert joined.seconds(9, 9, 9) == pytest.approx(0.5)
    alone = lane_of(lambda x: x)
    alone.latency.observe(1, 0.16)
    assert alone.seconds(3, 3, 3) == pytest.approx(3 * (0.16 + 0.02))


def test_the_usual_time_is_not_moved_by_a_few_slow_runs() -> None:
    learnt = table({1: 1e-5})
    for _ in range(50):
        for seconds in (1e-5, 1.1e-5, 0.9e-5, 0.02):
            learnt.observe(1, seconds)
    assert 0.8e-5 < (learnt.usual_seconds(1) or 0) < 1.3e-5
    assert (learnt.seconds(1) or 0) > 1e-3
    assert learnt.usual_seconds(100) is None
    for _ in range(200):
        learnt.observe(1, 0.02)
    assert (learnt.usual_seconds(1) or 0) == pytest.approx(0.02, rel=0.1)


def test_repeats_are_learnt_apart_from_the_size() -> None:
    table = LatencyTable()
    for repeats in (1, 7) * 200:
        table.observe(16, 0.002 * repeats, repeats)
        table.observe(64, 0.008 * repeats, repeats)
    # A run of either size takes so long for each repeat, and makes about four of them.
    assert table.seconds(16) == pytest.approx(0.002 * 4, rel=0.2)
    assert table.seconds(64) == pytest.approx(0.008 * 4, rel=0.2)
    # Sure to hold for the seven repeats of half of the runs, although no size was ever seen to deviate.
    assert (table.seconds(16, 2.0) or 0) > 0.002 * 7
    for _ in range(100):
        table.observe(16, 0.002, 1)
    assert table.seconds(64) == pytest.approx(0.008, rel=0.05)  # what one size shows of the repeats holds for the other
