"""Differences of two readings of one server: rates, percentiles, shares of tiers, and causes of failures.

Readings accumulate from the start of the server. ``fewheads top`` and the web page show the present, which is the
difference of two readings.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from operator import add, sub
from typing import Any, TypeVar

import msgspec
from google.protobuf.json_format import MessageToDict

from edge.instruments.snapshot import Histogram
from edge.pb import telemetry_pb2 as pb

#: Length of a window. A single second may have too few requests for stable percentiles.
WINDOW_SECONDS = 5.0

#: The state of a server at one moment.
Reading = pb.Reading

K = TypeVar("K")
_Stages = Sequence[pb.StageReading]
_NO_STAGE = pb.StageReading()


class StageWindow(msgspec.Struct, frozen=True):
    """Durations of one stage, estimated as in ``StageReading``."""

    count: int
    mean_ms: float
    p50_ms: float
    p95_ms: float
    p99_ms: float


class TierWindow(msgspec.Struct, frozen=True):
    """Responses of one tier: their number, their share of the model's, their reasons, and their durations."""

    tier: str
    count: int
    share: float
    reasons: dict[str, int]
    stages: dict[str, StageWindow]


class DropWindow(msgspec.Struct, frozen=True):
    """Refused or abandoned requests, as in ``DropReading``."""

    reason: str
    place: str
    count: int


class MetricWindow(msgspec.Struct, frozen=True):
    """Growth of one sample of a metric; ``unit`` is empty for a plain count."""

    name: str
    labels: dict[str, str]
    unit: str
    increase: float
    increase_per_second: float


class EnergyWindow(msgspec.Struct, frozen=True):
    """Energy of a tier above idle; ``joules_per_token`` is None for a model without a sequence axis."""

    tier: str
    joules: float
    watts: float
    requests: int
    joules_per_request: float
    joules_per_token: float | None


class ModelWindow(msgspec.Struct, frozen=True):
    """One version of a model; ``rows_per_run`` is None without runs, and stages without durations are absent."""

    name: str
    version: str
    state: str
    answers: int
    answers_per_second: float
    failures: int
    failures_per_second: float
    rows_per_run: float | None
    stages: dict[str, StageWindow]
    tiers: list[TierWindow]
    drops: list[DropWindow]
    metrics: list[MetricWindow]
    energy: list[EnergyWindow]


class Window(msgspec.Struct, frozen=True):
    """The whole server; without an earlier reading, ``since_start`` is true and ``seconds`` is the uptime."""

    seconds: float
    since_start: bool
    answers_per_second: float
    failures_per_second: float
    stages: dict[str, StageWindow]
    models: list[ModelWindow]


class Recent:
    """The last readings of one server, for :data:`WINDOW_SECONDS`."""

    def __init__(self) -> None:
        self._readings: deque[Reading] = deque()

    def add(self, reading: Reading) -> Window:
        """Add the newest reading and return its difference to the oldest one."""
        readings = self._readings
        if readings and reading.uptime_seconds < readings[-1].uptime_seconds:  # the server was restarted
            readings.clear()
        while len(readings) > 1 and reading.uptime_seconds - readings[1].uptime_seconds >= WINDOW_SECONDS:
            readings.popleft()
        window = between(readings[0] if readings else None, reading)
        readings.append(reading)
        return window


def between(before: Reading | None, now: Reading) -> Window:
    """Return the difference of two readings of one process; since its start where ``before`` is None."""
    since_start, before = before is None, before or pb.Reading()
    seconds = now.uptime_seconds - before.uptime_seconds
    earlier = {(model.name, model.version): model for model in before.models}
    pairs = [(earlier.get((model.name, model.version), pb.ModelReading()), model) for model in now.models]
    models = [_model(*pair, seconds) for pair in pairs]
    return Window(
        seconds=seconds,
        since_start=since_start,
        answers_per_second=sum(model.answers_per_second for model in models),
        failures_per_second=sum(model.failures_per_second for model in models),
        stages=_stages((before.stages, now.stages) for before, now in pairs),
        models=models,
    )


