"""Counters and latency histograms of one model: the single source of ModelStatistics, Prometheus and Telemetry."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import accumulate

#: Upper bounds of the latency buckets in ns: 5 µs to 15 s, each √2 times the one before. A percentile that is read
#: from them is therefore at most 41 % off, and usually far less, since it is interpolated.
BUCKETS_NS: tuple[int, ...] = tuple(round(5_000 * 2 ** (step / 2)) for step in range(44))

#: Triton's stages in the order in which a request passes them, after ``request``, which is all of them together.
STAGES = ("request", "queue", "compute_input", "compute_infer", "compute_output")


@dataclass(slots=True)
class Timings:
    """Where one request spent its time, in ns of a monotonic clock.

    Attributes:
        compute_input_ns: decoding, validation, preprocessing, and joining with others.
        queue_ns: waiting for a worker.
        compute_infer_ns: the runtime's call, for all requests that shared it.
        compute_output_ns: parting from the others, and encoding of the outputs.
        request_ns: everything, including the hops between threads.
    """

    compute_input_ns: int = 0
    queue_ns: int = 0
    compute_infer_ns: int = 0
    compute_output_ns: int = 0
    request_ns: int = 0


class Histogram:
    """A count, a sum and bucket counts of durations."""

    __slots__ = ("count", "counts", "total_ns")

    def __init__(self) -> None:
        self.count = 0
        self.total_ns = 0
        self.counts = [0] * (len(BUCKETS_NS) + 1)

    def observe(self, duration_ns: int) -> None:
        """Add one duration."""
        self.count += 1
        self.total_ns += duration_ns
        self.counts[bisect_left(BUCKETS_NS, duration_ns)] += 1

    def percentile_ns(self, percent: float) -> int:
        """Estimate a percentile by interpolation inside its bucket; 0 when nothing was observed."""
        rank = self.count * percent / 100
        for bucket, seen in enumerate(accumulate(self.counts)):
            if seen >= rank and self.counts[bucket]:
                low = BUCKETS_NS[bucket - 1] if bucket else 0
                high = BUCKETS_NS[min(bucket, len(BUCKETS_NS) - 1)]
                into = (rank - (seen - self.counts[bucket])) / self.counts[bucket]
                return round(low + max(into, 0.0) * (high - low))
        return 0

    def copy(self) -> Histogram:
        """Return an independent copy."""
        other = Histogram()
        other.count, other.total_ns, other.counts = self.count, self.total_ns, list(self.counts)
        return other


#: A histogram for each of :data:`STAGES`.
Stages = dict[str, Histogram]


@dataclass(slots=True)
class BatchTotals:
    """Executions of one batch size: their number, their time, and that of all requests that took part in them."""

    count: int = 0
    compute_input_ns: int = 0
    compute_infer_ns: int = 0
    compute_output_ns: int = 0


@dataclass(slots=True)
class Snapshot:
    """All numbers of a model at one moment; they belong together.

    ``drops`` counts failures whose place is known by reason and place, ``tiers`` answers by tier and why it was that,
    ``nonfinite`` answers that held a NaN or an infinity. ``tier_stages`` are the stages by the tier that answered, for
    models that have several.
    """

    success: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    fail_ns: int = 0
    inference_count: int = 0
    execution_count: int = 0
    last_inference_ms: int = 0
    nonfinite: int = 0
    stages: Stages = field(default_factory=lambda: {stage: Histogram() for stage in STAGES})
    tier_stages: dict[str, Stages] = field(default_factory=dict)
    batches: dict[int, BatchTotals] = field(default_factory=dict)
    drops: dict[tuple[str, str], int] = field(default_factory=dict)
    tiers: dict[tuple[str, str], int] = field(default_factory=dict)

    @property
    def fail(self) -> int:
        """Failed requests of every kind."""
        return sum(self.failures.values())


class ModelStatistics:
    """Thread-safe counters of one model. They live as long as the process, across reloads of the model."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now = Snapshot()

    def executed(self, rows: int, infer_ns: int) -> None:
        """Count one call of the runtime, whose ``rows`` may be those of several requests."""
        with self._lock:
            self._now.execution_count += 1
            batch = self._now.batches.setdefault(rows, BatchTotals())
            batch.count += 1
            batch.compute_infer_ns += infer_ns

    def succeeded(
        self, timings: Timings, rows: int, batch_rows: int, *, tier: str = "", nonfinite: bool = False
    ) -> None:
        """Count one answered request.

        Args:
            timings: where its time went.
            rows: its inferences.
            batch_rows: of the call that it took part in.
            tier: who answered; empty for models of one tier.
            nonfinite: whether its answer holds a NaN or an infinity.
        """
        with self._lock:
            now = self._now
            now.success += 1
            now.inference_count += rows
            now.last_inference_ms = time.time_ns() // 1_000_000
            now.nonfinite += nonfinite
            _observe(now.stages, timings)
            if tier:
                if tier not in now.tier_stages:
                    now.tier_stages[tier] = {stage: Histogram() for stage in STAGES}
                _observe(now.tier_stages[tier], timings)
            batch = now.batches.setdefault(batch_rows, BatchTotals())
            batch.compute_input_ns += timings.compute_input_ns
            batch.compute_output_ns += timings.compute_output_ns

    def answered(self, tier: str, reason: str) -> None:
        """Count which tier answered a request, and why it was that."""
        with self._lock:
            key = (tier, reason)
            self._now.tiers[key] = self._now.tiers.get(key, 0) + 1

    def failed(self, reason: str, duration_ns: int, place: str = "") -> None:
        """Count one request that got no answer, by the class of its error.

        Args:
            reason: the class of the error.
            duration_ns: from its arrival.
            place: which bound refused it, or where it was when it was given up; empty where it makes no difference.
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
            now = self._now
            return Snapshot(
                success=now.success,
                failures=dict(now.failures),
                fail_ns=now.fail_ns,
                inference_count=now.inference_count,
                execution_count=now.execution_count,
                last_inference_ms=now.last_inference_ms,
                nonfinite=now.nonfinite,
                stages=_copy(now.stages),
                tier_stages={tier: _copy(stages) for tier, stages in now.tier_stages.items()},
                batches={
                    rows: BatchTotals(b.count, b.compute_input_ns, b.compute_infer_ns, b.compute_output_ns)
                    for rows, b in now.batches.items()
                },
                drops=dict(now.drops),
                tiers=dict(now.tiers),
            )


def _observe(stages: Stages, timings: Timings) -> None:
    durations = (
        timings.request_ns,
        timings.queue_ns,
        timings.compute_input_ns,
        timings.compute_infer_ns,
        timings.compute_output_ns,
    )
    for histogram, duration_ns in zip(stages.values(), durations, strict=True):  # in the order of STAGES
        histogram.count += 1
        histogram.total_ns += duration_ns
        histogram.counts[bisect_left(BUCKETS_NS, duration_ns)] += 1


def _copy(stages: Stages) -> Stages:
    return {stage: histogram.copy() for stage, histogram in stages.items()}
