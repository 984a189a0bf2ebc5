"""Traces of requests at a collector."""

import queue
import time
from concurrent import futures
from contextlib import contextmanager

import click
import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from edge.__main__ import cli
from edge.launch import running_server
from edge.serving.traces import CARRIER, carry
from tests.support.commands import mistake
from tests.support.http_requests import ask, good
from tests.support.letters_model import completion
from tests.support.sample_requests import triton_input

pytest.importorskip("opentelemetry.sdk")
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc

ON_EVERY_TRANSPORT = True  # each tells the method of a call

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


@contextmanager
def collecting():
    """Run a collector while the block runs, and yield it and its address; its spans are complete after the block."""
    received, server = Collector(), grpc.server(futures.ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(received, server)
    endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield received, endpoint
    server.stop(0).wait()  # the other server has sent what it had before it ended


def tracing(bundles, endpoint, *arguments):
    return running_server(bundles, arguments=[f"--trace-endpoint={endpoint}", *arguments])


def attributes_of(span):
    return {a.key: a.value.string_value or a.value.int_value for a in span.attributes}


def test_spans_of_calls(bundles, transport):
    begun_ns = time.time_ns()
    arguments = [f"--transport={transport}", "--trace-ratio=0"]
    with collecting() as (received, endpoint), tracing(bundles[-1:], endpoint, *arguments) as ready:
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
            with pytest.raises(InferenceServerException):
                client.infer(name, [row(15)], headers=context, timeout=1)
            client.infer(name, [row(15)], headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})  # nor is the caller's
            client.infer(name, [row(15)], headers={"traceparent": "no context"})
            answers = queue.Queue()
            client.start_stream(lambda result, error: answers.put(error), headers=context)
            client.async_stream_infer(name, [row(15)])
            assert answers.get(timeout=20) is None
            client.stop_stream()
    method = "inference.GRPCInferenceService/ModelInfer"
    calls = {attributes_of(span)["rpc.response.status_code"]: span for span in received.spans if span.name == method}
    assert set(calls) == {"OK", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED"}
    for span in calls.values():
        assert (span.trace_id.hex(), span.parent_span_id.hex(), span.kind) == (TRACE, PARENT, span.SPAN_KIND_SERVER)
        assert begun_ns < span.start_time_unix_nano < span.end_time_unix_nano < time.time_ns()
        attributes = attributes_of(span)
        assert (attributes["rpc.system.name"], attributes["rpc.method"]) == ("grpc", method)
        assert not {"rpc.system", "rpc.service", "rpc.grpc.status_code"} & set(attributes)
    answered, refused, late = (calls[code] for code in ("OK", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED"))
    attributes = attributes_of(answered)
    assert (attributes["fewheads.model"], attributes["fewheads.request_id"]) == (name, "7" * 256)
    assert attributes["fewheads.rows"] == attributes["fewheads.batch_rows"] == 1
    assert [span.status.code for span in (answered, refused, late)] == [0, 0, 2]  # a wrong request is no error of ours
    assert (late.status.message, attributes_of(late)["error.type"]) == ("DeadlineExceeded", "DEADLINE_EXCEEDED")
    stages = [span for span in received.spans if span.parent_span_id == answered.span_id]
    assert [span.name for span in sorted(stages, key=lambda s: s.start_time_unix_nano)] == STAGES
    for stage in stages:
        assert answered.start_time_unix_nano <= stage.start_time_unix_nano <= stage.end_time_unix_nano
        assert stage.end_time_unix_nano <= answered.end_time_unix_nano
    (streamed,) = (span for span in received.spans if span.name.endswith("/ModelStreamInfer"))
    assert attributes_of(streamed)["rpc.method"] == streamed.name
    assert len(received.spans) == len(calls) + 1 + 2 * len(STAGES)


def test_spans_of_http_requests(bundles):
    with (
        collecting() as (received, endpoint),
        tracing(bundles[-1:], endpoint, "--http-port=0", "--trace-ratio=1") as to,
    ):
        name, _, _ = to.ready[0].partition(":")
        path, address = f"/v2/models/{name}/infer", f"127.0.0.1:{to.http_port}"
        context = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        assert ask(address, path, good(), headers=context).status == 200
        for body, status in ((b"no JSON", 400), (good() | {"parameters": {"timeout": 1}}, 504)):
            assert ask(address, path, body, headers={**context, "Host": "[::1]"}).status == status
        assert ask(address, path, good(), headers={**context, "Origin": "http://evil.example"}).status == 403
        assert ask(address, "/v2").status == 200  # neither has a span
        assert ask(address, path, method="GET").status == 405
    requests = {attributes_of(span)["http.response.status_code"]: span for span in received.spans if span.kind == 2}
    assert set(requests) == {200, 400, 504}
    for status, span in requests.items():
        assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
        assert span.name == "POST /v2/models/{model}/infer"
        found = attributes_of(span)
        assert found.pop("server.port", None) == (to.http_port if status == 200 else None)
        assert found.pop("error.type", None) == ("504" if status == 504 else None)
        assert span.status.code == (2 if status == 504 else 0)
        assert found == {
            "http.request.method": "POST",
            "http.route": "/v2/models/{model}/infer",
            "http.response.status_code": status,
            "url.scheme": "http",
            "url.path": path,
            "server.address": "127.0.0.1" if status == 200 else "::1",
        }
    inside = {span.parent_span_id: span for span in received.spans if span.name == "infer"}
    assert set(inside) == {requests[200].span_id, requests[504].span_id}  # of the other there was nothing to infer
    answered = inside[requests[200].span_id]
    assert (answered.kind, attributes_of(answered)["fewheads.model"]) == (answered.SPAN_KIND_INTERNAL, name)
    assert {span.name for span in received.spans if span.parent_span_id == answered.span_id} == set(STAGES)
    assert not any(key.startswith("rpc.") for span in received.spans for key in attributes_of(span))


@pytest.mark.parametrize("variable", ["OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"])
def test_endpoint_comes_from_opentelemetrys_variables(variable, monkeypatch):
    serve = cli.get_command(click.Context(cli), "serve")

    def endpoint(*arguments):
        return serve.make_context("serve", [*arguments]).params["trace_endpoint"]

    assert endpoint() == ""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://all:4317")
    monkeypatch.setenv(variable, "http://ours:4317")
    assert endpoint() == "http://ours:4317"
    assert endpoint("--trace-endpoint=") == ""
    monkeypatch.setenv("FEWHEADS_SERVE_TRACE_ENDPOINT", "http://first:4317")
    assert endpoint() == "http://first:4317"
    monkeypatch.delenv("FEWHEADS_SERVE_TRACE_ENDPOINT")
    monkeypatch.setenv(variable, "collector:4317")
    assert mistake("serve", "/").endswith(f"--trace-endpoint comes from {variable}.")


def test_only_the_trace_context_of_a_call_is_kept():
    carry("ModelInfer", [("traceparent", "a"), ("authorization", "Bearer b"), ("tracestate", b"c")])
    assert CARRIER.get() == ("ModelInfer", {"traceparent": "a"})
    carry("ModelInfer", [("authorization", "Bearer b")])
    assert CARRIER.get() == ("ModelInfer", {})


def test_requests_do_not_need_the_collector(bundles):
    arguments = ["--trace-endpoint", "http://127.0.0.1:1", "--trace-ratio", "0.5"]
    with (
        running_server(bundles[-1:], arguments=arguments) as ready,
        triton.InferenceServerClient(f"127.0.0.1:{ready.grpc_port}") as client,
    ):
        assert client.get_trace_settings(as_json=True)["settings"]["trace_rate"] == {"value": ["2"]}
        assert all(client.infer("versioned", [row(15)]).as_numpy("value").size for _ in range(20))


def test_choices_of_a_completion_are_inside_one_http_request(letters_bundle):
    with collecting() as (received, endpoint), tracing([letters_bundle.path], endpoint, "--http-port=0") as to:
        context = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        asked = completion(max_tokens=3, n=2, stream=True)
        assert ask(f"127.0.0.1:{to.http_port}", "/v1/completions", asked, headers=context).status == 200
    (request,) = (span for span in received.spans if span.kind == span.SPAN_KIND_SERVER)
    assert (request.name, request.parent_span_id.hex()) == ("POST /v1/completions", PARENT)
    choices = [span for span in received.spans if span.parent_span_id == request.span_id]
    assert [span.name for span in choices] == ["infer", "infer"]
    for span in choices:  # the events that a client reads belong to the request
        assert request.start_time_unix_nano <= span.start_time_unix_nano
        assert span.end_time_unix_nano <= request.end_time_unix_nano
