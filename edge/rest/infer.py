"""ModelInfer over HTTP: bodies with tensors as JSON, or as binary data behind it. What is large is read on threads."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from itertools import chain
from math import prod
from typing import Any, Final

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from edge.datatypes import NUMPY_TYPES, Array, datatype_of
from edge.errors import InvalidRequest, Raw
from edge.rest.endpoint import Endpoints, unless_gone
from edge.rest.json_messages import (
    INLINE_JSON_BYTES,
    INT64,
    MAX_JSON_BYTES,
    checked,
    encode,
    encode_parts,
    field,
    kind_of,
    parameters_of,
    parse,
    whole,
)
from edge.scheduling.batching import byte_size
from edge.scheduling.job import JobResult
from edge.serving.call import Encoder, InferResponse
from edge.serving.forms import Form
from edge.serving.inference import InferenceService
from edge.serving.request import MOST_TENSORS, InputTensor, RequestedOutput, UncheckedRequest, check_number
from edge.serving.shared_memory import is_shared
from edge.serving.wire import to_raw

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
#: Tensors up to this size are written as JSON in two milliseconds.
_INLINE_TENSOR_BYTES: Final = 16 * 1024


class InferEndpoint:
    """Answers requests to infer."""

    def __init__(self, service: InferenceService, endpoints: Endpoints) -> None:
        self._service, self._endpoints = service, endpoints

    async def infer(self, request: Request) -> Response:
        # No variable here has the body, of which the message holds what it needs.
        return await unless_gone(request, self._answer(request, await self._endpoints.body(request)))

    async def _answer(self, request: Request, body: bytes) -> Response:
        path, json_length = request.path_params, request.headers.get(JSON_LENGTH)
        end = len(body) if json_length is None else _json_end(json_length, len(body))
        read = partial(infer_request, path["model"], path.get("version", ""), body, end)
        read_inline = end <= INLINE_JSON_BYTES
        message, encoder = read() if read_inline else await self._service.threads.run(len(body), read)
        del body, read  # the message has what it needs
        content, length = await self._service.infer(message, None, encoder)
        if length is None:
            return Response(content, media_type="application/json")
        return Response(content, headers={JSON_LENGTH: str(length)}, media_type="application/octet-stream")


class BodyEncoder(Encoder):
    """Encodes responses as bodies; ``default`` says whether outputs are binary data, ``outputs`` the same by name."""

    def __init__(self, default: bool, outputs: Mapping[str, bool]) -> None:
        self._default, self._outputs = default, outputs

    def check(self, form: Form, regions: Collection[str]) -> None:
        """Raise an InvalidRequest for an output that JSON cannot hold, and that is not sent in another way."""
        for name in form.output_names:
            datatype, elsewhere = form.model.outputs[name].datatype, name in regions or name in form.classes
            if datatype not in _ELEMENTS and not elsewhere and not self._binary(name):
                raise _binary_only(f"output {name!r}", datatype)

    def slow(self, form: Form, answer: JobResult) -> bool:
        if super().slow(form, answer):
            return True
        outputs, derived = answer.outputs, form.model.derived
        names = [name for name in form.output_names if not self._binary(name)]
        sources = {name: derived[name].reads if name in derived else name for name in names}
        written = {name: outputs[source] for name, source in sources.items() if source in outputs}  # others are short
        return byte_size(written) > _INLINE_TENSOR_BYTES

    def encode(self, response: InferResponse) -> tuple[bytes, int | None]:
        """Return the body, and the number of its bytes of JSON; None if all are."""
        outputs: list[bytes] = []
        binary: list[bytes] = []
        for name, array in response.outputs.items():
            datatype = datatype_of(array)
            output: dict[str, Any] = {"name": name, "datatype": datatype, "shape": array.shape}
            data = None
            if region := response.regions.get(name):
                region.write(to_raw(array, datatype))
                # Without parameters, which the stock client in C++ takes for a sign of binary data.
            elif self._binary(name):
                binary.append(to_raw(array, datatype))
                output["parameters"] = {_BINARY_SIZE: len(binary[-1])}
            else:
                data = _data(array, datatype, f"output {name!r}")
            outputs.append(encode(output) if data is None else b'%b,"data":%b}' % (encode(output)[:-1], data))
        document: dict[str, Any] = {"model_name": response.model.name, "model_version": response.model.version}
        if response.id:
            document["id"] = response.id
        if parameters := response.parameters():
            document["parameters"] = parameters
        text = b'%b,"outputs":[%b]}' % (encode(document)[:-1], b",".join(outputs))
        return (b"".join([text, *binary]), len(text)) if binary else (text, None)

    def _binary(self, name: str) -> bool:
        return self._outputs.get(name, self._default)


def infer_request(model: str, version: str, body: bytes, end: int) -> tuple[UncheckedRequest, BodyEncoder]:
    """Return the unchecked request in a body, whose JSON ends at ``end``, and the encoding of its response."""
    document, written = parse(body[:end]), body[:end]
    parameters = field(document, "parameters", dict, default={})
    values = parameters_of(parameters, "the request")
    inputs = []
    for item in _tensors(document, "inputs"):
        tensor, end = _input(checked(item, dict, "an input"), body, end)
        inputs.append(tensor)
    if end != len(body):
        given = Raw(f"{len(body) - end} bytes that belong to no input")
        expected = f"as many as the inputs' {_BINARY_SIZE} add up to"
        raise InvalidRequest("binary data", given=given, expected=expected, fix="Send each input's bytes, and no more.")
    outputs, binary = [], {}
    for item in _tensors(document, "outputs"):
        name = field(checked(item, dict, "an output"), "name", str, "an output")
        subject = f"output {name!r}"
        settings = dict(field(item, "parameters", dict, subject, {}))
        if _BINARY in settings:
            binary[name] = checked(settings.pop(_BINARY), bool, f"{_BINARY} of {subject}")
        outputs.append(RequestedOutput(name, parameters_of(settings, subject)))
    request = UncheckedRequest(model, version, field(document, "id", str, default=""), values, inputs, outputs)
    request = request._replace(json_bytes=len(written))
    raw = [tensor.contents for tensor in inputs if isinstance(tensor.contents, bytes)]
    if len(raw) == len(inputs) and not request.id:  # no key of a message begins so
        key = b"\xff%b\0%b\0%b" % (model.encode(), version.encode(), written)
        inputs = [tensor._replace(contents=None) for tensor in inputs]
        request = request._replace(inputs=inputs, contents=raw, key=key, json_bytes=0)
    return request, BodyEncoder(parameters.get("binary_data_output") is True, binary)


def _tensors(document: dict[str, Any], name: str) -> list[Any]:
    tensors: list[Any] = field(document, name, list, default=[])
    check_number(name, len(tensors), MOST_TENSORS, "body")
    return tensors


def _json_end(json_length: str, size: int) -> int:
    known = json_length.isascii() and json_length.isdecimal() and len(json_length) <= _MAX_DIGITS
    if not known or int(json_length) > size:
        expected = f"at most the {size} bytes of the body"
        raise InvalidRequest(JSON_LENGTH, given=json_length, expected=expected, fix="Send the length of the JSON.")
    return int(json_length)


def _input(item: dict[str, Any], body: bytes, start: int) -> tuple[InputTensor, int]:
    """Return an input, and the offset of the next input's binary data in the body."""
    name = field(item, "name", str, "an input")
    subject = f"input {name!r}"
    shape = tuple([whole(size, INT64, f"shape of {subject}") for size in field(item, "shape", list, subject)])
    datatype = field(item, "datatype", str, subject)
    settings = dict(field(item, "parameters", dict, subject, {}))
    size = settings.pop(_BINARY_SIZE, None)
    parameters = parameters_of(settings, subject)
    shared = is_shared(parameters)
    ways = {"data": "data" in item, _BINARY_SIZE: size is not None, "shared memory": shared}
    sent = [way for way, there in ways.items() if there]
    if len(sent) != 1:
        given = Raw(" and ".join(sent) or "no contents")
        fix = "Send it in one of these ways."
        raise InvalidRequest(subject, given=given, expected=f"one of {', '.join(ways)}", fix=fix)
    contents: Array | bytes | None = None
    end = start
    if "data" in item:
        contents = _array_of(field(item, "data", list, subject), datatype, shape, subject)
    elif size is not None:
        end = start + whole(size, INT64, f"{_BINARY_SIZE} of {subject}")
        if not start <= end <= len(body):
            expected = f"0 to the {len(body) - start} bytes that are left"
            fix = f"Send the JSON's length in {JSON_LENGTH}, and each input's bytes behind it."
            raise InvalidRequest(f"{_BINARY_SIZE} of {subject}", given=size, expected=expected, fix=fix)
        contents = body[start:end]
    return InputTensor(name, datatype, shape, parameters, contents), end


