"""Conversion between bodies of HTTP, with tensors as JSON or as binary data behind it, and messages of ModelInfer."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable
from itertools import chain
from math import prod
from typing import Any, Final, NamedTuple

import numpy as np

from edge.datatypes import NUMPY_TYPES, Array
from edge.errors import InvalidRequest, Raw
from edge.pb import inference_pb2 as pb
from edge.rest.json_messages import (
    INT64,
    MAX_JSON_BYTES,
    checked,
    encode,
    encode_parts,
    field,
    kind_of,
    parse,
    set_parameters,
    values_of,
    whole,
)
from edge.serving.request import MOST_TENSORS, check_number
from edge.serving.shared_memory import is_shared
from edge.serving.wire import from_raw, to_raw

#: The header with the number of bytes of JSON in a body; binary data follows them.
JSON_LENGTH: Final = "Inference-Header-Content-Length"
_BINARY_SIZE, _BINARY = "binary_data_size", "binary_data"
#: The key of bytes in JSON, as TensorFlow Serving has it.
_BASE64: Final = "b64"
#: Python types of JSON elements by datatype. FP16 and BF16 are binary data only.
_ELEMENTS: Final[dict[str, set[type]]] = {
    "BOOL": {bool},
    "BYTES": {str},
    "FP32": {int, float},
    "FP64": {int, float},
    **{datatype: {int} for datatype, dtype in NUMPY_TYPES.items() if dtype.kind in "iu"},
}
_MAX_RANK = 8  # of inputs of bundles
_SHOWN_BYTES = 16  # of those that are not UTF-8
_MAX_DIGITS = 10
#: Elements that are written in two milliseconds or so.
_PART: Final = 4096


class Wanted(NamedTuple):
    """Outputs that a client wants as binary data: by name, and the default for others."""

    default: bool
    outputs: dict[str, bool]

    def binary(self, name: str) -> bool:
        """Return whether the client wants an output as binary data."""
        return self.outputs.get(name, self.default)


def infer_request(
    model: str, version: str, body: bytes, json_length: str | None
) -> tuple[pb.ModelInferRequest, Wanted]:
    """Return the message of a body, its tensors raw, and the encoding of the outputs.

    The inference service checks the message against the model's metadata. ``json_length`` is the value of the header
    :data:`JSON_LENGTH`; None if the whole body is JSON.
    """
    end = len(body) if json_length is None else _json_end(json_length, len(body))
    document = parse(body[:end])
    request = pb.ModelInferRequest(model_name=model, model_version=version, id=field(document, "id", str, default=""))
    parameters = field(document, "parameters", dict, default={})
    set_parameters(request.parameters, parameters, "the request")
    for item in _tensors(document, "inputs"):
        end = _add_input(request, checked(item, dict, "an input"), body, end)
    if end != len(body):
        given = Raw(f"{len(body) - end} bytes that belong to no input")
        expected = f"as many as the inputs' {_BINARY_SIZE} add up to"
        raise InvalidRequest("binary data", given=given, expected=expected, fix="Send each input's bytes, and no more.")
    wanted = Wanted(parameters.get("binary_data_output") is True, {})
    for item in _tensors(document, "outputs"):
        name = field(checked(item, dict, "an output"), "name", str, "an output")
        subject = f"output {name!r}"
        own = dict(field(item, "parameters", dict, subject, {}))
        if _BINARY in own:
            wanted.outputs[name] = checked(own.pop(_BINARY), bool, f"{_BINARY} of {subject}")
        set_parameters(request.outputs.add(name=name).parameters, own, subject)
    return request, wanted


def _tensors(document: dict[str, Any], name: str) -> list[Any]:
    tensors: list[Any] = field(document, name, list, default=[])
    check_number(name, len(tensors), MOST_TENSORS, "body")
    return tensors


def check_outputs(request: pb.ModelInferRequest, wanted: Wanted, metadata: pb.ModelMetadataResponse) -> None:
    """Check before the inference that every output can be sent as the client wants it."""
    requested = {output.name for output in request.outputs if not is_shared(output.parameters)}
    for output in metadata.outputs:
        named = output.name in requested if request.outputs else True
        if named and output.datatype not in _ELEMENTS and not wanted.binary(output.name):
            raise _binary_only(f"output {output.name!r}", output.datatype)


def all_binary(request: pb.ModelInferRequest, wanted: Wanted) -> bool:
    """Return whether the client wants every output as binary data."""
    if not request.outputs:
        return wanted.default
    return all(wanted.binary(output.name) or is_shared(output.parameters) for output in request.outputs)


def json_bytes(size: int, json_length: str | None) -> int:
    """Return how many bytes of a body of this size are read as JSON."""
    return size if json_length is None else _json_end(json_length, size)


def text_bytes(response: pb.ModelInferResponse, wanted: Wanted) -> int:
    """Return the bytes of the outputs that become JSON."""
    named = zip(response.outputs, response.raw_output_contents, strict=True)
    return sum(len(raw) for tensor, raw in named if not wanted.binary(tensor.name))


def infer_response(response: pb.ModelInferResponse, wanted: Wanted) -> tuple[bytes, int | None]:
    """Return the body of a response, and the number of its bytes of JSON; None if all are."""
    outputs: list[bytes] = []
    binary: list[bytes] = []
    for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        output: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
        data = None
        if is_shared(tensor.parameters):
            pass  # without parameters, which the stock client in C++ takes for a sign of binary data
        elif wanted.binary(tensor.name):
            output["parameters"] = {_BINARY_SIZE: len(raw)}
            binary.append(raw)
        else:
            data = _data(raw, tensor.datatype, tuple(tensor.shape), f"output {tensor.name!r}")
        outputs.append(encode(output) if data is None else b'%b,"data":%b}' % (encode(output)[:-1], data))
    document: dict[str, Any] = {"model_name": response.model_name, "model_version": response.model_version}
    if response.id:
        document["id"] = response.id
    if response.parameters:
        document["parameters"] = values_of(response.parameters)
    text = b'%b,"outputs":[%b]}' % (encode(document)[:-1], b",".join(outputs))
    return (b"".join([text, *binary]), len(text)) if binary else (text, None)


def _json_end(json_length: str, size: int) -> int:
    known = json_length.isascii() and json_length.isdecimal() and len(json_length) <= _MAX_DIGITS
    if not known or int(json_length) > size:
        expected = f"at most the {size} bytes of the body"
        raise InvalidRequest(JSON_LENGTH, given=json_length, expected=expected, fix="Send the length of the JSON.")
    return int(json_length)


def _add_input(request: pb.ModelInferRequest, item: dict[str, Any], body: bytes, start: int) -> int:
    """Add an input to the request, and return the offset of the next input's binary data in the body."""
    name = field(item, "name", str, "an input")
    subject = f"input {name!r}"
    shape = [whole(size, INT64, f"shape of {subject}") for size in field(item, "shape", list, subject)]
    tensor = request.inputs.add(name=name, datatype=field(item, "datatype", str, subject), shape=shape)
    parameters = dict(field(item, "parameters", dict, subject, {}))
    size = parameters.pop(_BINARY_SIZE, None)
    set_parameters(tensor.parameters, parameters, subject)
    shared = is_shared(tensor.parameters)
    ways = {"data": "data" in item, _BINARY_SIZE: size is not None, "shared memory": shared}
    found = [way for way, there in ways.items() if there]
    if len(found) != 1:
        given = Raw(" and ".join(found) or "no contents")
        fix = "Send it in one of these ways."
        raise InvalidRequest(subject, given=given, expected=f"one of {', '.join(ways)}", fix=fix)
    if shared:
        return start
    if size is None:
        data = field(item, "data", list, subject)
        request.raw_input_contents.append(_raw(data, tensor.datatype, tuple(shape), subject))
        return start
    end = start + whole(size, INT64, f"{_BINARY_SIZE} of {subject}")
    if not start <= end <= len(body):
        expected = f"0 to the {len(body) - start} bytes that are left"
        fix = f"Send the JSON's length in {JSON_LENGTH}, and each input's bytes behind it."
        raise InvalidRequest(f"{_BINARY_SIZE} of {subject}", given=size, expected=expected, fix=fix)
    request.raw_input_contents.append(body[start:end])
    return end


