"""The corpora of broken bundles of both format versions: each raises the error in ``expected.json``."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from edge import errors
from edge.bundles.bundle import Bundle
from edge.bundles.onnx_file import check_self_contained
from edge.bundles.preprocess import preprocessor
from edge.errors import BundleError
from edge.runtimes.build import load_runner
from tests.data.make_broken_bundles import BROKEN_BUNDLES, CORPORA
from tests.support.models import oracle_onnx

EXPECTED = json.loads((BROKEN_BUNDLES / "expected.json").read_text())
#: Format version and case; most cases break both versions.
CASES = [
    (version, case)
    for version in CORPORA
    for case, expected in sorted(EXPECTED.items())
    if expected.get("version", version) == version
]


@pytest.mark.parametrize(("version", "case"), CASES)
def test_broken_bundle_raises_its_error(version: int, case: str, tmp_path: Path):
    path, expected = CORPORA[version][1] / case, EXPECTED[case]
    with pytest.raises(errors.FewheadsError) as caught:
        # One version is read whole at once, the other one model by model as a server does.
        _load(path, tmp_path, models=version == 1)
    assert type(caught.value) is getattr(errors, expected["error"])
    for fragment in expected["fragments"]:
        assert fragment.replace("{version}", str(version)) in str(caught.value)
    assert str(path) in caught.value.subject
    assert caught.value.fix.endswith(".")


def _load(path: Path, cache: Path, *, models: bool) -> None:
    bundle = Bundle.open(path, models=models)
    preprocessor(bundle)
    load_runner(bundle, "onnxruntime", cache)


def _models_with(tensor: TensorProto) -> dict[str, onnx.ModelProto]:
    """Return models that hold a tensor, one for each place where ONNX allows one."""
    inner, sparse = helper.make_graph([], "inner", [], [], [tensor]), onnx.SparseTensorProto(values=tensor)

    def model(nodes: tuple[onnx.NodeProto, ...] = (), functions: object = (), **fields: object) -> onnx.ModelProto:
        return helper.make_model(helper.make_graph(nodes, "g", [], [], **fields), functions=functions)

    values = {"tensor": tensor, "graph": inner, "sparse": sparse}
    values |= {f"{name}s": [value] for name, value in values.items()}
    nodes = {name: helper.make_node("N", [], ["y"], a=value) for name, value in values.items()}
    function = helper.make_function("d", "F", [], ["y"], [nodes["graph"]], [helper.make_opsetid("", 17)])
    default = onnx.FunctionProto(name="F", attribute_proto=[helper.make_attribute("a", tensor)])
    return {
        **{name: model((node,)) for name, node in nodes.items()},
        "initializer": helper.make_model(inner),
        "sparse initializer": model(sparse_initializer=[sparse]),
        "indices": model(sparse_initializer=[onnx.SparseTensorProto(indices=tensor)]),
        "function": model(functions=[function]),
        "default of a function": model(functions=[default]),
    }


def test_external_weights_are_found_wherever_they_are():
    inside = numpy_helper.from_array(np.zeros(2, np.float32), "w")
    outside = TensorProto(name="w", external_data=[onnx.StringStringEntryProto(key="location", value="w.bin")])
    for name, model in _models_with(inside).items():
        check_self_contained(model.SerializeToString(), name)
    for name, model in _models_with(outside).items():
        with pytest.raises(BundleError, match=f"{name}: got external data, expected all weights in the ONNX file"):
            check_self_contained(model.SerializeToString(), name)


def _nested(message: bytes, *fields: int) -> bytes:
    """Wrap a message in length-delimited fields, the innermost field first."""
    for field in fields:
        size, prefix = len(message), bytes([field << 3 | 2])
        while size > 127:
            prefix, size = prefix + bytes([size & 127 | 128]), size >> 7
        message = prefix + bytes([size]) + message
    return message


#: graph (7) of a model, and node (1), attribute (5) and subgraph (6) again and again.
DEEP = [_nested(b"", *(6, 5, 1) * levels, 7) for levels in (20, 21)]


@pytest.mark.parametrize(
    ("data", "is_protobuf"),
    [
        (b"", True),
        (oracle_onnx(), True),
        (oracle_onnx()[:-1], False),
        (b"\x08\x96\x01", True),  # a varint of two bytes
        (b"\x08\x96", False),
        (b"\x09" + bytes(8), True),  # 64 bits
        (b"\x09" + bytes(7), False),
        (b"\x0d" + bytes(4), True),  # 32 bits
        (b"\x0d" + bytes(3), False),
        (b"\x0b", False),  # a group
        (b"\x08" + b"\xff" * 9 + b"\x01", True),
        (b"\x08" + b"\xff" * 10 + b"\x01", False),
        (b"\x3a\x80\x01" + bytes([8, 1] * 64), True),  # a graph of 128 bytes
        (b"\x3a\x80\x01" + bytes([8, 1] * 63), False),
        (DEEP[0], True),
        (DEEP[1], False),
    ],
)
def test_bytes_that_are_no_protobuf_are_rejected(data: bytes, is_protobuf: bool):
    if is_protobuf:
        check_self_contained(data, "m")
    else:
        with pytest.raises(BundleError, match=r"m: got broken protobuf, expected an ONNX model\. Copy the bundle"):
            check_self_contained(data, "m")
