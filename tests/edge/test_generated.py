"""The generated messages: fresh, equal to Triton's own, and usable beside them in one process."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import Descriptor
from google.protobuf.descriptor_pb2 import DescriptorProto
from tritonclient.grpc import service_pb2  # noqa: F401 (it adds its messages to the default pool)

from edge.pb import inference_pb2

ROOT = Path(__file__).parent.parent.parent
OURS = inference_pb2.DESCRIPTOR
THEIRS = descriptor_pool.Default()


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


def fields(message: Descriptor) -> dict[str, bytes]:
    """Return everything of each field that both sides of a wire must agree on."""
    described = DescriptorProto()
    message.CopyToProto(described)
    return {field.name: field.SerializeToString() for field in described.field}


def test_messages_enums_and_rpcs_are_tritons() -> None:
    enums = list(OURS.enum_types_by_name.values())
    for message in messages():
        theirs = THEIRS.FindMessageTypeByName(message.full_name)
        assert fields(message).items() <= fields(theirs).items()
        assert message.GetOptions().map_entry == theirs.GetOptions().map_entry
        enums += message.enum_types
    assert {enum.name for enum in enums} == {"DataType", "Kind"}
    for enum in enums:
        other = THEIRS.FindEnumTypeByName(enum.full_name)
        assert {(v.name, v.number) for v in enum.values} <= {(v.name, v.number) for v in other.values}
    (service,) = OURS.services_by_name.values()
    for method in service.methods:
        other = THEIRS.FindServiceByName(service.full_name).methods_by_name[method.name]
        assert method.input_type.full_name == other.input_type.full_name
        assert method.output_type.full_name == other.output_type.full_name
        assert (method.client_streaming, method.server_streaming) == (other.client_streaming, other.server_streaming)


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
