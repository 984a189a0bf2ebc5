"""Counters, histograms and the table of metrics: percentiles, consistent snapshots, many threads."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from copy import deepcopy
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.instruments.metrics import METRICS, RequestMetric
from edge.instruments.snapshot import BUCKETS_NS, STAGES, Histogram, Snapshot, TierRuns, Timings
from edge.instruments.statistics import ModelStatistics
from tests.support.metrics import CountedRequest

#: Durations up to the last bound.
DURATIONS = st.lists(st.integers(0, BUCKETS_NS[-1]), min_size=1, max_size=200)


def observed(durations: list[int]) -> Histogram:
    histogram = Histogram()
    for duration in durations:
        histogram.observe(duration)
    return histogram


def bucket_of(duration: int) -> tuple[int, int]:
    index = next(index for index, bound in enumerate(BUCKETS_NS) if duration <= bound)
    return (BUCKETS_NS[index - 1] if index else 0), BUCKETS_NS[index]


def test_buckets() -> None:
    assert (BUCKETS_NS[0], BUCKETS_NS[2], BUCKETS_NS[-1] > 10e9) == (5_000, 10_000, True)
    assert np.allclose(np.divide(BUCKETS_NS[1:], BUCKETS_NS[:-1]), 2**0.5, rtol=1e-4)


@given(DURATIONS, st.integers(1, 100))
@settings(deadline=None, max_examples=100)
def test_percentiles_are_in_the_bucket_of_the_exact_ones(durations: list[int], percent: int) -> None:
    # The smallest duration that so many percent do not exceed; in whole numbers, because a rounding error could
    # choose its neighbour.
    rank = -(-len(durations) * percent // 100)
    low, high = bucket_of(int(np.partition(durations, rank - 1)[rank - 1]))
    histogram = observed(durations)
    assert low <= histogram.percentile(percent) <= high
    assert histogram.percentile(percent - 1) <= histogram.percentile(percent)


def test_percentiles_are_interpolated_and_end_at_the_last_bound() -> None:
    histogram = observed([60_000] * 100)
    low, high = bucket_of(60_000)
    assert (histogram.percentile(50), histogram.percentile(100)) == (round((low + high) / 2), high)
    histogram = observed([10**12, 10**15])
    assert (histogram.counts[-1], histogram.percentile(99), Histogram().percentile(99)) == (2, BUCKETS_NS[-1], 0)


def test_bound_belongs_to_its_bucket() -> None:
    histogram = observed([duration for bound in BUCKETS_NS for duration in (bound, bound + 1)])
    assert histogram.counts == [1, *[2] * (len(BUCKETS_NS) - 1), 1]
    assert (histogram.count, histogram.total) == (sum(histogram.counts), sum(2 * bound + 1 for bound in BUCKETS_NS))


def test_requests_in_one_run_are_one_execution() -> None:
    statistics = ModelStatistics()
    before = statistics.snapshot()
    statistics.executed(5, infer_ns=100)
    for rows in (2, 3):
        timings = Timings(compute_input_ns=1, queue_ns=2, compute_infer_ns=100, compute_output_ns=4, request_ns=110)
        statistics.succeeded(CountedRequest(timings, rows, batch_rows=5))
    now = statistics.snapshot()
    assert (now.success, now.inference_count, now.execution_count, now.fail) == (2, 5, 1, 0)
    assert now.last_inference_ms > before.last_inference_ms == 0
    ((rows, batch),) = now.batches.items()
    assert (rows, batch.count) == (5, 1)
    assert (batch.compute_input_ns, batch.compute_infer_ns, batch.compute_output_ns) == (2, 100, 8)
    # Each waited for the whole run.
    totals = {stage: now.stages[stage].total for stage in STAGES}
    assert totals == {"request": 220, "queue": 4, "compute_input": 2, "compute_infer": 200, "compute_output": 8}


def test_failures_by_reason_and_place() -> None:
    statistics = ModelStatistics()
    for reason, place in (("Overloaded", "tokens"), ("Overloaded", "tokens"), ("Cancelled", "queued"), ("Runner", "")):
        statistics.failed(reason, 10, place)
    now = statistics.snapshot()
    assert now.failures == {"Overloaded": 2, "Cancelled": 1, "Runner": 1}
    assert now.drops == {("Overloaded", "tokens"): 2, ("Cancelled", "queued"): 1}
    assert (now.fail, now.fail_ns, now.success) == (4, 40, 0)
    assert all(histogram.count == 0 for histogram in now.stages.values())


def test_stages_and_reasons_by_tier() -> None:
    statistics = ModelStatistics()
    statistics.succeeded(CountedRequest(Timings(request_ns=5, compute_infer_ns=3)))
    assert statistics.snapshot().tier_stages == statistics.snapshot().tiers == {}
    for tier, reason, duration_ns in (("full", "full", 7), ("half", "load", 2), ("half", "load", 4), ("a,b", "r", 9)):
        statistics.succeeded(CountedRequest(Timings(request_ns=duration_ns), tier_reason=reason), tier)
    now = statistics.snapshot()
    of_tiers = {tier: (stages["request"].count, stages["request"].total) for tier, stages in now.tier_stages.items()}
    assert of_tiers == {"full": (1, 7), "half": (2, 6), "a,b": (1, 9)}
    assert now.tiers == {("full", "full"): 1, ("half", "load"): 2, ("a,b", "r"): 1}
    assert all(tuple(stages) == STAGES for stages in now.tier_stages.values())
    assert (now.stages["request"].count, now.stages["request"].total) == (5, 27)


def test_names_end_with_unit_and_kind() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert metric.name.removesuffix("_total").endswith(metric.unit), metric.name
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert metric.name.startswith("nv_inference_" if metric.kind == "unknown" else "fewheads_"), metric.name
        if isinstance(metric, RequestMetric):
            assert bool(metric.labels) == bool(metric.label), metric.name


def test_request_metric_is_a_sum_by_labels_or_a_histogram() -> None:
    tokens = RequestMetric("tokens", "", lambda r: r.size, labels=("reason",), label=lambda r: (r.tier_reason,))
    statistics = ModelStatistics((tokens, RequestMetric("rows", "", lambda request: request.rows, buckets=(1, 4))))
    assert statistics.snapshot().counted == {"tokens": {}, "rows": {}}
    for count, reason in ((0, "load"), (1, "load"), (4, "full"), (9, "full")):
        statistics.succeeded(CountedRequest(rows=count, size=10 * count, tier_reason=reason))
    first = statistics.snapshot().counted
    assert first["tokens"] == {("load",): 10, ("full",): 130}
    histogram = first["rows"][()]
    assert isinstance(histogram, Histogram)
    assert (histogram.count, histogram.total, histogram.counts) == (4, 14, [2, 1, 1])
    histogram.observe(1)
    first["tokens"].clear()
    second = statistics.snapshot().counted
    assert (second["rows"][()].count, len(second["tokens"])) == (4, 2)  # type: ignore[union-attr]


def test_failing_metric_affects_no_other(caplog: pytest.LogCaptureFixture) -> None:
    wrong = RequestMetric("wrong", "", lambda request: 1 // (request.rows - 2))
    statistics = ModelStatistics((wrong, RequestMetric("rows", "", lambda request: request.rows)))
    for _ in range(3):
        statistics.succeeded(CountedRequest(rows=2))
    now = statistics.snapshot()
    assert (now.success, now.counted) == (3, {"wrong": {(): 0}, "rows": {(): 6}})
    assert [record.message for record in caplog.records] == ["metric wrong failed and is no longer counted"]


def test_snapshot_is_independent() -> None:
    statistics = ModelStatistics()

    def count() -> None:
        statistics.executed(2, 1)
        statistics.succeeded(CountedRequest(Timings(request_ns=5), 2, 2, tier_reason="r"), "full")
        statistics.failed("Overloaded", 1, "queue")

    def numbers(now: Snapshot) -> list[object]:
        totals = [(of.count, of.total, of.counts) for of in (now.stages["request"], now.tier_stages["full"]["request"])]
        return [now.success, now.failures, now.drops, now.tiers, now.batches, *totals]

    count()
    first = statistics.snapshot()
    before = deepcopy(numbers(first))
    count()
    assert numbers(first) == before
    assert all(one != other for one, other in zip(numbers(statistics.snapshot()), before, strict=True))


def test_runs_by_tier() -> None:
    statistics = ModelStatistics()
    statistics.executed(3, 100, tier="full", requests=2, size=3 * 16)
    before = statistics.runs()
    statistics.executed(1, 50, tier="full", size=8)
    statistics.executed(4, 20, tier="half", requests=4)
    assert before == {"full": TierRuns(2, 3, 48, 100)}
    assert statistics.runs() == {"full": TierRuns(3, 4, 56, 150), "half": TierRuns(4, 4, 4, 20)}
    assert statistics.execution_count == 3


def test_threads_lose_no_count_and_snapshots_are_consistent(request: pytest.FixtureRequest) -> None:
    request.addfinalizer(partial(sys.setswitchinterval, sys.getswitchinterval()))
    sys.setswitchinterval(1e-6)  # switch threads as often as Python can
    statistics = ModelStatistics()
    threads, each = 8, 500
    torn: list[str] = []
    done = threading.Event()

    def count(rows: int) -> None:
        for _ in range(each):
            statistics.executed(rows, 1)
            statistics.succeeded(CountedRequest(Timings(request_ns=3, queue_ns=1), rows, rows))
            statistics.failed("Overloaded", 2)

    def watch() -> None:
        while not done.is_set():
            now = statistics.snapshot()
            counts = {now.success, now.stages["request"].total / 3, *(of.count for of in now.stages.values())}
            runs = {now.execution_count, sum(batch.count for batch in now.batches.values())}
            # A run is counted before its requests.
            if (len(counts), len(runs)) != (1, 1) or not 0 <= max(runs) - now.success <= threads:
                torn.append(str(now))

    with ThreadPoolExecutor(threads + 1) as pool:
        watcher = pool.submit(watch)
        wait([pool.submit(count, rows) for rows in range(1, threads + 1)])
        done.set()
    watcher.result()
    assert not torn
    now = statistics.snapshot()
    assert (now.success, now.fail) == (threads * each, threads * each)
    assert {rows: batch.count for rows, batch in now.batches.items()} == dict.fromkeys(range(1, threads + 1), each)
