"""The generated messages: fresh, equal to Triton's own, and usable beside them in one process."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from tritonclient.grpc import model_config_pb2, service_pb2

from edge.pb import inference_pb2, telemetry_pb2
from edge.pb.pool import POOL

ROOT = Path(__file__).parent.parent.parent
OURS = inference_pb2.DESCRIPTOR
THEIRS = {**service_pb2.DESCRIPTOR.message_types_by_name, **model_config_pb2.DESCRIPTOR.message_types_by_name}


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


def shape_of(field: FieldDescriptor) -> list[Any]:
    """Return everything of a field that both sides of a wire must agree on."""
    message, enum, oneof = field.message_type, field.enum_type, field.containing_oneof
    return [
        *(field.name, field.number, field.type, field.is_repeated, field.is_packed, field.json_name),
        *(
            message and (message.full_name, message.GetOptions().map_entry),
            enum and enum.full_name,
            oneof and oneof.name,
        ),
    ]


def test_messages_enums_and_rpcs_are_tritons() -> None:
    enums = list(OURS.enum_types_by_name.values())
    for message in messages():
        theirs = their_message(message.full_name)
        assert theirs.full_name == message.full_name
        for field in message.fields:
            assert shape_of(field) == shape_of(theirs.fields_by_name[field.name])
        enums += message.enum_types
    assert {enum.name for enum in enums} == {"DataType", "Kind"}
    for enum in enums:
        other = their_enum(enum.full_name)
        assert other.full_name == enum.full_name
        assert {(v.name, v.number) for v in enum.values} <= {(v.name, v.number) for v in other.values}
    (service,) = OURS.services_by_name.values()
    assert service.full_name == "inference.GRPCInferenceService"
    for method in service.methods:
        other = service_pb2.DESCRIPTOR.services_by_name[service.name].methods_by_name[method.name]
        assert method.input_type.full_name == other.input_type.full_name
        assert method.output_type.full_name == other.output_type.full_name
        assert (method.client_streaming, method.server_streaming) == (other.client_streaming, other.server_streaming)


def test_messages_are_in_a_pool_of_their_own() -> None:
    assert POOL.FindMessageTypeByName("inference.ModelInferRequest") is inference_pb2.ModelInferRequest.DESCRIPTOR
    assert POOL.FindMessageTypeByName("fewheads.telemetry.v1.Reading") is telemetry_pb2.Reading.DESCRIPTOR
    assert service_pb2.ModelInferRequest.DESCRIPTOR is not inference_pb2.ModelInferRequest.DESCRIPTOR


@pytest.mark.parametrize("first", ["edge", "tritonclient"])
def test_both_packages_can_be_imported_in_one_process(first: str) -> None:
    lines = [
        "from edge.pb import inference_pb2 as ours, inference_pb2_grpc, telemetry_pb2_grpc",
        "from tritonclient.grpc import service_pb2 as theirs, service_pb2_grpc",
    ]
    lines = lines if first == "edge" else lines[::-1]
    lines += [
        "request = ours.ModelInferRequest(model_name='m', id='7')",
        "other = theirs.ModelInferRequest.FromString(request.SerializeToString())",
        "assert (other.model_name, other.id) == ('m', '7')",
    ]
    subprocess.run([sys.executable, "-W", "error", "-c", "\n".join(lines)], check=True, cwd=ROOT)
