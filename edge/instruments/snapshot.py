"""The numbers of one model at one moment, and the times of one request."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple

#: Upper bounds of the latency buckets in ns: 5 µs to 15 s, each √2 times the one before. A percentile estimated from
#: them is at most 41 % off, and usually far less, because it is interpolated.
BUCKETS_NS: tuple[int, ...] = tuple(round(5_000 * 2 ** (step / 2)) for step in range(44))


class Histogram:
    """The count, the total and bucket counts of values; of durations in ns by default.

    A bound belongs to the bucket below it. The last bucket holds the values above every bound.
    """

    __slots__ = ("bounds", "count", "counts", "total")

    def __init__(self, bounds: Sequence[int] = BUCKETS_NS) -> None:
        self.bounds = bounds
        self.count = 0
        self.total = 0
        self.counts = [0] * (len(bounds) + 1)

    def observe(self, value: int) -> None:
        self.count += 1
        self.total += value
        self.counts[bisect_left(self.bounds, value)] += 1

    def percentile(self, percent: float) -> int:
        """Estimate a percentile by interpolation inside its bucket; 0 without values."""
        rank = self.count * percent / 100
        for bucket, seen in enumerate(accumulate(self.counts)):
            if seen >= rank and self.counts[bucket]:
                low = self.bounds[bucket - 1] if bucket else 0
                high = self.bounds[min(bucket, len(self.bounds) - 1)]
                into = (rank - (seen - self.counts[bucket])) / self.counts[bucket]
                return round(low + max(into, 0.0) * (high - low))
        return 0

    def copy(self) -> Histogram:
        other = Histogram(self.bounds)
        other.count, other.total, other.counts = self.count, self.total, list(self.counts)
        return other


#: Triton's stages in the order in which a request passes them, after ``request``, which covers all of them.
STAGES = ("request", "queue", "compute_input", "compute_infer", "compute_output")

#: A histogram of durations in ns for each of :data:`STAGES`.
Stages = dict[str, Histogram]
#: The values of a metric's labels.
LabelValues = tuple[str, ...]
#: A metric's numbers by its labels: a sum, or a histogram.
Counted = dict[LabelValues, int | Histogram]


@dataclass(slots=True)
class Timings:
    """The time that one request spent in each stage, in ns of a monotonic clock."""

    compute_input_ns: int = 0  # decoding, validation, preprocessing, and batching with other requests
    queue_ns: int = 0  # waiting for a worker
    compute_infer_ns: int = 0  # the call of the runtime, for all requests of the batch together
    compute_output_ns: int = 0  # separation from the other requests of the batch, and encoding of the outputs
    request_ns: int = 0  # everything, including the hops between threads


@dataclass(slots=True)
class BatchTotals:
    """Executions of one batch size: their number, their time, and the time of all requests in them."""

    count: int = 0
    compute_input_ns: int = 0
    compute_infer_ns: int = 0
    compute_output_ns: int = 0


@dataclass(slots=True)
class TierRuns:
    """Requests, rows, tokens and time of the successful runs of one tier."""

    requests: int = 0
    rows: int = 0
    tokens: int = 0  # of generated texts; else rows times tokens, with padding, or rows without a sequence axis
    infer_ns: int = 0


class LoopEnd(NamedTuple):
    """How the loop of one request ended: the most loops and the largest residual of any row."""

    tier: str
    loops: int
    residual: float  # relative change of the state in the last loop; possibly NaN
    stopped: str  # the reason


class TextEnd(NamedTuple):
    """How the generated text of one request ended; of several rows, their sums and means."""

    tier: str
    prompt_tokens: int
    generated_tokens: int
    first_token_ns: int  # from the arrival of the request to its first token
    token_ns: int  # mean time from one token to the next; 0 for a single one
    stopped: str  # the reason


#: How a request to an iterative program ended.
End = LoopEnd | TextEnd


def _new_stages() -> Stages:
    return {stage: Histogram() for stage in STAGES}


@dataclass(slots=True)
class Snapshot:
    """All numbers of a model at one moment, consistent with each other.

    ``tier_stages`` and ``tiers`` are empty for models with one tier.
    """

    success: int = 0
    failures: dict[str, int] = field(default_factory=Counter)  # by the class of the error
    fail_ns: int = 0
    inference_count: int = 0  # rows of successful requests
    execution_count: int = 0  # calls of the runtime
    last_inference_ms: int = 0  # since the epoch
    stages: Stages = field(default_factory=_new_stages)  # of successful requests
    tier_stages: dict[str, Stages] = field(default_factory=lambda: defaultdict(_new_stages))
    batches: dict[int, BatchTotals] = field(default_factory=lambda: defaultdict(BatchTotals))  # by rows
    drops: dict[tuple[str, str], int] = field(default_factory=Counter)  # by reason and place
    tiers: dict[tuple[str, str], int] = field(default_factory=Counter)  # by tier and reason
    counted: dict[str, Counted] = field(default_factory=dict)  # by the name of a RequestMetric
    loads: dict[str, int] = field(default_factory=Counter)  # by their outcome, ``ready`` or ``failed``
    load_ns: int = 0  # of those that ended well, without builds
    evictions: int = 0

    @property
    def fail(self) -> int:
        return sum(self.failures.values())

    def copy(self) -> Snapshot:
        return replace(
            self,
            failures=dict(self.failures),
            stages=_copy(self.stages),
            tier_stages={tier: _copy(stages) for tier, stages in self.tier_stages.items()},
            batches={rows: replace(totals) for rows, totals in self.batches.items()},
            drops=dict(self.drops),
            tiers=dict(self.tiers),
            loads=dict(self.loads),
            counted={
                name: {key: value.copy() if isinstance(value, Histogram) else value for key, value in of.items()}
                for name, of in self.counted.items()
            },
        )


def _copy(stages: Stages) -> Stages:
    return {stage: histogram.copy() for stage, histogram in stages.items()}
