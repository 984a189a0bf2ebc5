"""The table of the metrics of a model: a new metric is an entry in :data:`METRICS`, and nothing else.

Every entry is on the Prometheus page. A :class:`RequestMetric` is also counted for each answer, sent in
``ModelReading.metrics`` of the telemetry, and shown by ``fewheads top`` and the web page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from types import MappingProxyType
from typing import Final, Literal, NamedTuple, Protocol

from edge.datatypes import Array
from edge.instruments.energy import TierEnergy
from edge.instruments.histogram import Histogram
from edge.instruments.snapshot import Labels, Snapshot, Stages, Timings

#: The types of the Prometheus page. Triton's counters are ``unknown``, because their names lack the suffix ``_total``.
Kind = Literal["counter", "gauge", "histogram", "unknown"]
#: What counted values are divided by: durations are counted in whole ns, and reported in seconds.
PER_UNIT: Final = {"seconds": 1e9}
#: The labels' values, and the number or histogram under them.
Sample = tuple[Labels, float | Histogram]


class Outputs(Protocol):
    """The computed outputs of an answered request."""

    @property
    def outputs(self) -> Mapping[str, Array]:
        """The outputs of the graph, by name."""


class Answered(Protocol):
    """The attributes of an answered request that metrics may read.

    A call of the service has them. Its inputs are not among them, because they are released when its run ends.
    """

    @property
    def rows(self) -> int:
        """The number of rows of its inputs."""

    @property
    def size(self) -> int:
        """The product of the dimensions that it chose: rows times tokens of text, else rows."""

    @property
    def batch_rows(self) -> int:
        """The number of rows of the run that answered it."""

    @property
    def timings(self) -> Timings:
        """The time spent in each stage."""

    @property
    def answer(self) -> Outputs | None:
        """The outputs."""

    @property
    def nonfinite(self) -> int:
        """1 where an output holds a NaN or an infinity, else 0."""

    @property
    def tier_reason(self) -> str:
        """Why its tier answered."""


class ModelNow(NamedTuple):
    """One version of a model at one moment.

    Attributes:
        name: the model's.
        version: as the protocol writes it.
        totals: what it has counted.
        ready: whether it accepts requests.
        load_memory_bytes: the growth of the process while it was loaded; None while it is not loaded.
        energy: of its tiers, by name; empty on a machine that does not measure its power.
    """

    name: str
    version: str
    totals: Snapshot
    ready: bool = False
    load_memory_bytes: int | None = None
    energy: Mapping[str, TierEnergy] = MappingProxyType({})


@dataclass(frozen=True)
class ModelMetric:
    """A metric that is read from the totals and the state of a model.

    Attributes:
        name: on the Prometheus page; it ends with the unit, and then ``_total`` in a counter.
        help: one phrase.
        read: returns its samples.
        kind: its type.
        unit: of its values; empty for a plain count. What is reported in ``seconds`` is read in ns.
        labels: beside ``model`` and ``version``.
    """

    name: str
    help: str
    read: Callable[[ModelNow], Iterable[Sample]]
    kind: Kind = "counter"
    unit: str = ""
    labels: Labels = ()


@dataclass(frozen=True)
class RequestMetric:
    """A metric to which each answered request adds a value.

    The functions run on the event loop for every answer, so they must be quick. A metric that raises is logged and not
    counted any more; the answer is sent all the same.

    Attributes:
        name: on the Prometheus page; it ends with the unit, and then ``_total`` in a counter.
        help: one phrase.
        count: returns the value of a request, at least 0: its part of the counter, or what the histogram observes.
        unit: of the values; empty for a plain count. What is reported in ``seconds`` is counted in ns.
        labels: beside ``model`` and ``version``.
        label: returns the values of ``labels``; needed where there are any.
        buckets: the upper bounds of a histogram, ascending; a metric without buckets is a counter.
    """

    name: str
    help: str
    count: Callable[[Answered], int]
    unit: str = ""
    labels: Labels = ()
    label: Callable[[Answered], Labels] | None = None
    buckets: tuple[int, ...] = ()

    @property
    def kind(self) -> Kind:
        """The type of the metric."""
        return "histogram" if self.buckets else "counter"

    def read(self, model: ModelNow) -> Iterable[Sample]:
        """Return its samples."""
        return model.totals.counted[self.name].items()


Metric = ModelMetric | RequestMetric


def _total(name: str, help: str, read: Callable[[Snapshot], int], unit: str = "") -> ModelMetric:
    """Return one of Triton's counters."""
    return ModelMetric(name, help, lambda model: [((), read(model.totals))], "unknown", unit)


