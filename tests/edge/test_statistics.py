"""Counters, histograms and the table of metrics, and the windows of two readings."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from copy import deepcopy
from functools import partial

import msgspec
import numpy as np
import pytest
from google.protobuf.json_format import ParseDict
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.instruments.metrics import METRICS, RequestMetric
from edge.instruments.snapshot import BUCKETS_NS, STAGES, Histogram, TierRuns, Timings
from edge.instruments.statistics import ModelStatistics
from edge.pb import telemetry_pb2 as pb
from edge.telemetry.window import WINDOW_SECONDS, Recent, between, document
from tests.support.metrics import CountedRequest

#: Durations up to the last bound.
DURATIONS = st.lists(st.integers(0, BUCKETS_NS[-1]), min_size=1, max_size=200)


def observed(durations):
    histogram = Histogram()
    for duration in durations:
        histogram.observe(duration)
    return histogram


def bucket_of(duration):
    index = next(index for index, bound in enumerate(BUCKETS_NS) if duration <= bound)
    return (BUCKETS_NS[index - 1] if index else 0), BUCKETS_NS[index]


def test_buckets():
    assert (BUCKETS_NS[0], BUCKETS_NS[2], BUCKETS_NS[-1] > 10e9) == (5_000, 10_000, True)
    assert np.allclose(np.divide(BUCKETS_NS[1:], BUCKETS_NS[:-1]), 2**0.5, rtol=1e-4)


@given(DURATIONS, st.integers(1, 100))
@settings(deadline=None, max_examples=100)
def test_percentiles_are_in_the_bucket_of_the_exact_ones(durations, percent):
    # The smallest duration that so many percent do not exceed; in whole numbers, because a rounding error could
    # choose its neighbour.
    rank = -(-len(durations) * percent // 100)
    low, high = bucket_of(int(np.partition(durations, rank - 1)[rank - 1]))
    histogram = observed(durations)
    assert low <= histogram.percentile(percent) <= high
    assert histogram.percentile(percent - 1) <= histogram.percentile(percent)


def test_percentiles_are_interpolated_and_end_at_the_last_bound():
    histogram = observed([60_000] * 100)
    low, high = bucket_of(60_000)
    assert (histogram.percentile(50), histogram.percentile(100)) == (round((low + high) / 2), high)
    histogram = observed([10**12, 10**15])
    assert (histogram.counts[-1], histogram.percentile(99), Histogram().percentile(99)) == (2, BUCKETS_NS[-1], 0)


def test_bound_belongs_to_its_bucket():
    histogram = observed([duration for bound in BUCKETS_NS for duration in (bound, bound + 1)])
    assert histogram.counts == [1, *[2] * (len(BUCKETS_NS) - 1), 1]
    assert (histogram.count, histogram.total) == (sum(histogram.counts), sum(2 * bound + 1 for bound in BUCKETS_NS))


def test_requests_in_one_run_are_one_execution():
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


def test_failures_by_reason_and_place():
    statistics = ModelStatistics()
    for reason, place in (("Overloaded", "tokens"), ("Overloaded", "tokens"), ("Cancelled", "queued"), ("Runner", "")):
        statistics.failed(reason, 10, place)
    now = statistics.snapshot()
    assert now.failures == {"Overloaded": 2, "Cancelled": 1, "Runner": 1}
    assert now.drops == {("Overloaded", "tokens"): 2, ("Cancelled", "queued"): 1}
    assert (now.fail, now.fail_ns, now.success) == (4, 40, 0)
    assert all(histogram.count == 0 for histogram in now.stages.values())


def test_stages_and_reasons_by_tier():
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


def test_names_end_with_unit_and_kind():
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert metric.name.removesuffix("_total").endswith(metric.unit), metric.name
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert metric.name.startswith("nv_inference_" if metric.kind == "unknown" else "fewheads_"), metric.name
        if isinstance(metric, RequestMetric):
            assert bool(metric.labels) == bool(metric.label), metric.name


def test_request_metric_is_a_sum_by_labels_or_a_histogram():
    tokens = RequestMetric("tokens", "", lambda r: r.size, labels=("reason",), label=lambda r: (r.tier_reason,))
    statistics = ModelStatistics((tokens, RequestMetric("rows", "", lambda request: request.rows, buckets=(1, 4))))
    assert statistics.snapshot().counted == {"tokens": {}, "rows": {}}
    for count, reason in ((0, "load"), (1, "load"), (4, "full"), (9, "full")):
        statistics.succeeded(CountedRequest(rows=count, size=10 * count, tier_reason=reason))
    first = statistics.snapshot().counted
    assert first["tokens"] == {("load",): 10, ("full",): 130}
    histogram = first["rows"][()]
    assert (histogram.count, histogram.total, histogram.counts) == (4, 14, [2, 1, 1])
    histogram.observe(1)
    first["tokens"].clear()
    second = statistics.snapshot().counted
    assert (second["rows"][()].count, len(second["tokens"])) == (4, 2)


def test_failing_metric_affects_no_other(caplog):
    wrong = RequestMetric("wrong", "", lambda request: 1 // (request.rows - 2))
    statistics = ModelStatistics((wrong, RequestMetric("rows", "", lambda request: request.rows)))
    for _ in range(3):
        statistics.succeeded(CountedRequest(rows=2))
    now = statistics.snapshot()
    assert (now.success, now.counted) == (3, {"wrong": {(): 0}, "rows": {(): 6}})
    assert [record.message for record in caplog.records] == ["metric wrong failed and is no longer counted"]


def test_snapshot_is_independent():
    statistics = ModelStatistics()

    def count():
        statistics.executed(2, 1)
        statistics.succeeded(CountedRequest(Timings(request_ns=5), 2, 2, tier_reason="r"), "full")
        statistics.failed("Overloaded", 1, "queue")

    def numbers(now):
        totals = [(of.count, of.total, of.counts) for of in (now.stages["request"], now.tier_stages["full"]["request"])]
        return [now.success, now.failures, now.drops, now.tiers, now.batches, *totals]

    count()
    first = statistics.snapshot()
    before = deepcopy(numbers(first))
    count()
    assert numbers(first) == before
    assert all(one != other for one, other in zip(numbers(statistics.snapshot()), before, strict=True))


def test_runs_by_tier():
    statistics = ModelStatistics()
    statistics.executed(3, 100, tier="full", requests=2, size=3 * 16)
    before = statistics.runs()
    statistics.executed(1, 50, tier="full", size=8)
    statistics.executed(4, 20, tier="half", requests=4)
    assert before == {"full": TierRuns(2, 3, 48, 100)}
    assert statistics.runs() == {"full": TierRuns(3, 4, 56, 150), "half": TierRuns(4, 4, 4, 20)}
    assert statistics.execution_count == 3


def test_threads_lose_no_count_and_snapshots_are_consistent(request):
    request.addfinalizer(partial(sys.setswitchinterval, sys.getswitchinterval()))
    sys.setswitchinterval(1e-6)  # switch threads as often as Python can
    statistics = ModelStatistics()
    threads, each = 8, 500
    torn = []
    done = threading.Event()

    def count(rows):
        for _ in range(each):
            statistics.executed(rows, 1)
            statistics.succeeded(CountedRequest(Timings(request_ns=3, queue_ns=1), rows, rows))
            statistics.failed("Overloaded", 2)

    def watch():
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


def stage(durations):
    of = observed(durations)
    return pb.StageReading(stage="request", count=of.count, total_ns=of.total, bucket_counts=of.counts)


def model(durations=(), name="m", **fields):
    return pb.ModelReading(
        name=name, version="1", state="READY", success_count=len(durations), stages=[stage(durations)], **fields
    )


def reading(uptime_seconds, *models):
    return pb.Reading(uptime_seconds=uptime_seconds, models=models)


@given(st.just([]) | DURATIONS, st.just([]) | DURATIONS)
@settings(deadline=None, max_examples=50)
def test_percentiles_are_those_of_the_new_durations(before, between_them):
    window = between(reading(10, model(before)), reading(14, model(before + between_them)))
    assert (window.seconds, window.since_start, window.answers_per_second) == (4, False, len(between_them) / 4)
    if not between_them:
        assert window.stages == {}
        return
    want = observed(between_them)
    found = window.models[0].stages["request"]
    assert (found, found.count) == (window.stages["request"], len(between_them))
    assert found.mean_ms == pytest.approx(sum(between_them) / len(between_them) / 1e6)
    assert [found.p50_ms, found.p95_ms, found.p99_ms] == [want.percentile(p) / 1e6 for p in (50, 95, 99)]


def test_stages_of_the_server_combine_its_models():
    window = between(reading(1, model()), reading(2, model([10**6] * 90), model([10**8] * 10, "other")))
    whole = window.stages["request"]
    assert (whole.count, whole.p50_ms < 2, whole.p95_ms > 80) == (100, True, True)
    assert window.models[0].stages["request"].p99_ms < 2


def test_tiers_failures_and_runs():
    def at(full, half, drops, runs):
        counts = [("full", "full", full, 10**8), ("half", "load", half, 10**6)]
        return model(
            [10**6] * (full + half),
            failure_count=drops,
            tiers=[{"tier": tier, "reason": reason, "count": count} for tier, reason, count, _ in counts],
            tier_latencies=[{"tier": tier, "stages": [stage([ns] * count)]} for tier, _, count, ns in counts],
            drops=[{"reason": "Overloaded", "place": "requests", "count": drops}],
            executions=runs,
        )

    (found,) = between(reading(10, at(5, 0, 2, {1: 5})), reading(12, at(6, 3, 8, {1: 6, 3: 1}))).models
    assert (found.answers, found.failures, found.failures_per_second, found.rows_per_run) == (4, 6, 3, 2)
    full, half = found.tiers
    assert msgspec.structs.astuple(full)[:4] == ("full", 1, 0.25, {"full": 1})
    assert msgspec.structs.astuple(half)[:4] == ("half", 3, 0.75, {"load": 3})
    assert full.stages["request"].p50_ms > 50 > half.stages["request"].p99_ms
    assert [(drop.reason, drop.place, drop.count) for drop in found.drops] == [("Overloaded", "requests", 6)]
    quiet = between(reading(12, at(6, 3, 8, {1: 6})), reading(13, at(6, 3, 8, {1: 6}))).models[0]
    assert (quiet.tiers, quiet.drops, quiet.stages, quiet.rows_per_run) == ([], [], {}, None)


def test_metrics_grow_by_name_and_labels():
    def at(padded, *others):
        name = "fewheads_padded_rows_total"
        rows = [
            pb.Metric(name=name, labels={"tier": tier}, value=value, unit="rows")
            for tier, value in (("full", padded), ("half", 7))
        ]
        return model(metrics=[*rows, *others])

    (found,) = between(reading(10, at(3)), reading(12, at(9, pb.Metric(name="fewheads_other_total", value=1)))).models
    assert [msgspec.structs.astuple(metric) for metric in found.metrics] == [
        ("fewheads_padded_rows_total", {"tier": "full"}, "rows", 6, 3),
        ("fewheads_other_total", {}, "", 1, 0.5),
    ]


def test_energy_by_request_and_token():
    def of(tier, joules, requests, tokens=None):
        return pb.EnergyReading(tier=tier, joules=joules, requests=requests, tokens=tokens)

    before = model(energy=[of("full", 10.0, 5, 500), of("old", 1.0, 1)])
    after = model(energy=[of("full", 16.0, 8, 620), of("half", 1.0, 4), of("old", 1.0, 1)])
    (found,) = between(reading(10, before), reading(14, after)).models
    assert [msgspec.structs.astuple(energy) for energy in found.energy] == [
        ("full", 6.0, 1.5, 3, 2.0, 0.05),
        ("half", 1.0, 0.25, 4, 0.25, None),
    ]


def test_windows_without_an_earlier_reading_or_time_or_model():
    window = between(None, reading(8, model([10**6] * 4)))
    assert (window.seconds, window.since_start, window.answers_per_second) == (8, True, 0.5)
    assert between(reading(3, model()), reading(3, model([1]))).answers_per_second == 0
    window = between(reading(1, model([10**6] * 9, "gone")), reading(2, model([10**6], "new")))
    assert [found.name for found in window.models] == ["new"]
    assert (window.answers_per_second, window.stages["request"].count) == (1, 1)


def test_server_with_other_buckets_has_rates_without_percentiles():
    old = model([10**6] * 4)
    old.stages[0].ClearField("bucket_counts")
    window = between(reading(1, model()), reading(2, old))
    assert window.answers_per_second == 4
    assert window.stages == window.models[0].stages == {}


def test_recent_covers_five_seconds():
    recent = Recent()
    found = [recent.add(reading(second, model([10**6] * second))) for second in range(1, 12)]
    assert [window.since_start for window in found] == [True] + [False] * 10
    assert [window.seconds for window in found[1:]] == [1, 2, 3, 4] + [WINDOW_SECONDS] * 6
    # With longer gaps, a window covers the time since the reading before.
    assert (recent.add(reading(60)).seconds, recent.add(reading(90)).seconds) == (49, 30)


def test_recent_forgets_a_restarted_server():
    recent = Recent()
    recent.add(reading(100, model([10**6] * 50)))
    window = recent.add(reading(2, model([10**6] * 4)))
    assert (window.since_start, window.seconds, window.answers_per_second) == (True, 2, 2)
    assert recent.add(reading(3, model([10**6] * 5))).answers_per_second == 1


def test_document_is_the_readings_json_and_the_window():
    latency = pb.TierLatency(tier="full", stages=[stage([10**6])])
    metric = pb.Metric(name="fewheads_padded_rows_total", labels={"tier": "full"}, value=2, unit="rows")
    now = reading(5, model([10**6], tier_latencies=[latency], metrics=[metric]))
    now.sensors.add(kind="temperature", name="cpu", value=40, unit="celsius", source="/sys")
    fields = msgspec.json.decode(msgspec.json.encode(document(now, between(None, now))))
    assert (fields.pop("window")["models"][0]["stages"]["request"]["count"], fields["queue_depth"]) == (1, 0)
    back = ParseDict(fields, pb.Reading())
    for counted in (now.models[0].stages[0], now.models[0].tier_latencies[0].stages[0]):
        assert counted.bucket_counts  # unchanged by the document
        counted.ClearField("bucket_counts")
    assert back == now
