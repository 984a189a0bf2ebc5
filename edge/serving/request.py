"""A request to infer, whatever its encoding, and the limits of its parts, which apply before anything is quoted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from edge.datatypes import Array
from edge.errors import InvalidRequest, Raw
from edge.pb import inference_pb2 as pb

#: Of a request, of an input, and of an output. Each unknown name is compared with all known ones.
MOST_PARAMETERS: Final = 64
#: Of a request over HTTP; a bundle has at most 16 of each, and those of a preprocess step.
MOST_TENSORS: Final = 64
#: Of a request's id, and of the names in it.
MOST_NAME_CHARS: Final = 1024
#: Smaller messages are parsed in a few milliseconds, whatever they hold.
SMALL_BYTES: Final = 64 * 1024
#: Inputs, outputs, parameters and raw contents of a request, texts of typed contents, and bytes of shapes. A parser
#: makes up to 90 bytes of each, which may have 2 in the message.
_MOST_PARTS: Final = 16 * 1024
#: Numbers that typed contents may hold: a parser makes 8 bytes of each, which may have one in the message.
_MOST_NUMBERS: Final = 8 * 1024**2
_KINDS: Final = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
_VARINT, _LENGTH_DELIMITED = 0, 2
#: Bytes of a field by its wire type. The fields of a group count as those around it.
_FIXED_BYTES: Final = {1: 8, 3: 0, 4: 0, 5: 4}
#: Fields of a ModelInferRequest, of an input in it, and of the typed contents of that.
_INPUTS, _SHAPE, _CONTENTS, _VARINTS = 5, 3, 5, range(1, 6)
#: Fields that are never large, by path: a parser copies each of them more than once.
_SMALL: Final = {
    (1,): "model_name",
    (2,): "model_version",
    (3,): "id of the request",
    (4,): "parameter of the request",
    (6,): "requested output",
    (_INPUTS, 1): "input name",
    (_INPUTS, 2): "input datatype",
    (_INPUTS, 4): "parameter of an input",
}
_ENTERED: Final = {_INPUTS, _SHAPE, _CONTENTS, *_VARINTS, *(path[-1] for path in _SMALL)}
#: Values of parameters by name; None where the client sets no value.
Values = Mapping[str, bool | int | float | str | None]


class InputTensor(NamedTuple):
    """An input as the client declares it; its contents are typed, decoded, or raw. Others are beside the request."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    parameters: Values
    contents: pb.InferTensorContents | Array | bytes | None


class RequestedOutput(NamedTuple):
    """An output that the client names."""

    name: str
    parameters: Values


class UncheckedRequest(NamedTuple):
    """A request to infer. It is not validated; ``inputs`` can be read once.

    If all inputs are raw, they may be in ``contents`` alone; ``key`` then holds everything else but the id. Inputs may
    hold texts from ``json_bytes`` of JSON.
    """

    model_name: str
    model_version: str
    id: str
    parameters: Values
    inputs: Iterable[InputTensor]
    outputs: Sequence[RequestedOutput]
    contents: Sequence[bytes] = ()
    key: bytes = b""
    json_bytes: int = 0


def request_of(message: pb.ModelInferRequest) -> UncheckedRequest:
    """Return the request in a message; raise an InvalidRequest for too many parameters."""
    return UncheckedRequest(
        message.model_name,
        message.model_version,
        message.id,
        _values(message.parameters, "the request"),
        (
            InputTensor(
                tensor.name,
                tensor.datatype,
                tuple(tensor.shape),
                _values(tensor.parameters, f"input {tensor.name!r}") if tensor.parameters else {},
                tensor.contents if tensor.HasField("contents") else None,
            )
            for tensor in message.inputs
        ),
        [
            RequestedOutput(output.name, _values(output.parameters, f"output {output.name!r}"))
            for output in message.outputs
        ],
    )


def _values(parameters: Mapping[str, pb.InferParameter], subject: str) -> Values:
    check_number("parameters", len(parameters), MOST_PARAMETERS, subject)
    kinds = {name: parameter.WhichOneof("parameter_choice") for name, parameter in parameters.items()}
    return {name: kind and getattr(parameters[name], kind) for name, kind in kinds.items()}