def _us(stage: str) -> Callable[[Snapshot], int]:
    return lambda totals: totals.stages[stage].total_ns // 1000


def _durations(stages: Stages, names: Iterable[str], *labels: str) -> Iterable[Sample]:
    return [((*labels, name), stages[name]) for name in names]


#: The telemetry has a field of its own for it.
NONFINITE: Final = RequestMetric(
    "fewheads_nonfinite_answers_total", "Answers that held a NaN or an infinity", attrgetter("nonfinite")
)
#: The stages whose duration the tier determines: each is 47 lines on the page, and a model may have eight tiers.
_TIER_STAGES: Final = ("request", "compute_infer")

METRICS: Final[tuple[Metric, ...]] = (
    _total("nv_inference_request_success", "Answered requests", lambda totals: totals.success),
    _total("nv_inference_count", "Inferences: rows of answered requests", lambda totals: totals.inference_count),
    _total("nv_inference_exec_count", "Calls of the runtime", lambda totals: totals.execution_count),
    _total("nv_inference_request_duration_us", "Total µs of answered requests", _us("request"), "us"),
    _total("nv_inference_queue_duration_us", "Total µs of waiting", _us("queue"), "us"),
    _total("nv_inference_compute_input_duration_us", "Total µs of preparing inputs", _us("compute_input"), "us"),
    _total("nv_inference_compute_infer_duration_us", "Total µs of the runtime", _us("compute_infer"), "us"),
    _total("nv_inference_compute_output_duration_us", "Total µs of making outputs", _us("compute_output"), "us"),
    ModelMetric(
        "nv_inference_request_failure",
        "Requests without an answer, by reason",
        lambda model: [((reason,), count) for reason, count in model.totals.failures.items()],
        "unknown",
        labels=("reason",),
    ),
    ModelMetric(
        "fewheads_dropped_requests_total",
        "Requests that were refused, by the bound, or given up, by where they were",
        lambda model: model.totals.drops.items(),
        labels=("reason", "place"),
    ),
    ModelMetric(
        "fewheads_tier_answers_total",
        "Answers by tier, and why it was that",
        lambda model: model.totals.tiers.items(),
        labels=("tier", "reason"),
    ),
    ModelMetric(
        "fewheads_batch_executions_total",
        "Calls of the runtime, by rows",
        lambda model: [((str(rows),), batch.count) for rows, batch in model.totals.batches.items()],
        labels=("rows",),
    ),
    ModelMetric(
        "fewheads_stage_duration_seconds",
        "Latency by stage",
        lambda model: _durations(model.totals.stages, model.totals.stages),
        "histogram",
        "seconds",
        ("stage",),
    ),
    ModelMetric(
        "fewheads_tier_duration_seconds",
        "Latency by tier",
        lambda model: [
            sample
            for tier, stages in model.totals.tier_stages.items()
            for sample in _durations(stages, _TIER_STAGES, tier)
        ],
        "histogram",
        "seconds",
        ("tier", "stage"),
    ),
    NONFINITE,
    ModelMetric(
        "fewheads_model_ready",
        "1 when the model accepts requests",
        lambda model: [((), float(model.ready))],
        "gauge",
    ),
    ModelMetric(
        "fewheads_model_load_memory_bytes",
        "Growth of the process at load",
        lambda model: [] if model.load_memory_bytes is None else [((), model.load_memory_bytes)],
        "gauge",
        "bytes",
    ),
    ModelMetric(
        "fewheads_energy_joules_total",
        "Energy of runs above idle, by tier",
        lambda model: [((tier,), energy.joules) for tier, energy in model.energy.items()],
        unit="joules",
        labels=("tier",),
    ),
    ModelMetric(
        "fewheads_energy_requests_total",
        "Requests whose energy is counted, by tier",
        lambda model: [((tier,), energy.requests) for tier, energy in model.energy.items()],
        labels=("tier",),
    ),
    ModelMetric(
        "fewheads_energy_tokens_total",
        "Tokens of these requests, by tier, where the model has a sequence axis",
        lambda model: [((tier,), of.tokens) for tier, of in model.energy.items() if of.tokens != of.rows],
        unit="tokens",
        labels=("tier",),
    ),
)
REQUEST_METRICS: Final = tuple(metric for metric in METRICS if isinstance(metric, RequestMetric))
