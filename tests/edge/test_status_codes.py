"""Statuses that need models of ours, or features that are off; tests/conformance has those that Triton shares."""

from __future__ import annotations

from typing import Any, NamedTuple

import grpc
import pytest

from edge.pb import inference_pb2 as pb
from tests.support.sample_requests import LOAD, REGION, UNLOAD, changed, log_setting, parameter

ON_EVERY_TRANSPORT = True  # it tests the protocol

INVALID = grpc.StatusCode.INVALID_ARGUMENT
UNIMPLEMENTED = grpc.StatusCode.UNIMPLEMENTED


class Row(NamedTuple):
    case: str
    request: Any
    text: str
    code: grpc.StatusCode = INVALID
    method: str = "ModelInfer"


def off(method: str, request: Any, option: str) -> Row:
    """A feature that an option of the server enables; Triton returns UNAVAILABLE."""
    return Row(f"{method} without {option}", request, option, UNIMPLEMENTED, method)


def in_shared_memory(tensor: Any) -> None:
    tensor.parameters["shared_memory_region"].string_param = "a"


ROWS = [
    Row("version ²", changed(lambda r: setattr(r, "model_version", "²")), "positive integer"),
    Row("a misspelt parameter", parameter("teir", string_param="full"), "'teir', expected 'tier', or a name"),
    Row("log level as a bool", log_setting("log_verbose_level", bool_param=True), "type int", method="LogSettings"),
    Row("input in shared memory", changed(lambda r: in_shared_memory(r.inputs[0])), "--allow-shared", UNIMPLEMENTED),
    Row(
        "output in shared memory",
        changed(lambda r: in_shared_memory(r.outputs.add(name="value"))),
        "output 'value': got shared memory, expected none",
        UNIMPLEMENTED,
    ),
    off("RepositoryModelLoad", LOAD, "--model-control explicit"),
    off("RepositoryModelUnload", UNLOAD, "--model-control explicit"),
    off("SystemSharedMemoryStatus", pb.SystemSharedMemoryStatusRequest(), "--allow-shared-memory"),
    off("SystemSharedMemoryRegister", REGION, "--allow-shared-memory"),
    off("SystemSharedMemoryUnregister", pb.SystemSharedMemoryUnregisterRequest(), "--allow-shared-memory"),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.case)
def test_bad_call_ends_with_its_status(channel: grpc.Channel, row: Row) -> None:
    call = channel.unary_unary(f"/inference.GRPCInferenceService/{row.method}")
    with pytest.raises(grpc.RpcError) as caught:
        call(row.request.SerializeToString(), timeout=10)
    details = caught.value.details()
    assert caught.value.code() is row.code, details
    for part in (row.text, "got ", "expected "):
        assert part in details
    assert len(details) < 2000