def check_number(what: str, given: int, most: int, subject: str) -> None:
    """Raise an InvalidRequest if something has more parts of a kind than it may."""
    if given > most:
        fix = "Send those that the server reads, and no others."
        raise InvalidRequest(f"{what} of {subject}", given=Raw(f"{given}"), expected=f"at most {most}", fix=fix)


def parameter_kind(value: object) -> str | None:
    """Return the field of a message's parameter for a value; None without a value."""
    return "uint64_param" if type(value) is int and value >= 2**63 else _KINDS.get(type(value))


def check_names(request: Any) -> None:
    """Raise an InvalidRequest for an id, or a name or version of a model, that is too long to be one."""
    check_name("id of the request", request.id)
    check_name("model_name", request.model_name)
    check_name("model_version", request.model_version)


def check_name(subject: str, name: str) -> None:
    """Raise an InvalidRequest for a name that is too long to be one, before it is quoted or looked up."""
    if len(name) > MOST_NAME_CHARS:
        given, fix = Raw(f"{len(name)} characters"), "Send a shorter one."
        raise InvalidRequest(subject, given=given, expected=f"at most {MOST_NAME_CHARS}", fix=fix)


def check_message(data: bytes) -> None:
    """Raise an InvalidRequest for a serialized ModelInferRequest with far more or longer parts than a request has.

    A parser would make objects of all of them, in seconds for 60 MiB, before any limit of a model applies. No message
    up to SMALL_BYTES has such parts. What is no protobuf passes.
    """
    _PartCounter(data).count(0, len(data), ())


class _PartCounter:
    """Counts the parts of a message and checks their sizes, without making any object of them."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._parts = self._numbers = 0

    def count(self, at: int, end: int, path: tuple[int, ...]) -> None:
        """Count the fields of the message between two offsets, which is the field ``path`` of the request."""
        data = self._data
        while at < end:
            self._add(1)
            tag, length = data[at], data[at + 1] if at + 1 < end else 0
            if tag < 0x80 and tag & 7 == _LENGTH_DELIMITED and length < 0x80:  # most of a message of many parts
                at += 2
            else:
                tag, at = self._varint(at, end)
                if tag & 7 == _LENGTH_DELIMITED:
                    length, at = self._varint(at, end)
                elif tag & 7 == _VARINT:
                    length, at = 0, self._varint(at, end)[1]
                elif tag & 7 in _FIXED_BYTES:
                    length = _FIXED_BYTES[tag & 7]
                else:
                    return  # nothing that a parser can read
            if at + length > end:
                return
            if tag & 7 == _LENGTH_DELIMITED and length and (number := tag >> 3) in _ENTERED:
                self._enter(at, at + length, (*path, number))
            at += length

    def _enter(self, start: int, end: int, path: tuple[int, ...]) -> None:
        if path in ((_INPUTS,), (_INPUTS, _CONTENTS)):
            self.count(start, end, path)
        elif path == (_INPUTS, _SHAPE):
            self._add(end - start)
        elif path[:-1] == (_INPUTS, _CONTENTS) and path[-1] in _VARINTS and end - start > SMALL_BYTES:
            last_bytes = np.frombuffer(self._data, np.uint8, end - start, start) < 0x80
            self._numbers += int(np.count_nonzero(last_bytes))
            if self._numbers > _MOST_NUMBERS:
                raise _refused(f"more than {_MOST_NUMBERS} typed numbers", f"at most {_MOST_NUMBERS}")
        elif (subject := _SMALL.get(path)) and end - start > SMALL_BYTES:
            given, expected = Raw(f"{end - start} bytes"), f"at most {SMALL_BYTES}"
            raise InvalidRequest(subject, given=given, expected=expected, fix="Send a shorter one.")

    def _add(self, parts: int) -> None:
        self._parts += parts
        if self._parts > _MOST_PARTS:
            raise _refused(f"more than {_MOST_PARTS} fields", f"at most {_MOST_PARTS}")

    def _varint(self, at: int, end: int) -> tuple[int, int]:
        """Return a varint and the offset behind it, which is past ``end`` if it does not end before."""
        value = shift = 0
        while at < end:
            byte = self._data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value, at
            shift += 7
            if shift > 63:
                break
        return 0, end + 1


def _refused(given: str, expected: str) -> InvalidRequest:
    fix = "Send fewer of them at once, and large tensors as raw contents."
    return InvalidRequest("request message", given=Raw(given), expected=expected, fix=fix)
