"""Parsing and encoding of JSON; everything of another form or type, or out of range, raises InvalidRequest."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeVar

from google.protobuf.message import Message

from edge.errors import InvalidRequest, Raw

T = TypeVar("T")

#: More JSON than this is refused: the parser keeps other threads from running for up to a tenth of a second.
MAX_JSON_BYTES: Final = 4 * 1024**2
#: As much JSON is read in two milliseconds or so.
INLINE_JSON_BYTES: Final = 64 * 1024
#: Of lists and objects: each costs a hundred times the time of a digit.
_MOST_NESTED: Final = 64 * 1024
_STRING_OR_BEGINNING: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[{]', re.DOTALL)
_QUOTE: Final = ord('"')
#: Names of the types of JSON. A bool is not a number here, although it is an int in Python.
_KINDS: Final[dict[type, str]] = {
    dict: "an object",
    list: "a list",
    str: "a string",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    type(None): "null",
}
INT64: Final = (-(2**63), 2**63 - 1)
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_NO_DEFAULT: Final = object()


def parse(data: bytes) -> dict[str, Any]:
    """Return the object in a body; an empty body is an empty object.

    As in Triton, ``NaN``, ``Infinity`` and ``-Infinity`` are numbers.
    """
    if len(data) > MAX_JSON_BYTES:
        given, expected = Raw(f"{len(data)} bytes"), f"at most {MAX_JSON_BYTES}"
        fix = "Send tensors as binary data behind the JSON."
        raise InvalidRequest("JSON", given=given, expected=expected, fix=fix)
    if not data:
        return {}
    if data.count(b"[") + data.count(b"{") > _MOST_NESTED:
        _check_nesting(data)
    try:
        text = data.decode()
        value = _DECODER.decode(text)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()  # fails on an unpaired surrogate
    except UnicodeError:
        raise _not_json("text that is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise _not_json(f"a syntax error at line {error.lineno}, column {error.colno}") from None
    except ValueError:
        raise _not_json("a number of thousands of digits") from None
    except RecursionError:
        raise _not_json("lists and objects nested too deeply") from None
    return checked(value, dict, "body")


def encode(value: object) -> bytes:
    """Return JSON, in which numbers may be ``NaN``, ``Infinity`` or ``-Infinity``, as in Triton."""
    return _ENCODER.encode(value).encode()


def encode_parts(parts: Iterable[list[Any]]) -> bytes:
    """Return the JSON of the list that these parts make up; between two of them other threads take their turn."""
    return b"[" + b",".join([encode(part)[1:-1] for part in parts]) + b"]"


def checked(value: Any, kind: type[T], subject: str) -> T:
    """Return a value of this type."""
    if type(value) is not kind:
        given = Raw(kind_of(value))  # not the value, whose nesting could be too deep for repr()
        raise InvalidRequest(subject, given=given, expected=_KINDS[kind], fix="Send it as the protocol says.")
    return value


def kind_of(value: object) -> str:
    """Return the name of a value's type in JSON."""
    return _KINDS[type(value)]


def field(
    document: Mapping[str, Any], name: str, kind: type[T], subject: str = "body", default: Any = _NO_DEFAULT
) -> T:
    """Return a field of an object."""
    if name in document:
        return checked(document[name], kind, f"{name} of {subject}")
    if default is _NO_DEFAULT:
        fix = "Add it, as the protocol says."
        raise InvalidRequest(f"{name} of {subject}", given=Raw("nothing"), expected=_KINDS[kind], fix=fix)
    return default  # type: ignore[no-any-return]


def whole(value: Any, limits: tuple[int, int], subject: str) -> int:
    """Return a whole number within limits."""
    number = checked(value, int, subject)
    if not limits[0] <= number <= limits[1]:
        expected = f"{limits[0]} to {limits[1]}"
        raise InvalidRequest(subject, given=number, expected=expected, fix="Send a number within these limits.")
    return number


def plain(message: Message) -> dict[str, Any]:
    """Return a message for JSON, with the names of the ``.proto``, numbers for 64-bit integers, and empty fields."""
    result: dict[str, Any] = {}
    for descriptor in message.DESCRIPTOR.fields:
        value = getattr(message, descriptor.name)
        if descriptor.message_type and descriptor.message_type.GetOptions().map_entry:
            inner = descriptor.message_type.fields_by_name["value"]
            result[descriptor.name] = {key: _plain(value[key], inner) for key in value}
        elif descriptor.is_repeated:
            result[descriptor.name] = [_plain(one, descriptor) for one in value]
        elif not descriptor.has_presence or message.HasField(descriptor.name):
            result[descriptor.name] = _plain(value, descriptor)
    return result


def _plain(value: Any, descriptor: Any) -> Any:
    if descriptor.message_type:
        return plain(value)
    return descriptor.enum_type.values_by_number[value].name if descriptor.enum_type else value


def _check_nesting(data: bytes) -> None:
    """Refuse too many lists and objects; brackets in strings do not count."""
    nested = 0
    for match in _STRING_OR_BEGINNING.finditer(data):
        nested += data[match.start()] != _QUOTE
        if nested > _MOST_NESTED:
            given, fix = Raw(f"more than {_MOST_NESTED} lists and objects"), "Send flat lists, or binary data."
            raise InvalidRequest("JSON", given=given, expected=f"at most {_MOST_NESTED}", fix=fix)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        name = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise InvalidRequest("JSON", given=Raw(f"{name!r} twice"), expected="each name once", fix="Remove one of them.")
    return found


def _not_json(given: str) -> InvalidRequest:
    fix = "Send JSON, and tensors as binary data behind it only with Inference-Header-Content-Length."
    return InvalidRequest("JSON", given=Raw(given), expected="JSON in UTF-8", fix=fix)


_DECODER = json.JSONDecoder(object_pairs_hook=_object)
