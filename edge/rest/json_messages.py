"""Conversion between JSON and the protocol's small messages.

Whatever is missing, of another form or type, or out of range raises InvalidRequest.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final, TypeVar

from google.protobuf.message import Message

from edge.errors import InvalidRequest, Raw
from edge.pb import inference_pb2 as pb
from edge.serving.request import MOST_PARAMETERS, check_number

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
_UINT64: Final = (0, 2**64 - 1)
_UINT32: Final = (0, 2**32 - 1)
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


def given_fields(document: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Return the fields of a body that are not null; an InvalidRequest refuses an unknown one."""
    given = {name: value for name, value in document.items() if value is not None}
    for name in given.keys() - set(known):
        expected, fix = f"one of: {', '.join(known)}", "Correct or remove it."
        raise InvalidRequest("field of body", given=name, expected=expected, fix=fix)
    return given


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
            result[descriptor.name] = [_plain(element, descriptor) for element in value]
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
    document = dict(pairs)
    if len(document) != len(pairs):
        name = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise InvalidRequest("JSON", given=Raw(f"{name!r} twice"), expected="each name once", fix="Remove one of them.")
    return document


def _not_json(given: str) -> InvalidRequest:
    fix = "Send JSON, and tensors as binary data behind it only with Inference-Header-Content-Length."
    return InvalidRequest("JSON", given=Raw(given), expected="JSON in UTF-8", fix=fix)


def parameters_of(document: Mapping[str, Any], subject: str) -> dict[str, Any]:
    """Return the parameters of a request or a tensor: strings, numbers of up to 64 bits, and bools."""
    check_number("parameters", len(document), MOST_PARAMETERS, subject)
    for name, value in document.items():
        parameter = f"parameter {name!r} of {subject}"
        if type(value) is int:
            whole(value, _UINT64 if value > INT64[1] else INT64, parameter)
        elif type(value) not in (bool, str, float):
            given, fix = Raw(kind_of(value)), "Leave it out, or give it a value."
            raise InvalidRequest(parameter, given=given, expected="a string, a number, true or false", fix=fix)
    return dict(document)


def _set(parameter: Any, value: Any, integers: str, limits: tuple[int, int], subject: str) -> None:
    """Set the field of a parameter for a bool, a string, or else a whole number within limits."""
    if type(value) is bool:
        parameter.bool_param = value
    elif type(value) is str:
        parameter.string_param = value
    else:
        setattr(parameter, integers, whole(value, limits, subject))


def values_of(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters of a response or a tensor, or settings of the log, for JSON."""
    return {name: getattr(value, str(value.WhichOneof("parameter_choice"))) for name, value in parameters.items()}


def load_parameters(document: Mapping[str, Any]) -> dict[str, pb.ModelRepositoryParameter]:
    """Return the parameters of a load or unload request."""
    parameters: dict[str, pb.ModelRepositoryParameter] = {}
    for name, value in field(document, "parameters", dict, default={}).items():
        parameters[name] = pb.ModelRepositoryParameter()
        _set(parameters[name], value, "int64_param", INT64, f"parameter {name!r}")
    return parameters


def region(name: str, document: Mapping[str, Any]) -> pb.SystemSharedMemoryRegisterRequest:
    """Return the request to register a region of shared memory."""
    return pb.SystemSharedMemoryRegisterRequest(
        name=name,
        key=field(document, "key", str),
        offset=whole(document.get("offset", 0), _UINT64, "offset of body"),
        byte_size=whole(field(document, "byte_size", int), _UINT64, "byte_size of body"),
    )


def log_settings(document: Mapping[str, Any]) -> pb.LogSettingsRequest:
    """Return the request to change settings of the log."""
    request = pb.LogSettingsRequest()
    for name, value in document.items():
        _set(request.settings[name], value, "uint32_param", _UINT32, f"log setting {name!r}")
    return request


def trace_setting(model: str, document: Mapping[str, Any]) -> pb.TraceSettingRequest:
    """Return the request to change trace settings; null clears one."""
    request = pb.TraceSettingRequest(model_name=model)
    for name, value in document.items():
        values = value if type(value) is list else [] if value is None else [value]
        request.settings[name].value.extend(checked(text, str, f"trace setting {name!r}") for text in values)
    return request


def trace_of(response: pb.TraceSettingResponse) -> dict[str, Any]:
    """Return the trace settings for JSON: the level is a list, because it can have several values."""
    values = {name: list(setting.value) for name, setting in response.settings.items()}
    return {name: value if name == "trace_level" else value[0] for name, value in values.items()}


_DECODER = json.JSONDecoder(object_pairs_hook=_object)
