"""The generated messages: fresh, equal to Triton's own, and at peace with them in one process."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc import model_config_pb2, service_pb2

from edge.pb import inference_pb2, telemetry_pb2
from edge.pb.pool import POOL

ROOT = Path(__file__).parent.parent.parent
OURS = inference_pb2.DESCRIPTOR
THEIRS = {
    **service_pb2.DESCRIPTOR.message_types_by_name,
    **model_config_pb2.DESCRIPTOR.message_types_by_name,
}


@pytest.mark.skipif(importlib.util.find_spec("grpc_tools") is None, reason="grpc_tools (extra 'dev') generates them")
def test_generated_files_are_fresh(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "proto" / "generate.py", tmp_path], check=True)
    made = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert len(made) == 6
    for name, data in made.items():
        assert (ROOT / name).read_bytes() == data, f"{name} is stale: run make generate"
    kept = {path.name for path in (ROOT / "edge" / "pb").iterdir() if path.is_file()}
    assert kept == {name.name for name in made} | {"__init__.py", "pool.py"}


def messages() -> Iterator[Descriptor]:
    todo = list(OURS.message_types_by_name.values())
    while todo:
        message = todo.pop()
        yield message
        todo += message.nested_types


def their_message(full_name: str) -> Descriptor:
    package, name, *rest = full_name.split(".")
    assert package == "inference"
    found = THEIRS[name]
    for part in rest:
        found = found.nested_types_by_name[part]
    return found


def their_enum(full_name: str) -> EnumDescriptor:
    _, *outer, name = full_name.split(".")
    if outer:
        return their_message(".".join(["inference", *outer])).enum_types_by_name[name]
    return model_config_pb2.DESCRIPTOR.enum_types_by_name[name]


def shape_of(field: FieldDescriptor) -> dict[str, Any]:
    """Everything of a field that both sides of a wire must agree on."""
    return {
        "name": field.name,
        "number": field.number,
        "type": field.type,
        "repeated": field.is_repeated,
        "packed": field.is_packed,
        "message": field.message_type.full_name if field.message_type else None,
        "map": field.message_type.GetOptions().map_entry if field.message_type else None,
        "enum": field.enum_type.full_name if field.enum_type else None,
        "oneof": field.containing_oneof.name if field.containing_oneof else None,
        "json": field.json_name,
    }


@pytest.mark.parametrize("message", list(messages()), ids=lambda message: message.full_name)
def test_every_field_is_tritons(message: Descriptor) -> None:
    theirs = their_message(message.full_name)
    assert theirs.full_name == message.full_name
    for field in message.fields:
        assert shape_of(field) == shape_of(theirs.fields_by_name[field.name])


def test_every_enum_is_tritons() -> None:
    enums = [*OURS.enum_types_by_name.values(), *(enum for message in messages() for enum in message.enum_types)]
    assert {enum.name for enum in enums} == {"DataType", "Kind"}
    for enum in enums:
        theirs = their_enum(enum.full_name)
        assert theirs.full_name == enum.full_name
        assert {value.name: value.number for value in enum.values}.items() <= {
            value.name: value.number for value in theirs.values
        }.items()


def test_every_rpc_is_tritons() -> None:
    (service,) = OURS.services_by_name.values()
    theirs = service_pb2.DESCRIPTOR.services_by_name[service.name]
    assert service.full_name == theirs.full_name == "inference.GRPCInferenceService"
    for method in service.methods:
        other = theirs.methods_by_name[method.name]
        assert method.input_type.full_name == other.input_type.full_name
        assert method.output_type.full_name == other.output_type.full_name
        assert (method.client_streaming, method.server_streaming) == (other.client_streaming, other.server_streaming)


def test_our_messages_are_in_our_pool() -> None:
    assert POOL.FindMessageTypeByName("inference.ModelInferRequest") is inference_pb2.ModelInferRequest.DESCRIPTOR
    assert POOL.FindMessageTypeByName("fewheads.telemetry.v1.Reading") is telemetry_pb2.Reading.DESCRIPTOR
    assert service_pb2.ModelInferRequest.DESCRIPTOR is not inference_pb2.ModelInferRequest.DESCRIPTOR


@pytest.mark.parametrize("order", ["edge first", "tritonclient first"])
def test_both_live_in_one_process(order: str) -> None:
    ours = "from edge.pb import inference_pb2 as ours, inference_pb2_grpc, telemetry_pb2_grpc"
    theirs = "from tritonclient.grpc import service_pb2 as theirs, service_pb2_grpc"
    lines = [ours, theirs] if order == "edge first" else [theirs, ours]
    lines += [
        "request = ours.ModelInferRequest(model_name='m', id='7')",
        "other = theirs.ModelInferRequest.FromString(request.SerializeToString())",
        "assert (other.model_name, other.id) == ('m', '7')",
    ]
    subprocess.run([sys.executable, "-W", "error", "-c", "\n".join(lines)], check=True, cwd=ROOT)


TEXT = st.text(st.characters(codec="utf-8"), max_size=10)
INT64 = st.integers(-(2**63), 2**63 - 1)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "bool_param": st.booleans(),
    "int64_param": INT64,
    "string_param": TEXT,
    "double_param": st.floats(allow_nan=False),
    "uint64_param": st.integers(0, 2**64 - 1),
}
CONTENTS: dict[str, st.SearchStrategy[Any]] = {
    "bool_contents": st.booleans(),
    "int_contents": st.integers(-(2**31), 2**31 - 1),
    "int64_contents": INT64,
    "uint_contents": st.integers(0, 2**32 - 1),
    "uint64_contents": st.integers(0, 2**64 - 1),
    "fp32_contents": st.floats(width=32, allow_nan=False),
    "fp64_contents": st.floats(allow_nan=False),
    "bytes_contents": st.binary(max_size=10),
}


def parameters() -> st.SearchStrategy[dict[str, inference_pb2.InferParameter]]:
    choices = [
        values.map(lambda value, name=name: inference_pb2.InferParameter(**{name: value}))  # type: ignore[misc]
        for name, values in VALUES.items()
    ]
    return st.dictionaries(TEXT, st.one_of(choices), max_size=3)


@st.composite
def requests(draw: st.DrawFn) -> inference_pb2.ModelInferRequest:
    request = inference_pb2.ModelInferRequest(model_name=draw(TEXT), model_version=draw(TEXT), id=draw(TEXT))
    for name, value in draw(parameters()).items():
        request.parameters[name].CopyFrom(value)
    for _ in range(draw(st.integers(0, 3))):
        tensor = request.inputs.add(name=draw(TEXT), datatype=draw(TEXT), shape=draw(st.lists(INT64, max_size=4)))
        for name, value in draw(parameters()).items():
            tensor.parameters[name].CopyFrom(value)
        for field in draw(st.sets(st.sampled_from(sorted(CONTENTS)), max_size=3)):
            getattr(tensor.contents, field).extend(draw(st.lists(CONTENTS[field], max_size=5)))
    for _ in range(draw(st.integers(0, 2))):
        output = request.outputs.add(name=draw(TEXT))
        for name, value in draw(parameters()).items():
            output.parameters[name].CopyFrom(value)
    request.raw_input_contents.extend(draw(st.lists(st.binary(max_size=20), max_size=3)))
    return request


def test_every_field_of_a_request_is_drawn() -> None:
    """The strategies above must follow the messages."""
    assert set(VALUES) == set(inference_pb2.InferParameter.DESCRIPTOR.fields_by_name)
    assert set(CONTENTS) == set(inference_pb2.InferTensorContents.DESCRIPTOR.fields_by_name)


@given(requests())
@settings(deadline=None, max_examples=200)
def test_requests_survive_the_way_through_tritons_messages(request: inference_pb2.ModelInferRequest) -> None:
    sent = request.SerializeToString(deterministic=True)
    theirs = service_pb2.ModelInferRequest.FromString(sent)
    assert theirs.SerializeToString(deterministic=True) == sent
    assert inference_pb2.ModelInferRequest.FromString(theirs.SerializeToString()) == request
    assert str(theirs) == str(request)