def _array_of(data: list[Any], datatype: str, shape: tuple[int, ...], subject: str) -> Array | None:
    """Return a tensor of JSON; None for an invalid datatype or shape, which the model reports."""
    if datatype not in NUMPY_TYPES or len(shape) > _MAX_RANK or any(size < 1 for size in shape):
        return None
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
    return _array(elements, datatype, subject).reshape(shape)


def _from_base64(element: dict[str, Any], subject: str) -> bytes:
    """Return the bytes of an element ``{"b64": "…"}``, for those that are not text."""
    element_subject, fix = f"an element of {subject}", f'Send {{"{_BASE64}": "…"}}, a string, or binary data.'
    if element.keys() != {_BASE64} or type(element[_BASE64]) is not str:
        given = Raw(f"an object with {sorted(element)}")
        raise InvalidRequest(element_subject, given=given, expected=f"a string under {_BASE64!r} alone", fix=fix)
    try:
        return base64.b64decode(element[_BASE64], validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(element_subject, given=Raw(error), expected="base64", fix=fix) from None


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
    elif datatype == "BYTES":
        elements = [element.encode() if isinstance(element, str) else element for element in elements]
        array = np.empty(len(elements), np.object_)
        array[:] = elements
        return array
    return np.array(elements, dtype)


def _too_large(given: float, datatype: str, least: float, most: float, subject: str) -> InvalidRequest:
    expected = f"{datatype} values from {least} to {most}"
    return InvalidRequest(f"an element of {subject}", given=given, expected=expected, fix="Send values that fit.")


def _data(array: Array, datatype: str, subject: str) -> bytes:
    fix = f"Request it with {_BINARY} true."
    size_bytes = array.nbytes if datatype != "BYTES" else sum(len(text) + 4 for text in array.ravel().tolist())
    if size_bytes > MAX_JSON_BYTES:
        given, expected = Raw(f"{size_bytes} bytes as JSON"), f"at most {MAX_JSON_BYTES}"
        raise InvalidRequest(subject, given=given, expected=expected, fix=fix)
    elements = array.ravel()
    parts = (elements[start : start + _PART].tolist() for start in range(0, elements.size, _PART))
    if datatype != "BYTES":
        return encode_parts(parts)
    try:
        return encode_parts([text if isinstance(text, str) else text.decode() for text in part] for part in parts)
    except UnicodeDecodeError as error:
        wrong = error.object[error.start : error.start + _SHOWN_BYTES]
        raise InvalidRequest(f"{subject} as JSON", given=wrong, expected="UTF-8", fix=fix) from None


def _binary_only(subject: str, datatype: str) -> InvalidRequest:
    fix = f"Send inputs with {_BINARY_SIZE}, and request outputs with {_BINARY} true."
    return InvalidRequest(subject, given=Raw(f"{datatype} as JSON"), expected="binary data", fix=fix)
