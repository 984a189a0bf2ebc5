"""The table of a model's metrics: a new metric is one more entry in :data:`METRICS`.

Every entry is on the Prometheus page. A :class:`RequestMetric` is also counted for each successful request, part of
``ModelReading.metrics`` in the telemetry, and shown by ``fewheads top`` and the web page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, Protocol

from edge.instruments.energy import TierEnergy
from edge.instruments.snapshot import BUCKETS_NS, End, Histogram, LabelValues, LoopEnd, Snapshot, TextEnd, Timings

#: The types of the Prometheus page. Triton's counters are ``unknown``, because their names lack the suffix ``_total``.
Kind = Literal["counter", "gauge", "histogram", "unknown"]
#: Divisors of counted values by their unit: durations are counted in whole ns, and ratios in whole billionths.
PER_UNIT: Final = {"seconds": 1e9, "ratio": 1e9}
#: The labels' values, and the number or histogram under them.
Sample = tuple[LabelValues, float | Histogram]


class CompletedRequest(Protocol):
    """The attributes of a successful request that metrics may read.

    Its inputs are not among them, because they are released when its run ends.
    """

    rows: int
    size: int  # rows times tokens where the model has a sequence axis, else rows
    batch_rows: int  # of the run that it was in
    timings: Timings
    nonfinite: int  # 1 where an output has a NaN or an infinity, else 0
    tier_reason: str  # the reason for the choice of its tier
    end: End | None  # of a request to a model with a loop or with generated text


class ModelNow(NamedTuple):
    """One version of a model at one moment."""

    name: str
    version: str
    totals: Snapshot
    ready: bool = False
    load_memory_bytes: int | None = None  # the growth of the process while it was loaded; None while it is not loaded
    cache_bytes: int | None = None  # of keys and values; None for a model that generates no text, or is not loaded
    energy: Mapping[str, TierEnergy] = MappingProxyType({})  # by tier; empty where power is not measured


@dataclass(frozen=True)
class ModelMetric:
    """A metric that is read from the counters and the state of a model."""

    name: str  # on the Prometheus page; it ends with the unit, and then with _total for a counter
    help: str
    read: Callable[[ModelNow], Iterable[Sample]]
    kind: Kind = "counter"
    unit: str = ""  # empty for a plain count; values in seconds are read in ns
    labels: tuple[str, ...] = ()  # beside model and version


@dataclass(frozen=True)
class RequestMetric:
    """A metric to which each successful request adds a value.

    The functions run on the event loop for every response, so they must be fast. A metric that raises is logged and no
    longer counted; the response is sent nevertheless. Name, unit and labels are as in :class:`ModelMetric`.
    """

    name: str
    help: str
    count: Callable[[CompletedRequest], int]  # returns at least 0
    unit: str = ""
    labels: tuple[str, ...] = ()
    label: Callable[[CompletedRequest], LabelValues] | None = None  # returns the labels' values; None without labels
    buckets: tuple[int, ...] = ()  # the upper bounds of a histogram, ascending; without them it is a counter
    of: type[End] | None = None  # counts only requests with such an end

    @property
    def kind(self) -> Kind:
        return "histogram" if self.buckets else "counter"

    def read(self, model: ModelNow) -> Iterable[Sample]:
        return model.totals.counted[self.name].items()


Metric = ModelMetric | RequestMetric


def _total(name: str, help: str, read: Callable[[Snapshot], int], unit: str = "") -> ModelMetric:
    return ModelMetric(name, help, lambda model: [((), read(model.totals))], "unknown", unit)


def _total_us(stage: str, help: str) -> ModelMetric:
    name = f"nv_inference_{stage}_duration_us"
    return _total(name, f"Total µs of {help}", lambda totals: totals.stages[stage].total // 1000, "us")


def _gauge(name: str, help: str, value: Callable[[ModelNow], float | None], unit: str = "") -> ModelMetric:
    def read(model: ModelNow) -> Iterable[Sample]:
        return [] if (known := value(model)) is None else [((), known)]

    return ModelMetric(name, help, read, "gauge", unit)


def _energy(name: str, help: str, value: Callable[[TierEnergy], float | None], unit: str = "") -> ModelMetric:
    def read(model: ModelNow) -> Iterable[Sample]:
        return [((tier,), known) for tier, energy in model.energy.items() if (known := value(energy)) is not None]

    return ModelMetric(name, help, read, unit=unit, labels=("tier",))


def _end_metric(
    of: type[End],
    name: str,
    help: str,
    value: Callable[[Any], int],
    unit: str = "",
    buckets: tuple[int, ...] = (),
    labels: tuple[str, ...] = ("tier",),
) -> RequestMetric:
    """Return a metric of requests with such an end; its labels are attributes of the end."""

    def label(request: CompletedRequest) -> LabelValues:
        return tuple(getattr(request.end, name) for name in labels)

    return RequestMetric(name, help, lambda request: value(request.end), unit, labels, label, buckets, of)


_loop, _text = partial(_end_metric, LoopEnd), partial(_end_metric, TextEnd)


def _count(end: End) -> int:
    return 1


def _residual(end: LoopEnd) -> int:
    return round(end.residual * 1e9) if end.residual < _MOST_RESIDUAL else _MOST_RESIDUAL * 10**9  # also for NaN


#: A larger residual counts as this, so that a loop that diverged does not spoil the sum.
_MOST_RESIDUAL: Final = 1000
_STOPPED: Final = ("tier", "stopped")
_LOOPS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024)
_RESIDUALS: Final = (*(digit * 10**power for power in range(3, 9) for digit in (1, 2, 5)), 10**9)
#: It also has a field of its own in the telemetry.
NONFINITE: Final = RequestMetric(
    "fewheads_nonfinite_answers_total", "Responses with a NaN or an infinity", attrgetter("nonfinite")
)
#: The stages whose duration depends on the tier. Each is 47 lines on the page, and a model may have eight tiers.
_TIER_STAGES: Final = ("request", "compute_infer")

METRICS: Final[tuple[Metric, ...]] = (
    _total("nv_inference_request_success", "Successful requests", lambda totals: totals.success),
    _total("nv_inference_count", "Inferences: rows of successful requests", lambda totals: totals.inference_count),
    _total("nv_inference_exec_count", "Calls of the runtime", lambda totals: totals.execution_count),
    _total_us("request", "successful requests"),
    _total_us("queue", "waiting"),
    _total_us("compute_input", "preparing inputs"),
    _total_us("compute_infer", "the runtime"),
    _total_us("compute_output", "making outputs"),
    ModelMetric(
        "nv_inference_request_failure",
        "Failed requests, by reason",
        lambda model: [((reason,), count) for reason, count in model.totals.failures.items()],
        "unknown",
        labels=("reason",),
    ),
    ModelMetric(
        "fewheads_dropped_requests_total",
        "Refused requests by the limit, and abandoned ones by their stage",
        lambda model: model.totals.drops.items(),
        labels=("reason", "place"),
    ),
    ModelMetric(
        "fewheads_tier_answers_total",
        "Responses by tier and the reason for its choice",
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
        lambda model: [((stage,), histogram) for stage, histogram in model.totals.stages.items()],
        "histogram",
        "seconds",
        ("stage",),
    ),
    ModelMetric(
        "fewheads_tier_duration_seconds",
        "Latency by tier",
        lambda model: [((tier, it), of[it]) for tier, of in model.totals.tier_stages.items() for it in _TIER_STAGES],
        "histogram",
        "seconds",
        ("tier", "stage"),
    ),
    NONFINITE,
    _loop("fewheads_request_loops", "Loops of a request's slowest row", attrgetter("loops"), "loops", _LOOPS),
    _loop("fewheads_residual_ratio", "Largest residual of a request's rows", _residual, "ratio", _RESIDUALS),
    _loop("fewheads_loop_ends_total", "Requests to models with a loop, by why they stopped", _count, labels=_STOPPED),
    _text("fewheads_prompt_tokens_total", "Tokens of prompts", attrgetter("prompt_tokens"), "tokens"),
    _text("fewheads_generated_tokens_total", "Tokens of generated texts", attrgetter("generated_tokens"), "tokens"),
    _text(
        "fewheads_first_token_seconds",
        "Time from the arrival of a request to its first token",
        attrgetter("first_token_ns"),
        "seconds",
        BUCKETS_NS,
    ),
    _text(
        "fewheads_token_seconds",
        "Mean time between two tokens of a request",
        attrgetter("token_ns"),
        "seconds",
        BUCKETS_NS,
    ),
    _text("fewheads_text_ends_total", "Requests for generated text, by why it ended", _count, labels=_STOPPED),
    _gauge("fewheads_model_ready", "1 when the model accepts requests", lambda model: float(model.ready)),
    ModelMetric(
        "fewheads_model_loads_total",
        "Loads, by their outcome",
        lambda model: [((outcome,), count) for outcome, count in model.totals.loads.items()],
        labels=("outcome",),
    ),
    ModelMetric(
        "fewheads_model_load_seconds_total",
        "Time of successful loads, without builds",
        lambda model: [((), model.totals.load_ns)],
        unit="seconds",
    ),
    ModelMetric(
        "fewheads_model_evictions_total",
        "Evictions for other models",
        lambda model: [((), model.totals.evictions)],
    ),
    _gauge(
        "fewheads_model_load_memory_bytes", "Growth of the process at load", attrgetter("load_memory_bytes"), "bytes"
    ),
    _gauge(
        "fewheads_cache_bytes", "Memory of the keys and values of texts in progress", attrgetter("cache_bytes"), "bytes"
    ),
    _energy("fewheads_energy_joules_total", "Energy of runs above idle, by tier", attrgetter("joules"), "joules"),
    _energy("fewheads_energy_requests_total", "Requests whose energy is counted, by tier", attrgetter("requests")),
    _energy(
        "fewheads_energy_tokens_total",
        "Tokens of these requests, by tier, where the model has a sequence axis",
        lambda energy: energy.tokens if energy.tokens != energy.rows else None,
        "tokens",
    ),
)
REQUEST_METRICS: Final = tuple(metric for metric in METRICS if isinstance(metric, RequestMetric))