def _raw(data: list[Any], datatype: str, shape: tuple[int, ...], subject: str) -> bytes:
    """Return a tensor of JSON as raw contents; empty for an invalid datatype or shape, which the model reports."""
    if datatype not in NUMPY_TYPES or len(shape) > _MAX_RANK or any(size < 1 for size in shape):
        return b""
    if datatype not in _ELEMENTS:
        raise _binary_only(subject, datatype)
    elements = _flat(data, shape, subject)
    if datatype == "BYTES":
        elements = [_from_base64(element, subject) if type(element) is dict else element for element in elements]
    wrong = set(map(type, elements)) - _ELEMENTS[datatype] - {bytes}
    if wrong:
        given = Raw(" and ".join(sorted(kind_of(kind()) for kind in wrong)))
        expected = " or ".join(sorted(kind_of(kind()) for kind in _ELEMENTS[datatype]))
        fix = f"Send what {datatype} can hold."
        raise InvalidRequest(f"an element of {subject}", given=given, expected=expected, fix=fix)
    return to_raw(_array(elements, datatype, subject), datatype)


def _from_base64(element: dict[str, Any], subject: str) -> bytes:
    """Return the bytes of an element ``{"b64": "…"}``, for those that are not text."""
    own, fix = f"an element of {subject}", f'Send {{"{_BASE64}": "…"}}, a string, or binary data.'
    if element.keys() != {_BASE64} or type(element[_BASE64]) is not str:
        given = Raw(f"an object with {sorted(element)}")
        raise InvalidRequest(own, given=given, expected=f"a string under {_BASE64!r} alone", fix=fix)
    try:
        return base64.b64decode(element[_BASE64], validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(own, given=Raw(error), expected="base64", fix=fix) from None


def _flat(data: list[Any], shape: tuple[int, ...], subject: str) -> list[Any]:
    """Return the elements of a list that is flat, or nested like the shape."""
    if not data or type(data[0]) is not list:
        if len(data) != prod(shape):
            given, expected = Raw(f"{len(data)} elements"), f"{prod(shape)} for shape {list(shape)}"
            raise InvalidRequest(subject, given=given, expected=expected, fix="Send as many as the shape says.")
        return data
    rows: Iterable[Any] = [data]
    for size in shape:
        for row in rows:
            if type(row) is not list or len(row) != size:
                given = Raw(f"a list of {len(row)}" if type(row) is list else kind_of(row))
                expected = f"a list of {size} there: lists nested as {list(shape)}, or a flat one"
                raise InvalidRequest(subject, given=given, expected=expected, fix="Send as many as the shape says.")
        rows = list(chain.from_iterable(rows))
    return list(rows)


def _array(elements: list[Any], datatype: str, subject: str) -> Array:
    dtype = NUMPY_TYPES[datatype]
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        least, most = min(elements), max(elements)
        if least < limits.min or most > limits.max:
            raise _too_large(least if least < limits.min else most, datatype, limits.min, limits.max, subject)
    elif dtype.kind == "f":
        largest = float(np.finfo(dtype).max)
        try:
            doubles: Array = np.array(elements, np.float64)
        except OverflowError:
            raise _too_large(max(elements, key=abs), datatype, -largest, largest, subject) from None
        # An infinite element is intended; an element that only becomes infinite is not.
        outside = doubles[(np.abs(doubles) > largest) & np.isfinite(doubles)]
        if outside.size:
            raise _too_large(float(outside[0]), datatype, -largest, largest, subject)
        return doubles.astype(dtype)
    return np.array(elements, dtype)


def _too_large(given: float, datatype: str, least: float, most: float, subject: str) -> InvalidRequest:
    expected = f"{datatype} values from {least} to {most}"
    return InvalidRequest(f"an element of {subject}", given=given, expected=expected, fix="Send values that fit.")


def _data(raw: bytes, datatype: str, shape: tuple[int, ...], subject: str) -> bytes:
    """Return a tensor as a flat list of JSON."""
    fix = f"Request it with {_BINARY} true."
    if len(raw) > MAX_JSON_BYTES:
        given, expected = Raw(f"{len(raw)} bytes as JSON"), f"at most {MAX_JSON_BYTES}"
        raise InvalidRequest(subject, given=given, expected=expected, fix=fix)
    elements = from_raw(raw, datatype, shape, subject).ravel()
    parts = (elements[start : start + _PART].tolist() for start in range(0, elements.size, _PART))
    if datatype != "BYTES":
        return encode_parts(parts)
    try:
        return encode_parts([element.decode() for element in part] for part in parts)
    except UnicodeDecodeError as error:
        wrong = error.object[error.start : error.start + _SHOWN_BYTES]
        raise InvalidRequest(f"{subject} as JSON", given=wrong, expected="UTF-8", fix=fix) from None


def _binary_only(subject: str, datatype: str) -> InvalidRequest:
    fix = f"Send inputs with {_BINARY_SIZE}, and request outputs with {_BINARY} true."
    return InvalidRequest(subject, given=Raw(f"{datatype} as JSON"), expected="binary data", fix=fix)
