"""Traces of requests at a collector."""

import time
from concurrent import futures

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from edge.launch import running_server
from edge.serving.traces import CARRIER, carry
from tests.support.sample_requests import triton_input

pytest.importorskip("opentelemetry.sdk")
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
STAGES = ["compute_input", "queue", "compute_infer", "compute_output"]


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self):
        self.spans = []

    def Export(self, request, context):
        for resource in request.resource_spans:
            assert {a.key: a.value.string_value for a in resource.resource.attributes}["service.name"] == "fewheads"
            for scope in resource.scope_spans:
                self.spans.extend(scope.spans)
        return otlp.ExportTraceServiceResponse()


def row(length):
    return triton_input("x", np.ones((1, length), np.float32))


def test_spans_of_requests(bundles):
    received, server = Collector(), grpc.server(futures.ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(received, server)
    endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    begun_ns = time.time_ns()
    with running_server(bundles[-1:], arguments=["--trace-endpoint", endpoint, "--trace-ratio", "0"]) as ready:
        name, _, _ = ready.ready[0].partition(":")
        with triton.InferenceServerClient(f"127.0.0.1:{ready.grpc_port}") as client:
            trace = client.get_trace_settings(as_json=True)["settings"]
            found = [trace[name]["value"] for name in ("trace_mode", "trace_level", "trace_rate")]
            assert found == [["opentelemetry"], ["TIMESTAMPS"], ["0"]]
            client.infer(name, [row(15)])  # without a context, and of these nothing is sampled
            context = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
            client.infer(name, [row(15)], request_id="7" * 300, headers=context)
            with pytest.raises(InferenceServerException):
                client.infer(name, [row(14)], headers=context)
            client.infer(name, [row(15)], headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})  # nor is the caller's
            client.infer(name, [row(15)], headers={"traceparent": "no context"})
    server.stop(0).wait()  # the other server has sent what it had before it ended
    answered, refused = sorted((s for s in received.spans if s.name == "ModelInfer"), key=lambda s: s.status.code)
    for span in (answered, refused):
        assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
        assert begun_ns < span.start_time_unix_nano < span.end_time_unix_nano < time.time_ns()
    attributes = {a.key: a.value.string_value or a.value.int_value for a in answered.attributes}
    assert (attributes["fewheads.model"], attributes["fewheads.request_id"]) == (name, "7" * 256)
    assert attributes["fewheads.rows"] == attributes["fewheads.batch_rows"] == 1
    assert (refused.status.code, refused.status.message) == (2, "InvalidRequest")
    stages = [span for span in received.spans if span.parent_span_id == answered.span_id]
    assert [span.name for span in sorted(stages, key=lambda s: s.start_time_unix_nano)] == STAGES
    for stage in stages:
        assert answered.start_time_unix_nano <= stage.start_time_unix_nano <= stage.end_time_unix_nano
        assert stage.end_time_unix_nano <= answered.end_time_unix_nano
    assert len(received.spans) == 2 + len(STAGES)


def test_only_the_trace_context_of_a_call_is_kept():
    carry([("traceparent", "a"), ("authorization", "Bearer b"), ("tracestate", b"c")])
    assert CARRIER.get() == {"traceparent": "a"}
    carry([("authorization", "Bearer b")])
    assert CARRIER.get() is None


def test_requests_do_not_need_the_collector(bundles):
    arguments = ["--trace-endpoint", "http://127.0.0.1:1", "--trace-ratio", "0.5"]
    with (
        running_server(bundles[-1:], arguments=arguments) as ready,
        triton.InferenceServerClient(f"127.0.0.1:{ready.grpc_port}") as client,
    ):
        assert client.get_trace_settings(as_json=True)["settings"]["trace_rate"] == {"value": ["2"]}
        assert all(client.infer("versioned", [row(15)]).as_numpy("value").size for _ in range(20))
