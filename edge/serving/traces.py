"""OpenTelemetry traces: a span for each request, and child spans for its stages, made at its end from measured times.

A request with a W3C trace context (``traceparent``) follows its sampling decision; a share of the others is sampled.
Over gRPC the span of a request is that of the call. Over HTTP it is inside one of the HTTP request, which may ask for
several texts. Names and attributes are those of OpenTelemetry's semantic conventions 1.45 for RPC and HTTP: on a server
a failure that is its client's is no error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from functools import partial
from typing import Any, Final, NamedTuple

from edge import __version__
from edge.errors import Raw, UsageError
from edge.protocol import INFERENCE
from edge.serving.call import Arrival, Call
from edge.serving.statuses import STATUSES, Code


class Carrier(NamedTuple):
    """What carries a request to the server.

    ``rpc`` is the method of gRPC, and ``parent`` the headers with its trace context; or ``rpc`` is empty, and
    ``parent`` the context of OpenTelemetry with the span of the HTTP request.
    """

    rpc: str
    parent: Any


#: A transport sets it for a call, and the tasks of the call inherit it.
CARRIER: ContextVar[Carrier | None] = ContextVar("carrier", default=None)
_HEADERS: Final = ("traceparent", "tracestate")
#: The class of an error to the status of its call; others are INTERNAL.
_CODES: Final = {error.__name__: status.grpc for error, status in STATUSES.items()} | {"Cancelled": Code.CANCELLED}
#: The statuses that are errors of a server, by the conventions.
_ERRORS: Final = frozenset(
    (Code.UNKNOWN, Code.DEADLINE_EXCEEDED, Code.UNIMPLEMENTED, Code.INTERNAL, Code.UNAVAILABLE, Code.DATA_LOSS)
)
#: The limit for an export, and so for how long one delays the shutdown.
_EXPORT_SECONDS: Final = 2
#: The limit for names and ids, which clients choose.
_MAX_ATTRIBUTE_LENGTH: Final = 256


def carry(rpc: str, metadata: Iterable[tuple[str, str | bytes]]) -> None:
    """Set what carries the requests of the current call of gRPC, by its method and its metadata."""
    headers = {key: value for key, value in metadata if key in _HEADERS and isinstance(value, str)}
    CARRIER.set(Carrier(rpc, headers))


class Traces:
    """Sends spans to a collector in the background, and drops those that it cannot take.

    ``endpoint`` takes OTLP over gRPC, as ``http://host:port`` or ``https://host:port``; ``ratio`` is the sampled share
    of requests without a trace context. Without the OpenTelemetry SDK this raises a UsageError.
    """

    def __init__(self, endpoint: str, ratio: float) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import SpanLimits, TracerProvider, sampling
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            given, fix = Raw(f"no module {error.name}"), "pip install 'fewheads[otel]', or leave it out."
            raise UsageError("--trace-endpoint", given=given, expected="the OpenTelemetry SDK", fix=fix) from None
        self.ratio = ratio
        self._provider = TracerProvider(
            sampler=sampling.ParentBased(sampling.TraceIdRatioBased(ratio)),
            resource=Resource.create({"service.name": "fewheads", "service.version": __version__}),
            span_limits=SpanLimits(max_span_attribute_length=_MAX_ATTRIBUTE_LENGTH),
            shutdown_on_exit=False,
        )
        insecure = not endpoint.startswith("https://")
        exporter = OTLPSpanExporter(endpoint=endpoint, insecure=insecure, timeout=_EXPORT_SECONDS)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("fewheads", __version__)
        self._extract = TraceContextTextMapPropagator().extract
        self._inside, self._kinds = set_span_in_context, SpanKind
        self._error: Callable[[str], Any] = partial(Status, StatusCode.ERROR)
        # Spans have times since the epoch; stages are timed by a monotonic clock.
        self._epoch_ns = time.time_ns() - time.perf_counter_ns()

    def answered(self, call: Call, tier: str) -> None:
        """Trace a request that was just answered; ``tier`` is empty for a model with one tier."""
        timings = call.timings
        end_ns = time.perf_counter_ns()
        span = self._begin(call.form.model.name, call.arrival, Code.OK)
        if span.is_recording():
            span.set_attributes({"fewheads.rows": call.rows, "fewheads.batch_rows": call.batch_rows})
            if tier:
                span.set_attributes({"fewheads.tier": tier, "fewheads.tier_reason": call.tier_reason})
            inside = self._inside(span)
            for stage, begun_ns, length_ns in (
                ("compute_input", call.arrival.started_ns, timings.compute_input_ns),
                ("queue", call.queued_ns, timings.queue_ns),
                ("compute_infer", call.computed_ns - timings.compute_infer_ns, timings.compute_infer_ns),
                ("compute_output", end_ns - timings.compute_output_ns, timings.compute_output_ns),
            ):
                begun_ns += self._epoch_ns
                self._tracer.start_span(stage, inside, start_time=begun_ns).end(begun_ns + length_ns)
        span.end(self._epoch_ns + end_ns)

    def failed(self, model: str, arrival: Arrival, reason: str) -> None:
        """Trace a request that just failed; ``reason`` is the class of its error."""
        code = _CODES.get(reason, Code.INTERNAL)
        span = self._begin(model, arrival, code)
        if code in _ERRORS:
            span.set_attribute("error.type", code.name)
            span.set_status(self._error(reason))
        span.end(self._epoch_ns + time.perf_counter_ns())

    def begin_http(
        self, method: str, route: str, attributes: Mapping[str, str | int], headers: Mapping[str, str]
    ) -> Any:
        """Return the span of an HTTP request that has just arrived, for :meth:`end_http`, and set :data:`CARRIER`.

        ``attributes`` are further ones by the conventions, and ``headers`` may have a trace context.
        """
        known = {"http.request.method": method, "http.route": route, **attributes}
        begun_ns = self._epoch_ns + time.perf_counter_ns()  # by the clock of the spans inside
        parent, kind = self._extract(headers), self._kinds.SERVER
        span = self._tracer.start_span(f"{method} {route}", parent, kind, known, start_time=begun_ns)
        CARRIER.set(Carrier("", self._inside(span)))
        return span

    def end_http(self, span: Any, status: int | None) -> None:
        """End the span of an HTTP request after its response, or with None without one."""
        if status is not None:
            span.set_attribute("http.response.status_code", status)
        if status is None or status >= 500:
            span.set_attribute("error.type", str(status or "_OTHER"))
            span.set_status(self._error(""))
        span.end(self._epoch_ns + time.perf_counter_ns())

    def close(self) -> None:
        """Send the remaining spans."""
        self._provider.shutdown()

    def _begin(self, model: str, arrival: Arrival, code: Code) -> Any:
        rpc, parent = arrival.carrier or Carrier("", None)
        attributes = {"fewheads.model": model, "fewheads.request_id": arrival.request_id}
        name, kind = "infer", self._kinds.INTERNAL
        if rpc:
            name, kind, parent = f"{INFERENCE}/{rpc}", self._kinds.SERVER, self._extract(parent)
            attributes |= {"rpc.system.name": "grpc", "rpc.method": name, "rpc.response.status_code": code.name}
        return self._tracer.start_span(name, parent, kind, attributes, start_time=self._epoch_ns + arrival.started_ns)
