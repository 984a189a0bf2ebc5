"""Conversion between JSON and the protocol's small messages: parameters, and those of the extensions.

All of it raises InvalidRequest for a field that is missing, of another type or out of range.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any, Final

from edge.errors import InvalidRequest, Raw
from edge.pb import inference_pb2 as pb
from edge.rest.json_messages import INT64, checked, field, kind_of, whole
from edge.serving.request import MOST_PARAMETERS, check_number

_UINT64: Final = (0, 2**64 - 1)
_UINT32: Final = (0, 2**32 - 1)


def set_parameters(
    parameters: MutableMapping[str, pb.InferParameter], document: Mapping[str, Any], subject: str
) -> None:
    """Add the parameters of a request or a tensor to its message."""
    check_number("parameters", len(document), MOST_PARAMETERS, subject)
    for name, value in document.items():
        own = f"parameter {name!r} of {subject}"
        if type(value) is float:
            parameters[name].double_param = value
        elif type(value) is int and value > INT64[1]:
            parameters[name].uint64_param = whole(value, _UINT64, own)
        elif type(value) in (bool, str, int):
            _set(parameters[name], value, "int64_param", INT64, own)
        else:
            given, fix = Raw(kind_of(value)), "Leave it out, or give it a value."
            raise InvalidRequest(own, given=given, expected="a string, a number, true or false", fix=fix)


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
    found: dict[str, pb.ModelRepositoryParameter] = {}
    for name, value in field(document, "parameters", dict, default={}).items():
        found[name] = pb.ModelRepositoryParameter()
        _set(found[name], value, "int64_param", INT64, f"parameter {name!r}")
    return found


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
        request.settings[name].value.extend(checked(one, str, f"trace setting {name!r}") for one in values)
    return request


def trace_of(response: pb.TraceSettingResponse) -> dict[str, Any]:
    """Return the trace settings for JSON: the level is a list, because it can have several values."""
    values = {name: list(setting.value) for name, setting in response.settings.items()}
    return {name: value if name == "trace_level" else value[0] for name, value in values.items()}
