"""Counters and histograms of one model, which ModelStatistics, Prometheus and Telemetry report."""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Final

from edge.instruments.metrics import REQUEST_METRICS, CompletedRequest, RequestMetric
from edge.instruments.snapshot import BUCKETS_NS, STAGES, Counted, End, Histogram, Snapshot, Stages, TierRuns, Timings

log = logging.getLogger(__name__)

#: In the order of :data:`STAGES`.
_DURATIONS_NS: Final = attrgetter(*(f"{stage}_ns" for stage in STAGES))
_Counting = tuple[RequestMetric, Callable[[CompletedRequest], int], Counted]


class ModelStatistics:
    """Thread-safe counters of one model. They outlive reloads of the model."""

    def __init__(self, metrics: Sequence[RequestMetric] = REQUEST_METRICS) -> None:
        self._lock = threading.Lock()
        self._now = Snapshot()
        self._runs: dict[str, TierRuns] = defaultdict(TierRuns)
        # By the kind of a request's end; requests without one do not even look at those of others.
        self._metrics: defaultdict[type[End] | None, list[_Counting]] = defaultdict(list)
        for metric in metrics:
            values: Counted = defaultdict(partial(Histogram, metric.buckets) if metric.buckets else int)
            if not metric.labels and not metric.buckets:
                values[()] = 0  # a counter without labels begins at 0
            self._now.counted[metric.name] = values
            self._metrics[metric.of].append((metric, metric.count, values))

    @property
    def execution_count(self) -> int:
        """Calls of the runtime."""
        return self._now.execution_count

    def runs(self) -> dict[str, TierRuns]:
        with self._lock:
            return {tier: replace(runs) for tier, runs in self._runs.items()}

    def executed(self, rows: int, infer_ns: int, *, tier: str = "", requests: int = 1, size: int = 0) -> None:
        """Count one call of the runtime; ``size`` is rows times tokens where the model has a sequence axis, else 0."""
        with self._lock:
            runs = self._runs[tier]
            runs.requests += requests
            runs.rows += rows
            runs.tokens += size or rows
            runs.infer_ns += infer_ns
            self._now.execution_count += 1
            batch = self._now.batches[rows]
            batch.count += 1
            batch.compute_infer_ns += infer_ns

    def joined(self, tier: str, infer_ns: int, tokens: int) -> None:
        """Count a run in which requests join an iterative program, and the tokens that it gives to their texts."""
        with self._lock:
            self._runs[tier].infer_ns += infer_ns
            self._runs[tier].tokens += tokens

    def ended_between_steps(self, tier: str) -> None:
        """Count a request among those of a tier's runs that none of its calls of :meth:`executed` has counted."""
        with self._lock:
            self._runs[tier].requests += 1

    def succeeded(self, request: CompletedRequest, tier: str = "") -> None:
        """Count one successful request; ``tier``, or both of a cascade, is empty for models with one tier."""
        timings = request.timings
        with self._lock:
            now = self._now
            now.success += 1
            now.inference_count += request.rows
            now.last_inference_ms = time.time_ns() // 1_000_000
            _observe(now.stages, timings)
            if tier:
                _observe(now.tier_stages[tier], timings)
                now.tiers[tier, request.tier_reason] += 1
            batch = now.batches[request.batch_rows]
            batch.compute_input_ns += timings.compute_input_ns
            batch.compute_output_ns += timings.compute_output_ns
            metrics = self._metrics[None]
            if request.end is not None:
                metrics = metrics + self._metrics[type(request.end)]
            for metric, count, values in metrics:
                try:
                    value = count(request)
                    labels = metric.label(request) if metric.label and (value or metric.buckets) else ()
                    if metric.buckets:
                        values[labels].observe(value)  # type: ignore[union-attr]  # it has histograms only
                    elif value:
                        values[labels] += value  # type: ignore[operator]  # it has sums only
                except Exception:  # noqa: PERF203  # a broken metric must affect neither the response nor other metrics
                    log.exception("metric %s failed and is no longer counted", metric.name)
                    self._metrics[metric.of] = [each for each in self._metrics[metric.of] if each[0] is not metric]

    def failed(self, reason: str, duration_ns: int, place: str = "") -> None:
        """Count a failed request by its error's class, and ``place``, the limit that refused it or its last stage."""
        with self._lock:
            now = self._now
            now.failures[reason] += 1
            now.fail_ns += duration_ns
            if place:
                now.drops[reason, place] += 1

    def loaded(self, load_ns: int | None) -> None:
        """Count a load and its time without builds; None of one that failed."""
        with self._lock:
            self._now.loads["failed" if load_ns is None else "ready"] += 1
            self._now.load_ns += load_ns or 0

    def evicted(self) -> None:
        """Count an eviction."""
        with self._lock:
            self._now.evictions += 1

    def snapshot(self) -> Snapshot:
        """Return a consistent copy."""
        with self._lock:
            return self._now.copy()


def _observe(stages: Stages, timings: Timings) -> None:
    for histogram, duration_ns in zip(stages.values(), _DURATIONS_NS(timings), strict=True):
        # Histogram.observe without the calls, five for each request.
        histogram.count += 1
        histogram.total += duration_ns
        histogram.counts[bisect_left(BUCKETS_NS, duration_ns)] += 1
