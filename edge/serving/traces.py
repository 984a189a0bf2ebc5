"""OpenTelemetry traces: a span for each request, and child spans for its stages, made at its end from measured times.

A request with a W3C trace context (``traceparent``) follows its sampling decision; a share of the others is sampled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from functools import partial
from typing import Any, Final

from edge import __version__
from edge.errors import Raw, UsageError
from edge.protocol import INFERENCE
from edge.serving.call import Arrival, Call

#: The trace context headers of a call. A transport sets it, and the tasks of the call inherit it.
Carrier = dict[str, str]
CARRIER: ContextVar[Carrier | None] = ContextVar("carrier", default=None)
_HEADERS: Final = ("traceparent", "tracestate")
#: The limit for an export, and so for how long one delays the shutdown.
_EXPORT_SECONDS: Final = 2
#: The limit for names and ids, which clients choose.
_MAX_ATTRIBUTE_LENGTH: Final = 256


def carry(metadata: Iterable[tuple[str, str | bytes]]) -> None:
    """Set the trace context of the current call from its metadata."""
    CARRIER.set({key: value for key, value in metadata if key in _HEADERS and isinstance(value, str)} or None)


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
        self._inside, self._server = set_span_in_context, SpanKind.SERVER
        self._error: Callable[[str], Any] = partial(Status, StatusCode.ERROR)
        # Spans have times since the epoch; stages are timed by a monotonic clock.
        self._epoch_ns = time.time_ns() - time.perf_counter_ns()

    def answered(self, call: Call, tier: str) -> None:
        """Trace a request that was just answered; ``tier`` is empty for a model with one tier."""
        timings = call.timings
        end_ns = time.perf_counter_ns()
        span = self._begin(call.form.model.name, call.arrival)
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
        span = self._begin(model, arrival)
        span.set_status(self._error(reason))
        span.end(self._epoch_ns + time.perf_counter_ns())

    def close(self) -> None:
        """Send the remaining spans."""
        self._provider.shutdown()

    def _begin(self, model: str, arrival: Arrival) -> Any:
        return self._tracer.start_span(
            "ModelInfer",
            self._extract(arrival.trace_context) if arrival.trace_context else None,
            self._server,
            {
                "rpc.service": INFERENCE,
                "rpc.method": "ModelInfer",
                "fewheads.model": model,
                "fewheads.request_id": arrival.request_id,
            },
            start_time=self._epoch_ns + arrival.started_ns,
        )
