"""What the server answers to each kind of bad call: one row, one test.

The rows follow the codes that a real Triton gives, except where its answer is a known fault (comments say which).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from edge.pb import inference_pb2 as pb
from edge.pb import inference_pb2_grpc
from tests.support.models import ORACLE, VERSIONED
from tests.support.sample_requests import (
    LOAD,
    REGION,
    TOKENS,
    UNLOAD,
    changed,
    expression,
    good,
    log_setting,
    parameter,
    shaped,
    trace_setting,
    typed,
)

#: What it says concerns the protocol, whatever carries it.
ON_EVERY_TRANSPORT = True

INVALID = grpc.StatusCode.INVALID_ARGUMENT
NOT_FOUND = grpc.StatusCode.NOT_FOUND
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
UNIMPLEMENTED = grpc.StatusCode.UNIMPLEMENTED
OK = grpc.StatusCode.OK


class Row(NamedTuple):
    case: str
    method: str
    request: Any
    code: grpc.StatusCode
    text: str = ""


ROWS = [
    Row("a good raw request", "ModelInfer", good(), OK),
    Row("a good typed request", "ModelInfer", typed(), OK),
    Row("a good text request", "ModelInfer", expression(b"3 - -4 + 2"), OK),
    # Models and versions.
    Row("unknown model, metadata", "ModelMetadata", pb.ModelMetadataRequest(name="zz"), NOT_FOUND, "model 'zz'"),
    Row("unknown model, config", "ModelConfig", pb.ModelConfigRequest(name="zz"), NOT_FOUND, "model 'zz'"),
    Row("unknown model, infer", "ModelInfer", pb.ModelInferRequest(model_name="zz"), NOT_FOUND, "model 'zz'"),
    Row("unknown model, ready", "ModelReady", pb.ModelReadyRequest(name="zz"), OK),
    # Triton says INVALID_ARGUMENT here and NOT_FOUND everywhere else.
    Row("unknown model, statistics", "ModelStatistics", pb.ModelStatisticsRequest(name="zz"), NOT_FOUND, "'zz'"),
    Row("no model name", "ModelInfer", pb.ModelInferRequest(), NOT_FOUND, "model ''"),
    Row("version abc", "ModelInfer", changed(lambda r: setattr(r, "model_version", "abc")), INVALID, "'abc'"),
    Row("version 0", "ModelInfer", changed(lambda r: setattr(r, "model_version", "0")), INVALID, "positive integer"),
    Row(
        "version of 5000 digits", "ModelInfer", changed(lambda r: setattr(r, "model_version", "9" * 5000)), INVALID, "…"
    ),
    Row("version ²", "ModelInfer", changed(lambda r: setattr(r, "model_version", "²")), INVALID, "positive integer"),
    Row("version 7", "ModelInfer", changed(lambda r: setattr(r, "model_version", "7")), NOT_FOUND, "one of: 1"),
    Row("version abc, ready", "ModelReady", pb.ModelReadyRequest(name=ORACLE, version="abc"), INVALID, "'abc'"),
    Row(
        "version 2 of 1 and 3", "ModelMetadata", pb.ModelMetadataRequest(name=VERSIONED, version="2"), NOT_FOUND, "1, 3"
    ),
    Row("version 007 is 7", "ModelMetadata", pb.ModelMetadataRequest(name=VERSIONED, version="003"), OK),
    # Contents.
    Row(
        "raw and typed",
        "ModelInfer",
        changed(lambda r: r.inputs[0].contents.fp32_contents.extend(TOKENS[0].tolist())),
        INVALID,
        "raw and typed",
    ),
    Row(
        "neither raw nor typed",
        "ModelInfer",
        changed(lambda r: r.ClearField("raw_input_contents")),
        INVALID,
        "0 elements",
    ),
    Row("raw too short", "ModelInfer", changed(lambda r: r.raw_input_contents.__setitem__(0, b"1234")), INVALID, "60"),
    Row("raw too long", "ModelInfer", changed(lambda r: r.raw_input_contents.__setitem__(0, b"1" * 61)), INVALID, "60"),
    Row("raw empty", "ModelInfer", changed(lambda r: r.raw_input_contents.__setitem__(0, b"")), INVALID, "0 raw bytes"),
    Row(
        "typed too short",
        "ModelInfer",
        changed(lambda r: r.inputs[0].contents.fp32_contents.pop(), typed),
        INVALID,
        "14",
    ),
    Row(
        "typed in the wrong field",
        "ModelInfer",
        changed(lambda r: r.inputs[0].contents.int_contents.extend([1] * 15), typed),
        INVALID,
        "int_contents",
    ),
    # Triton ignores the surplus silently.
    Row(
        "more raw entries than inputs",
        "ModelInfer",
        changed(lambda r: r.raw_input_contents.append(b"")),
        INVALID,
        "2 entries",
    ),
    Row(
        "BYTES without room for its length",
        "ModelInfer",
        changed(lambda r: r.raw_input_contents.__setitem__(0, b"\1"), lambda: expression(b"1")),
        INVALID,
        "length",
    ),
    Row(
        "BYTES whose length lies",
        "ModelInfer",
        changed(lambda r: r.raw_input_contents.__setitem__(0, b"\xff\xff\xff\xff1"), lambda: expression(b"1")),
        INVALID,
        "length",
    ),
    Row("BYTES with one element too many", "ModelInfer", expression(b"1", b"2", shape=(1, 1)), INVALID, "elements"),
    # Inputs.
    Row(
        "datatype FLOAT", "ModelInfer", changed(lambda r: setattr(r.inputs[0], "datatype", "FLOAT")), INVALID, "'FLOAT'"
    ),
    Row("datatype FP64", "ModelInfer", changed(lambda r: setattr(r.inputs[0], "datatype", "FP64")), INVALID, "FP32"),
    Row("no datatype", "ModelInfer", changed(lambda r: setattr(r.inputs[0], "datatype", "")), INVALID, "FP32"),
    Row("wrong name", "ModelInfer", changed(lambda r: setattr(r.inputs[0], "name", "X")), INVALID, "'expression', 'x'"),
    Row("wrong shape", "ModelInfer", shaped(1, 14), INVALID, "[1, 14]"),
    Row("negative dim", "ModelInfer", shaped(-1, 15), INVALID, "[-1, 15]"),
    # Triton lets the product overflow and fails in the backend.
    Row("dims that overflow int64", "ModelInfer", shaped(2**62, 15), INVALID, str(2**62 * 60)),
    Row("dims that overflow, BYTES", "ModelInfer", expression(b"1", shape=(2**62, 1)), INVALID, "elements"),
    Row("missing batch dim", "ModelInfer", shaped(15), INVALID, "[15]"),
    Row("batch above max", "ModelInfer", good(65), INVALID, "65 rows"),
    Row("zero batch", "ModelInfer", shaped(0, 15), INVALID, "[0, 15]"),
    Row("no shape", "ModelInfer", shaped(), INVALID, "[]"),
    Row("no input", "ModelInfer", pb.ModelInferRequest(model_name=ORACLE), INVALID, "'expression'"),
    Row(
        "an input twice",
        "ModelInfer",
        changed(lambda r: (r.inputs.append(r.inputs[0]), r.raw_input_contents.append(r.raw_input_contents[0]))),
        INVALID,
        "twice",
    ),
    Row(
        "text and tokens",
        "ModelInfer",
        changed(
            lambda r: (
                r.inputs.append(expression(b"1").inputs[0]),
                r.raw_input_contents.append(expression(b"1").raw_input_contents[0]),
            )
        ),
        INVALID,
        "stands for",
    ),
    Row("text that is no expression", "ModelInfer", expression(b"3 times 4"), INVALID, "'3 times 4'"),
    Row("text that is no UTF-8", "ModelInfer", expression(b"\xff"), INVALID, "UTF-8"),
    Row("text with nine operands", "ModelInfer", expression(b"1+1+1+1+1+1+1+1+1"), INVALID, "8 operands"),
    Row("text of a megabyte", "ModelInfer", expression(b"1" * 2**20), INVALID, "256 characters"),
    Row("text with too large an operand", "ModelInfer", expression(b"4096 - 1"), INVALID, "1024"),
    # Outputs.
    Row("unknown output", "ModelInfer", changed(lambda r: r.outputs.add(name="zz")), INVALID, "'zz'"),
    Row("a good output", "ModelInfer", changed(lambda r: r.outputs.add(name="value")), OK),
    Row(
        "duplicate output",
        "ModelInfer",
        changed(lambda r: (r.outputs.add(name="value"), r.outputs.add(name="value"))),
        INVALID,
        "twice",
    ),
    Row(
        "classification",
        "ModelInfer",
        changed(
            lambda r: (
                r.outputs.add(name="value").parameters["classification"].MergeFrom(pb.InferParameter(int64_param=1))
            )
        ),
        UNIMPLEMENTED,
        "classification",
    ),
    # Parameters.
    Row("unknown triton_ parameter", "ModelInfer", parameter("triton_zz", bool_param=True), INVALID, "'triton_zz'"),
    Row("known triton_ parameter", "ModelInfer", parameter("triton_enable_empty_final_response", bool_param=True), OK),
    Row("timeout of the wrong type", "ModelInfer", parameter("timeout", string_param="1"), INVALID, "int64_param"),
    Row("priority below 0", "ModelInfer", parameter("priority", int64_param=-1), INVALID, "0 or more"),
    Row("timeout below 0", "ModelInfer", parameter("timeout", int64_param=-1), INVALID, "0 or more"),
    Row("parameter without a value", "ModelInfer", parameter("priority"), INVALID, "priority"),
    Row("a sequence", "ModelInfer", parameter("sequence_id", uint64_param=7), INVALID, "no model keeps state"),
    # Triton refuses uint64 here.
    Row("a parameter of the client's own", "ModelInfer", parameter("mine", uint64_param=2**64 - 1), OK),
    Row("a parameter that is a word like ours", "ModelInfer", parameter("time", uint64_param=1), OK),
    Row(
        "a misspelt parameter", "ModelInfer", parameter("teir", string_param="full"), INVALID, "'teir', expected 'tier'"
    ),
    Row("a parameter with a unit", "ModelInfer", parameter("timeout_ms", int64_param=1), INVALID, "'timeout'"),
    Row("a deadline as a parameter", "ModelInfer", parameter("deadline", int64_param=1), INVALID, "'timeout'"),
    Row("a parameter in capitals", "ModelInfer", parameter("Policy", string_param="load"), INVALID, "'policy'"),
    # Shared memory.
    Row(
        "shared memory input",
        "ModelInfer",
        changed(
            lambda r: r.inputs[0].parameters["shared_memory_region"].MergeFrom(pb.InferParameter(string_param="a"))
        ),
        UNIMPLEMENTED,
        "shared memory",
    ),
    Row(
        "shared memory output",
        "ModelInfer",
        changed(
            lambda r: (
                r.outputs.add(name="value")
                .parameters["shared_memory_region"]
                .MergeFrom(pb.InferParameter(string_param="a"))
            )
        ),
        UNIMPLEMENTED,
        "shared memory",
    ),
    # What an option has to allow; Triton says UNAVAILABLE.
    Row("load", "RepositoryModelLoad", LOAD, UNIMPLEMENTED, "--model-control explicit"),
    Row("unload", "RepositoryModelUnload", UNLOAD, UNIMPLEMENTED, "--model-control explicit"),
    Row(
        "shared memory status",
        "SystemSharedMemoryStatus",
        pb.SystemSharedMemoryStatusRequest(),
        UNIMPLEMENTED,
        "--allow-shared-memory",
    ),
    Row("shared memory register", "SystemSharedMemoryRegister", REGION, UNIMPLEMENTED, "--allow-shared-memory"),
    Row(
        "shared memory unregister",
        "SystemSharedMemoryUnregister",
        pb.SystemSharedMemoryUnregisterRequest(),
        UNIMPLEMENTED,
        "--allow-shared-memory",
    ),
    # A Jetson has no CUDA IPC. perf_analyzer unregisters all such regions before it registers any.
    Row("CUDA status", "CudaSharedMemoryStatus", pb.CudaSharedMemoryStatusRequest(), OK),
    Row("CUDA unregister", "CudaSharedMemoryUnregister", pb.CudaSharedMemoryUnregisterRequest(name="a"), OK),
    Row(
        "CUDA register", "CudaSharedMemoryRegister", pb.CudaSharedMemoryRegisterRequest(name="a"), UNIMPLEMENTED, "IPC"
    ),
    # Settings.
    Row("log settings", "LogSettings", pb.LogSettingsRequest(), OK),
    Row("unknown log setting", "LogSettings", log_setting("zz", bool_param=True), INVALID, "'zz'"),
    Row("log setting without a value", "LogSettings", log_setting("log_info"), INVALID, "no value"),
    Row("log level as a bool", "LogSettings", log_setting("log_verbose_level", bool_param=True), INVALID, "type int"),
    Row("log info as a number", "LogSettings", log_setting("log_info", uint32_param=1), INVALID, "type bool"),
    Row("log file", "LogSettings", log_setting("log_file", string_param="/etc/passwd"), UNIMPLEMENTED, "stderr"),
    Row("log format", "LogSettings", log_setting("log_format", string_param="zz"), INVALID, "ISO8601"),
    Row("trace settings", "TraceSetting", pb.TraceSettingRequest(model_name=ORACLE), OK),
    Row("trace off", "TraceSetting", trace_setting("trace_level", "OFF"), OK),
    Row("trace cleared", "TraceSetting", trace_setting("trace_level"), OK),
    Row("trace on", "TraceSetting", trace_setting("trace_level", "TIMESTAMPS"), UNIMPLEMENTED, "--trace-endpoint"),
    Row("unknown trace setting", "TraceSetting", trace_setting("zz", "1"), INVALID, "'zz'"),
    Row("unknown model, trace", "TraceSetting", pb.TraceSettingRequest(model_name="zz"), NOT_FOUND, "'zz'"),
    # A bundle that could not be loaded keeps the name of its directory.
    Row("repository index", "RepositoryIndex", pb.RepositoryIndexRequest(), OK),
    Row("server live", "ServerLive", pb.ServerLiveRequest(), OK),
    Row("server ready", "ServerReady", pb.ServerReadyRequest(), OK),
    Row("server metadata", "ServerMetadata", pb.ServerMetadataRequest(), OK),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.case)
def test_status(channel: grpc.Channel, row: Row) -> None:
    call = channel.unary_unary(f"/inference.GRPCInferenceService/{row.method}")
    try:
        call(row.request.SerializeToString() if row.request else b"", timeout=10)
        code, details = OK, ""
    except grpc.RpcError as error:
        code, details = error.code(), error.details()
    assert code is row.code, details
    assert row.text in details
    if code is not OK and row.request is not None:
        assert "got " in details
        assert "expected " in details
        assert len(details) < 2000


def test_a_row_for_every_case_once() -> None:
    cases = [row.case for row in ROWS]
    assert len(set(cases)) == len(cases)


def test_health_of_an_unknown_service(channel: grpc.Channel) -> None:
    # Triton says SERVING to any name.
    with pytest.raises(grpc.RpcError) as caught:
        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="zz"))
    assert caught.value.code() is NOT_FOUND


def test_an_unparseable_message_is_internal_and_harms_nobody(
    channel: grpc.Channel, stub: inference_pb2_grpc.GRPCInferenceServiceStub
) -> None:
    call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
    with pytest.raises(grpc.RpcError) as caught:
        call(b"\xff\xff\xff", timeout=10)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert stub.ModelInfer(good()).raw_output_contents[0] == np.float32(9).tobytes()


def test_an_unknown_method(channel: grpc.Channel) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/inference.GRPCInferenceService/Zz")(b"", timeout=10)
    assert caught.value.code() is UNIMPLEMENTED