def document(reading: Reading, window: Window) -> dict[str, Any]:
    """Return a reading in protobuf's JSON, with the window and without the bucket counts, most of the message."""
    plain = pb.Reading()
    plain.CopyFrom(reading)
    for model in plain.models:
        for stage in (*model.stages, *(stage for tier in model.tier_latencies for stage in tier.stages)):
            stage.ClearField("bucket_counts")  # slow to convert
    fields = MessageToDict(plain, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    for model in fields["models"]:
        for stage in (*model["stages"], *(stage for tier in model["tier_latencies"] for stage in tier["stages"])):
            del stage["bucket_counts"]
    return {**fields, "window": window}


def _model(before: pb.ModelReading, now: pb.ModelReading, seconds: float) -> ModelWindow:
    answers = now.success_count - before.success_count
    failures = now.failure_count - before.failure_count
    runs = _grown(before.executions, now.executions)
    drops = _grown(
        {(drop.reason, drop.place): drop.count for drop in before.drops},
        {(drop.reason, drop.place): drop.count for drop in now.drops},
    )
    return ModelWindow(
        name=now.name,
        version=now.version,
        state=now.state,
        answers=answers,
        answers_per_second=_rate(answers, seconds),
        failures=failures,
        failures_per_second=_rate(failures, seconds),
        rows_per_run=sum(rows * count for rows, count in runs.items()) / sum(runs.values()) if runs else None,
        stages=_stages([(before.stages, now.stages)]),
        tiers=_tiers(before, now),
        drops=[DropWindow(reason, place, count) for (reason, place), count in drops.items()],
        metrics=_metrics(before, now, seconds),
        energy=list(_energy(before, now, seconds)),
    )


def _metrics(before: pb.ModelReading, now: pb.ModelReading, seconds: float) -> list[MetricWindow]:
    earlier = {_key(metric): metric.value for metric in before.metrics}
    grown = [(metric, metric.value - earlier.get(_key(metric), 0.0)) for metric in now.metrics]
    return [
        MetricWindow(metric.name, dict(metric.labels), metric.unit, increase, _rate(increase, seconds))
        for metric, increase in grown
        if increase > 0
    ]


def _energy(before: pb.ModelReading, now: pb.ModelReading, seconds: float) -> Iterator[EnergyWindow]:
    earlier = {reading.tier: reading for reading in before.energy}
    for reading in now.energy:
        then = earlier.get(reading.tier, pb.EnergyReading())
        joules, requests = reading.joules - then.joules, reading.requests - then.requests
        tokens = reading.tokens - then.tokens if reading.HasField("tokens") else 0
        if requests > 0:
            yield EnergyWindow(
                reading.tier,
                joules,
                _rate(joules, seconds),
                requests,
                joules / requests,
                joules / tokens if tokens > 0 else None,
            )


def _key(metric: pb.Metric) -> tuple[str, frozenset[tuple[str, str]]]:
    return metric.name, frozenset(metric.labels.items())


def _tiers(before: pb.ModelReading, now: pb.ModelReading) -> list[TierWindow]:
    grown = _grown(
        {(tier.tier, tier.reason): tier.count for tier in before.tiers},
        {(tier.tier, tier.reason): tier.count for tier in now.tiers},
    )
    reasons: dict[str, dict[str, int]] = {}
    for (tier, reason), count in grown.items():
        reasons.setdefault(tier, {})[reason] = count
    total = sum(grown.values())
    earlier = {latency.tier: latency.stages for latency in before.tier_latencies}
    latencies = {
        latency.tier: _stages([(earlier.get(latency.tier, ()), latency.stages)]) for latency in now.tier_latencies
    }
    return [
        TierWindow(tier, sum(counts.values()), sum(counts.values()) / total, counts, latencies.get(tier, {}))
        for tier, counts in sorted(reasons.items())
    ]


def _stages(pairs: Iterable[tuple[_Stages, _Stages]]) -> dict[str, StageWindow]:
    """Return each stage with the durations of all pairs of readings; stages without durations are absent."""
    histograms: dict[str, Histogram] = {}
    for before, now in pairs:
        earlier = {stage.stage: stage for stage in before}
        for stage in now:
            histogram, then = histograms.setdefault(stage.stage, Histogram()), earlier.get(stage.stage, _NO_STAGE)
            # A server of another release may have other buckets or none, and then there are no percentiles.
            if len(stage.bucket_counts) == len(histogram.counts):
                histogram.count += stage.count - then.count
                histogram.total += stage.total_ns - then.total_ns
                grown = map(sub, stage.bucket_counts, then.bucket_counts or repeat(0))
                histogram.counts = list(map(add, histogram.counts, grown))
    return {stage: _stage(histogram) for stage, histogram in histograms.items() if histogram.count}


def _stage(durations: Histogram) -> StageWindow:
    percentiles = (durations.percentile(percent) / 1e6 for percent in (50, 95, 99))
    return StageWindow(durations.count, durations.total / durations.count / 1e6, *percentiles)


def _grown(before: Mapping[K, int], now: Mapping[K, int]) -> dict[K, int]:
    """Return the increase of each count that grew."""
    grown = {key: count - before.get(key, 0) for key, count in now.items()}
    return {key: count for key, count in grown.items() if count > 0}


def _rate(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
