"""Tensors as JSON and as binary data survive a round trip bit by bit, or are refused."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from edge.datatypes import NUMPY_TYPES, Array
from edge.errors import InvalidRequest
from edge.pb import inference_pb2 as pb
from edge.rest.infer import Wanted, infer_request, infer_response
from edge.rest.json_messages import MAX_JSON_BYTES
from edge.serving.call import encode_outputs
from edge.serving.wire import from_raw, to_raw

JSON_TYPES = sorted(set(NUMPY_TYPES) - {"FP16"})
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
TEXTS = st.lists(TEXT, min_size=1, max_size=4)


def sent(array: Array, datatype: str, data: Any) -> Array:
    item = {"name": "a", "datatype": datatype, "shape": list(array.shape), "data": data}
    message, _ = infer_request("m", "", json.dumps({"inputs": [item]}).encode(), None)
    return from_raw(message.raw_input_contents[0], datatype, array.shape, "a")


def answered(array: Array, *, binary: bool) -> tuple[bytes, int | None]:
    message = pb.ModelInferResponse(model_name="m", model_version="1")
    encode_outputs(message, {"a": array}, ["a"])
    return infer_response(message, Wanted(binary, {}))


@pytest.mark.parametrize("datatype", sorted(set(JSON_TYPES) - {"BYTES"}))
@settings(max_examples=30, deadline=None)
@given(st.data())
def test_numbers_travel_as_json_bit_by_bit(datatype: str, data: st.DataObject) -> None:
    array = data.draw(arrays.arrays(NUMPY_TYPES[datatype], arrays.array_shapes(max_dims=3, max_side=3)))
    for contents in (array.tolist(), array.ravel().tolist()):
        np.testing.assert_array_equal(sent(array, datatype, contents), array)
    body, json_bytes = answered(array, binary=False)
    assert json_bytes is None
    back: Array = np.array(json.loads(body)["outputs"][0]["data"], NUMPY_TYPES[datatype])
    np.testing.assert_array_equal(back.reshape(array.shape), array)


@settings(max_examples=50, deadline=None)
@given(TEXTS)
def test_text_travels_as_json(texts: list[str]) -> None:
    array: Array = np.array([text.encode() for text in texts], np.object_)
    np.testing.assert_array_equal(sent(array, "BYTES", texts), array)
    assert json.loads(answered(array, binary=False)[0])["outputs"][0]["data"] == texts


@pytest.mark.parametrize("datatype", NUMPY_TYPES)
def test_every_datatype_travels_as_binary_data(datatype: str) -> None:
    texts = np.array([b"", b"\xff\0", b"1", b""], np.object_)
    array: Array = texts if datatype == "BYTES" else np.array([0, 1, 1, 0]).astype(NUMPY_TYPES[datatype])
    raw = to_raw(array, datatype)
    item = {"datatype": datatype, "shape": [4], "parameters": {"binary_data_size": len(raw)}}
    written = json.dumps({"inputs": [{"name": name, **item} for name in "ab"]}).encode()
    message, _ = infer_request("m", "2", written + raw + raw, str(len(written)))
    assert list(message.raw_input_contents) == [raw, raw]
    assert not message.inputs[0].parameters
    assert (message.model_name, message.model_version) == ("m", "2")
    body, json_bytes = answered(array, binary=True)
    assert body[json_bytes:] == raw
    assert json.loads(body[:json_bytes])["outputs"][0]["parameters"] == {"binary_data_size": len(raw)}


def test_json_and_binary_data_in_one_body() -> None:
    items = [
        {"name": "a", "datatype": "FP32", "shape": [3], "parameters": {"binary_data_size": 12, "mine": 1}},
        {"name": "b", "datatype": "INT8", "shape": [1, 2], "data": [[1, -1]]},
        {"name": "c", "datatype": "FP32", "shape": [3], "parameters": {"shared_memory_region": "r"}},
        {"name": "d", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 5}},
    ]
    written = json.dumps({"inputs": items}).encode()
    message, _ = infer_request("m", "", written + b"twelve bytes" + b"\1\0\0\0x", str(len(written)))
    # A tensor in shared memory has no entry.
    assert list(message.raw_input_contents) == [b"twelve bytes", b"\1\xff", b"\1\0\0\0x"]
    assert message.inputs[0].parameters["mine"].int64_param == 1
    assert message.inputs[2].parameters["shared_memory_region"].string_param == "r"


def test_which_outputs_are_binary_data() -> None:
    outputs = [{"name": "a", "parameters": {"binary_data": False, "mine": True}}, {"name": "b"}]
    body = json.dumps({"parameters": {"binary_data_output": True}, "outputs": outputs}).encode()
    message, wanted = infer_request("m", "", body, None)
    assert [wanted.binary(name) for name in "abc"] == [False, True, True]
    assert [dict(output.parameters) for output in message.outputs] == [{"mine": pb.InferParameter(bool_param=True)}, {}]


def test_nonfinite_numbers_are_as_in_triton() -> None:
    array: Array = np.array([np.nan, np.inf, -np.inf, -0.0], np.float32)
    body, _ = answered(array, binary=False)
    assert b"[NaN,Infinity,-Infinity,-0.0]" in body
    np.testing.assert_array_equal(sent(array, "FP32", json.loads(body)["outputs"][0]["data"]), array)


def test_outputs_that_json_cannot_represent_are_refused() -> None:
    large = np.zeros(MAX_JSON_BYTES + 1, np.uint8)
    invalid = np.array([b"a\xff"], np.object_)
    for array, text in ((invalid, r"got b'\\xff', expected UTF-8"), (large, f"{large.size} bytes as JSON")):
        with pytest.raises(InvalidRequest, match=text):
            answered(array, binary=False)


def test_parameters_of_a_response_and_an_output_in_shared_memory() -> None:
    message = pb.ModelInferResponse(model_name="m", model_version="1", id="7")
    message.parameters["tier"].string_param = "half"
    message.parameters["request_ns"].int64_param = 2**40
    tensor = message.outputs.add(name="a", datatype="FP32", shape=[1])
    tensor.parameters["shared_memory_region"].string_param = "r"
    tensor.parameters["shared_memory_byte_size"].int64_param = 4
    message.raw_output_contents.append(b"")
    body, json_bytes = infer_response(message, Wanted(True, {}))
    assert json_bytes is None
    answer = json.loads(body)
    assert (answer["id"], answer["parameters"]) == ("7", {"tier": "half", "request_ns": 2**40})
    # The stock client in C++ takes an output with parameters for one that has binary data.
    assert answer["outputs"] == [{"name": "a", "datatype": "FP32", "shape": [1]}]
