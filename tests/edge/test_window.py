"""Windows of two readings: rates, percentiles, tiers, failures, restarts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest
from google.protobuf.json_format import ParseDict
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.instruments.snapshot import BUCKETS_NS, Histogram
from edge.pb import telemetry_pb2 as pb
from edge.telemetry.window import WINDOW_SECONDS, Recent, between, document

DURATIONS = st.lists(st.integers(0, BUCKETS_NS[-1]), max_size=50)


def observed(durations: Sequence[int]) -> Histogram:
    histogram = Histogram()
    for duration in durations:
        histogram.observe(duration)
    return histogram


def stage(durations: Sequence[int]) -> pb.StageReading:
    of = observed(durations)
    return pb.StageReading(stage="request", count=of.count, total_ns=of.total, bucket_counts=of.counts)


def model(durations: Sequence[int] = (), name: str = "m", **fields: Any) -> pb.ModelReading:
    return pb.ModelReading(
        name=name, version="1", state="READY", success_count=len(durations), stages=[stage(durations)], **fields
    )


def reading(uptime_seconds: float, *models: pb.ModelReading) -> pb.Reading:
    return pb.Reading(uptime_seconds=uptime_seconds, models=models)


@given(DURATIONS, DURATIONS)
@settings(deadline=None, max_examples=50)
def test_percentiles_are_those_of_the_new_durations(before: list[int], between_them: list[int]) -> None:
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


def test_stages_of_the_server_combine_its_models() -> None:
    window = between(reading(1, model()), reading(2, model([10**6] * 90), model([10**8] * 10, "other")))
    whole = window.stages["request"]
    assert (whole.count, whole.p50_ms < 2, whole.p95_ms > 80) == (100, True, True)
    assert window.models[0].stages["request"].p99_ms < 2


def test_tiers_failures_and_runs() -> None:
    def at(full: int, half: int, drops: int, runs: Mapping[int, int]) -> pb.ModelReading:
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


def test_metrics_grow_by_name_and_labels() -> None:
    def at(padded: float, *others: pb.Metric) -> pb.ModelReading:
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


def test_energy_by_request_and_token() -> None:
    def of(tier: str, joules: float, requests: int, tokens: int | None = None) -> pb.EnergyReading:
        return pb.EnergyReading(tier=tier, joules=joules, requests=requests, tokens=tokens)

    before = model(energy=[of("full", 10.0, 5, 500), of("old", 1.0, 1)])
    after = model(energy=[of("full", 16.0, 8, 620), of("half", 1.0, 4), of("old", 1.0, 1)])
    (found,) = between(reading(10, before), reading(14, after)).models
    assert [msgspec.structs.astuple(energy) for energy in found.energy] == [
        ("full", 6.0, 1.5, 3, 2.0, 0.05),
        ("half", 1.0, 0.25, 4, 0.25, None),
    ]


def test_windows_without_an_earlier_reading_or_time_or_model() -> None:
    window = between(None, reading(8, model([10**6] * 4)))
    assert (window.seconds, window.since_start, window.answers_per_second) == (8, True, 0.5)
    assert between(reading(3, model()), reading(3, model([1]))).answers_per_second == 0
    window = between(reading(1, model([10**6] * 9, "gone")), reading(2, model([10**6], "new")))
    assert [found.name for found in window.models] == ["new"]
    assert (window.answers_per_second, window.stages["request"].count) == (1, 1)


def test_server_with_other_buckets_has_rates_without_percentiles() -> None:
    old = model([10**6] * 4)
    old.stages[0].ClearField("bucket_counts")
    window = between(reading(1, model()), reading(2, old))
    assert window.answers_per_second == 4
    assert window.stages == window.models[0].stages == {}


def test_recent_covers_five_seconds() -> None:
    recent = Recent()
    found = [recent.add(reading(second, model([10**6] * second))) for second in range(1, 12)]
    assert [window.since_start for window in found] == [True] + [False] * 10
    assert [window.seconds for window in found[1:]] == [1, 2, 3, 4] + [WINDOW_SECONDS] * 6
    # With longer gaps, a window covers the time since the reading before.
    assert (recent.add(reading(60)).seconds, recent.add(reading(90)).seconds) == (49, 30)


def test_recent_forgets_a_restarted_server() -> None:
    recent = Recent()
    recent.add(reading(100, model([10**6] * 50)))
    window = recent.add(reading(2, model([10**6] * 4)))
    assert (window.since_start, window.seconds, window.answers_per_second) == (True, 2, 2)
    assert recent.add(reading(3, model([10**6] * 5))).answers_per_second == 1


def test_document_is_the_readings_json_and_the_window() -> None:
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
