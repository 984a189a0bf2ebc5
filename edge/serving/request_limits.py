"""Limits of a request's own parts, which no model sets: checked before anything is built, quoted or looked up."""

from __future__ import annotations

from typing import Final

import numpy as np

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
_VARINT, _LENGTH_DELIMITED = 0, 2
#: Bytes of a field by its wire type. The fields of a group count as those around it.
_FIXED_BYTES: Final = {1: 8, 3: 0, 4: 0, 5: 4}
#: Fields of a ModelInferRequest, of an input in it, and of the typed contents of that.
_INPUTS, _SHAPE, _CONTENTS, _VARINTS = 5, 3, 5, range(1, 6)
_ENTERED: Final = {_INPUTS, _SHAPE, _CONTENTS, *_VARINTS}


def check_number(what: str, given: int, most: int, subject: str) -> None:
    """Raise an InvalidRequest if something has more parts of a kind than it may."""
    if given > most:
        fix = "Send those that the server reads, and no others."
        raise InvalidRequest(f"{what} of {subject}", given=Raw(f"{given}"), expected=f"at most {most}", fix=fix)


def check_names(request: pb.ModelInferRequest) -> None:
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
    """Raise an InvalidRequest for a serialized ModelInferRequest of far more parts than a request has.

    A parser makes objects of all of them, in seconds for a message of 60 MiB, before any limit of a model applies. No
    message up to SMALL_BYTES has so many. What is no protobuf passes: the parser says so.
    """
    _Parts(data).count(0, len(data), ())


class _Parts:
    """Counts the parts of a message, without making any object of them."""

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
