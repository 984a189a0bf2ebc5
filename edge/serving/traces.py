"""OpenTelemetry traces: a span for each request, in it one for each stage, and a collector that takes them.

A request that comes with a W3C trace context (``traceparent``) continues the caller's trace, and its sampling decides;
of the others a share is sampled. Spans are made when a request has ended, from the times that are taken anyway.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from functools import partial
from typing import Any, Final

from edge import __version__
from edge.errors import Literally, UsageError
from edge.serving.call import Call

#: The trace context headers that came with a call. A transport sets it, and the tasks of a call inherit it.
Carrier = dict[str, str]
CARRIER: ContextVar[Carrier | None] = ContextVar("carrier", default=None)
_HEADERS: Final = ("traceparent", "tracestate")
#: Seconds that an export may take, and the end of the server may wait for the last one.
_PATIENCE_SECONDS: Final = 2.0
#: Of names and ids, which clients choose.
_MAX_ATTRIBUTE_LENGTH: Final = 256


def carry(metadata: Iterable[tuple[str, str | bytes]]) -> None:
    """Keep the trace context of a call's metadata for what is done for the call."""
    CARRIER.set({key: value for key, value in metadata if key in _HEADERS and isinstance(value, str)} or None)


class Traces:
    """Sends spans to a collector in the background; what it cannot take is dropped, and harms no request.

    Args:
        endpoint: of a collector that speaks OTLP over gRPC: ``http://host:port``, or ``https``.
        ratio: the share of requests without a context of their own that is sampled, 0 to 1.

    Raises:
        UsageError: the OpenTelemetry SDK is not installed.
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
            given, fix = Literally(f"no module {error.name}"), "pip install 'fewheads[otel]', or leave it out."
            raise UsageError("--trace-endpoint", given=given, expected="the OpenTelemetry SDK", fix=fix) from None
        self.ratio = ratio
        self._provider = TracerProvider(
            sampler=sampling.ParentBased(sampling.TraceIdRatioBased(ratio)),
            resource=Resource.create({"service.name": "fewheads", "service.version": __version__}),
            span_limits=SpanLimits(max_span_attribute_length=_MAX_ATTRIBUTE_LENGTH),
            shutdown_on_exit=False,
        )
        exporter = OTLPSpanExporter(
            endpoint=endpoint, insecure=not endpoint.startswith("https://"), timeout=_PATIENCE_SECONDS
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter, export_timeout_millis=1e3 * _PATIENCE_SECONDS))
        self._tracer = self._provider.get_tracer("fewheads", __version__)
        self._extract = TraceContextTextMapPropagator().extract
        self._inside, self._server = set_span_in_context, SpanKind.SERVER
        self._error: Callable[[str], Any] = partial(Status, StatusCode.ERROR)
        # Spans want the time since the epoch, and stages are timed by a clock that never jumps.
        self._epoch_ns = time.time_ns() - time.perf_counter_ns()

    def answered(self, call: Call, tier: str) -> None:
        """Trace a request that was answered just now.

        Args:
            call: the request, with its times.
            tier: which answered; empty for a model of one.
        """
        timings = call.timings
        end_ns = time.perf_counter_ns()
        span = self._begin(call.model.name, call.request_id, call.started_ns, call.trace_context)
        if span.is_recording():
            span.set_attributes({"fewheads.rows": call.rows, "fewheads.batch_rows": call.batch_rows})
            if tier:
                span.set_attributes({"fewheads.tier": tier, "fewheads.tier_reason": call.tier_reason})
            inside = self._inside(span)
            for stage, begun_ns, length_ns in (
                ("compute_input", call.started_ns, timings.compute_input_ns),
                ("queue", call.queued_ns, timings.queue_ns),
                ("compute_infer", call.computed_ns - timings.compute_infer_ns, timings.compute_infer_ns),
                ("compute_output", end_ns - timings.compute_output_ns, timings.compute_output_ns),
            ):
                begun_ns += self._epoch_ns
                self._tracer.start_span(stage, inside, start_time=begun_ns).end(begun_ns + length_ns)
        span.end(self._epoch_ns + end_ns)

    def failed(self, model: str, request_id: str, started_ns: int, reason: str, carrier: Carrier | None) -> None:
        """Trace a request that ended without an answer just now, by the class of its error."""
        span = self._begin(model, request_id, started_ns, carrier)
        span.set_status(self._error(reason))
        span.end(self._epoch_ns + time.perf_counter_ns())

    def close(self) -> None:
        """Send what is left, if the collector takes it within two seconds."""
        self._provider.force_flush(int(1e3 * _PATIENCE_SECONDS))
        self._provider.shutdown()

    def _begin(self, model: str, request_id: str, started_ns: int, carrier: Carrier | None) -> Any:
        return self._tracer.start_span(
            "ModelInfer",
            self._extract(carrier) if carrier else None,
            self._server,
            {
                "rpc.service": "inference.GRPCInferenceService",
                "rpc.method": "ModelInfer",
                "fewheads.model": model,
                "fewheads.request_id": request_id,
            },
            start_time=self._epoch_ns + started_ns,
        )
