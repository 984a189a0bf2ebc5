"""Buckets of lengths and rows: padding costs at most a tenth of a run's time, and lengths of equal times share one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from edge.scheduling.batching import Buckets, next_length
from edge.scheduling.latency import LatencyModel

LONGEST, MOST_ROWS = 100, 6
SIZES = [rows * tokens for rows in range(1, MOST_ROWS + 1) for tokens in (1, 8, 12, 16, 24, 32, 48, 64, 96, LONGEST)]


def learnt(seconds: Callable[[int], float], runs: int = 32) -> LatencyModel:
    """Return the table after some runs of every size."""
    table = LatencyModel()
    learn(table, seconds, runs)
    return table


def learn(table: LatencyModel, seconds: Callable[[int], float], runs: int) -> None:
    for size in sorted({*SIZES}) * runs:
        table.observe(size, seconds(size))


def kernel_bound(size: int) -> float:
    """Return the time of a device that needs a millisecond for the launches of a run."""
    return max(1e-3, 2e-5 * size)


@pytest.mark.parametrize(
    "table", [None, LatencyModel(), learnt(kernel_bound, runs=31)], ids=["none", "new", "few runs"]
)
def test_lengths_double_and_rows_stay_without_measured_times(table: LatencyModel | None) -> None:
    buckets = Buckets(LONGEST, MOST_ROWS, table)
    shapes = [buckets.shape(3, tokens) for tokens in (1, 8, 9, 13, 17, 33, 97, LONGEST)]
    assert shapes == [(3, 8), (3, 8), (3, 12), (3, 16), (3, 24), (3, 48), (3, LONGEST), (3, LONGEST)]


def test_lengths_and_rows_that_take_the_same_time_share_a_bucket() -> None:
    buckets = Buckets(LONGEST, MOST_ROWS, learnt(kernel_bound))
    # 1 ms for up to 50 elements; one more bucket would cost more than a tenth.
    assert [buckets.shape(1, tokens)[1] for tokens in (1, 9, 48, 49, 65, 96)] == [48, 48, 48, 64, 100, 100]
    assert [buckets.shape(rows, 8) for rows in range(1, MOST_ROWS + 1)] == [
        (1, 48), (2, 24), (4, 12), (4, 12), (6, 8), (6, 8)
    ]  # fmt: skip
    whole = Buckets(0, MOST_ROWS, learnt(kernel_bound))  # rows of a fixed length
    assert [whole.shape(rows, 1) for rows in (1, 3, 5)] == [(1, 1), (4, 1), (6, 1)]


def test_padding_costs_at_most_a_tenth_of_the_time() -> None:
    def seconds(size: int) -> float:
        return 1e-3 + 5e-6 * size

    buckets = Buckets(LONGEST, MOST_ROWS, learnt(seconds))
    used = set()
    for rows in range(1, MOST_ROWS + 1):
        for tokens in range(1, LONGEST + 1):
            padded = buckets.shape(rows, tokens)
            assert padded[0] >= rows
            assert padded[1] >= tokens
            least = rows * min(next_length(tokens), LONGEST)
            # Sizes within a fourth root of two are timed as one.
            assert seconds(padded[0] * padded[1]) <= 1.15 * seconds(least)
            used.add(padded)
    assert len(used) - MOST_ROWS * LONGEST // 64 < 0.6 * MOST_ROWS * 9  # without the runs that show their own times


def test_buckets_follow_times_that_change() -> None:
    table = learnt(kernel_bound)
    buckets = Buckets(LONGEST, MOST_ROWS, table)
    assert buckets.shape(1, 8) == (1, 48)
    learn(table, lambda size: 1e-4 * size, runs=200)
    assert [buckets.shape(1, 8) for _ in range(64)][-1] == buckets.shape(1, 8) == (1, 8)


def test_padding_ends_when_only_shorter_runs_become_faster() -> None:
    """A padded size is not run any more, so some runs stay as they are and show its time."""
    buckets = Buckets(LONGEST, MOST_ROWS, table := learnt(lambda size: 1e-3))
    for _ in range(64 * 20):
        rows, tokens = buckets.shape(1, 8)
        table.observe(rows * tokens, 1e-5 * rows * tokens)
    assert buckets.shape(1, 8) == (1, 8)


def test_slow_first_runs_do_not_make_a_size_share_a_bucket() -> None:
    table = LatencyModel()
    for run in range(32):
        table.observe(8, 1e-3 if run else 0.1)  # the first one loads the device's code
        table.observe(12, 1.5e-3)
    assert Buckets(12, latency=table).shape(1, 8) == (1, 8)
