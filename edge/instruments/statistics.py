"""Counters and histograms of one model, which ModelStatistics, Prometheus and Telemetry report."""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace

from edge.instruments.histogram import BUCKETS_NS, Histogram
from edge.instruments.metrics import REQUEST_METRICS, Answered, RequestMetric
from edge.instruments.snapshot import BatchTotals, Counted, Labels, Snapshot, Stages, TierRuns, Timings, new_stages

log = logging.getLogger(__name__)


class ModelStatistics:
    """Thread-safe counters of one model. They outlive reloads of the model.

    Args:
        metrics: the metrics that each successful request adds to, beside the fields of the snapshot.
    """

    def __init__(self, metrics: Sequence[RequestMetric] = REQUEST_METRICS) -> None:
        self._lock = threading.Lock()
        self._now = Snapshot()
        self._runs: dict[str, TierRuns] = {}
        self._metrics: list[tuple[RequestMetric, Callable[[Answered], int], Counted]] = []
        for metric in metrics:
            values: Counted = {} if metric.labels or metric.buckets else {(): 0}  # a counter without labels begins at 0
            self._now.counted[metric.name] = values
            self._metrics.append((metric, metric.count, values))

    @property
    def execution_count(self) -> int:
        """Calls of the runtime."""
        return self._now.execution_count

    def runs(self) -> dict[str, TierRuns]:
        """Return the runs of each tier."""
        with self._lock:
            return {tier: replace(runs) for tier, runs in self._runs.items()}

    def executed(self, rows: int, infer_ns: int, *, tier: str = "", requests: int = 1, size: int = 0) -> None:
        """Count one call of the runtime.

        Args:
            rows: the rows of all requests in it.
            infer_ns: its time.
            tier: the tier that ran.
            requests: the number of requests in it.
            size: the size of its inputs as batching counts it: rows times tokens where the model has a sequence axis;
                0 is the number of rows.
        """
        with self._lock:
            runs = self._runs.get(tier) or self._runs.setdefault(tier, TierRuns())
            runs.requests += requests
            runs.rows += rows
            runs.tokens += size or rows
            runs.infer_ns += infer_ns
            self._now.execution_count += 1
            batch = self._batch(rows)
            batch.count += 1
            batch.compute_infer_ns += infer_ns

    def succeeded(self, request: Answered, tier: str = "") -> None:
        """Count one successful request.

        Args:
            request: the request.
            tier: the tier that computed the response, or both of a cascade; empty for models with one tier.
        """
        timings = request.timings
        with self._lock:
            now = self._now
            now.success += 1
            now.inference_count += request.rows
            now.last_inference_ms = time.time_ns() // 1_000_000
            _observe(now.stages, timings)
            if tier:
                if tier not in now.tier_stages:
                    now.tier_stages[tier] = new_stages()
                _observe(now.tier_stages[tier], timings)
                reason = request.tier_reason
                now.tiers[tier, reason] = now.tiers.get((tier, reason), 0) + 1
            batch = self._batch(request.batch_rows)
            batch.compute_input_ns += timings.compute_input_ns
            batch.compute_output_ns += timings.compute_output_ns
            for metric, count, values in self._metrics:
                try:
                    value = count(request)
                    if value or metric.buckets:
                        _add(metric, values, value, metric.label(request) if metric.label else ())
                except Exception:  # noqa: PERF203  # a broken metric must affect neither the response nor other metrics
                    log.exception("metric %s failed and is no longer counted", metric.name)
                    self._metrics = [each for each in self._metrics if each[0] is not metric]

    def failed(self, reason: str, duration_ns: int, place: str = "") -> None:
        """Count one failed request.

        Args:
            reason: the class of the error.
            duration_ns: the time since its arrival.
            place: the limit that refused it, or its stage when it was abandoned; empty for other failures.
        """
        with self._lock:
            now = self._now
            now.failures[reason] = now.failures.get(reason, 0) + 1
            now.fail_ns += duration_ns
            if place:
                now.drops[reason, place] = now.drops.get((reason, place), 0) + 1

    def snapshot(self) -> Snapshot:
        """Return a consistent copy."""
        with self._lock:
            return self._now.copy()

    def _batch(self, rows: int) -> BatchTotals:
        batches = self._now.batches
        if rows not in batches:
            batches[rows] = BatchTotals()
        return batches[rows]


def _add(metric: RequestMetric, values: Counted, value: int, labels: Labels) -> None:
    if not metric.buckets:
        values[labels] = values.get(labels, 0) + value  # type: ignore[operator]  # a counter has no histograms
        return
    if labels not in values:
        values[labels] = Histogram(metric.buckets)
    values[labels].observe(value)  # type: ignore[union-attr]  # a metric with buckets has nothing else


def _observe(stages: Stages, timings: Timings) -> None:
    durations_ns = (
        timings.request_ns,
        timings.queue_ns,
        timings.compute_input_ns,
        timings.compute_infer_ns,
        timings.compute_output_ns,
    )
    for histogram, duration_ns in zip(stages.values(), durations_ns, strict=True):  # in the order of STAGES
        # Histogram.observe without the calls, five for each request.
        histogram.count += 1
        histogram.total += duration_ns
        histogram.counts[bisect_left(BUCKETS_NS, duration_ns)] += 1
