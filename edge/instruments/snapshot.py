"""The numbers of one model at one moment, and the times of one request."""

from __future__ import annotations

from dataclasses import dataclass, field

from edge.instruments.histogram import Durations, Histogram

#: Triton's stages in the order in which a request passes them, after ``request``, which is all of them together.
STAGES = ("request", "queue", "compute_input", "compute_infer", "compute_output")

#: A histogram for each of :data:`STAGES`.
Stages = dict[str, Durations]
#: The values of a metric's labels.
Labels = tuple[str, ...]
#: A metric's numbers by its labels: a sum, or a histogram.
Counted = dict[Labels, int | Histogram]


@dataclass(slots=True)
class Timings:
    """The time that one request spent in each stage, in ns of a monotonic clock.

    Attributes:
        compute_input_ns: decoding, validation, preprocessing, and joining with other requests.
        queue_ns: waiting for a worker.
        compute_infer_ns: the runtime's call, for all requests that shared it.
        compute_output_ns: separation from the other requests, and encoding of the outputs.
        request_ns: everything, including the hops between threads.
    """

    compute_input_ns: int = 0
    queue_ns: int = 0
    compute_infer_ns: int = 0
    compute_output_ns: int = 0
    request_ns: int = 0


@dataclass(slots=True)
class BatchTotals:
    """Executions of one batch size: their number, their time, and that of all requests that took part in them."""

    count: int = 0
    compute_input_ns: int = 0
    compute_infer_ns: int = 0
    compute_output_ns: int = 0

    def copy(self) -> BatchTotals:
        """Return an independent copy."""
        return BatchTotals(self.count, self.compute_input_ns, self.compute_infer_ns, self.compute_output_ns)


@dataclass(slots=True)
class TierRuns:
    """Successful runs of one tier.

    Attributes:
        requests: that shared them.
        rows: of the requests.
        tokens: what the time of a run grows with: rows times tokens, padding included, where the model has a sequence
            axis, else rows.
        infer_ns: their time, once for all requests of a run.
    """

    requests: int = 0
    rows: int = 0
    tokens: int = 0
    infer_ns: int = 0


def new_stages() -> Stages:
    """Return an empty histogram for each stage."""
    return {stage: Durations() for stage in STAGES}


@dataclass(slots=True)
class Snapshot:
    """All numbers of a model at one moment, consistent with each other.

    Attributes:
        success: answered requests.
        failures: requests without an answer, by the class of the error.
        fail_ns: their total time.
        inference_count: rows of answered requests.
        execution_count: calls of the runtime.
        last_inference_ms: time of the last answer, in ms since the epoch.
        stages: times of answered requests.
        tier_stages: the same by the tier that answered, for models with several tiers.
        batches: executions by their number of rows.
        drops: refused and abandoned requests, by reason and place.
        tiers: answers by tier and reason, for models with several tiers.
        counted: the numbers of each :class:`edge.instruments.metrics.RequestMetric`, by its name.
    """

    success: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    fail_ns: int = 0
    inference_count: int = 0
    execution_count: int = 0
    last_inference_ms: int = 0
    stages: Stages = field(default_factory=new_stages)
    tier_stages: dict[str, Stages] = field(default_factory=dict)
    batches: dict[int, BatchTotals] = field(default_factory=dict)
    drops: dict[tuple[str, str], int] = field(default_factory=dict)
    tiers: dict[tuple[str, str], int] = field(default_factory=dict)
    counted: dict[str, Counted] = field(default_factory=dict)

    @property
    def fail(self) -> int:
        """Failed requests of every kind."""
        return sum(self.failures.values())

    def copy(self) -> Snapshot:
        """Return an independent copy."""
        return Snapshot(
            success=self.success,
            failures=dict(self.failures),
            fail_ns=self.fail_ns,
            inference_count=self.inference_count,
            execution_count=self.execution_count,
            last_inference_ms=self.last_inference_ms,
            stages=_copy(self.stages),
            tier_stages={tier: _copy(stages) for tier, stages in self.tier_stages.items()},
            batches={rows: totals.copy() for rows, totals in self.batches.items()},
            drops=dict(self.drops),
            tiers=dict(self.tiers),
            counted={
                name: {key: value.copy() if isinstance(value, Histogram) else value for key, value in of.items()}
                for name, of in self.counted.items()
            },
        )


def _copy(stages: Stages) -> Stages:
    return {stage: histogram.copy() for stage, histogram in stages.items()}
