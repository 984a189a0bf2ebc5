"""The protocol's small messages as JSON: parameters of requests and tensors, and what the extensions ask and answer."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any, Final

from edge.errors import InvalidRequest, Literally
from edge.pb import inference_pb2 as pb
from edge.rest.json_messages import INT64, checked, field, int64, kind_of, whole

_UINT64: Final = (0, 2**64 - 1)
_UINT32: Final = (0, 2**32 - 1)


def set_parameters(
    parameters: MutableMapping[str, pb.InferParameter], document: Mapping[str, Any], subject: str
) -> None:
    """Put the parameters of a request or of a tensor into its message.

    Raises:
        InvalidRequest: one is neither a bool, nor a number of 64 bits, nor a string.
    """
    for name, value in document.items():
        parameter = parameters[name]
        if type(value) is bool:
            parameter.bool_param = value
        elif type(value) is str:
            parameter.string_param = value
        elif type(value) is float:
            parameter.double_param = value
        elif type(value) is int and value <= INT64[1]:
            parameter.int64_param = int64(value, f"parameter {name!r} of {subject}")
        elif type(value) is int:
            parameter.uint64_param = whole(value, _UINT64, f"parameter {name!r} of {subject}")
        else:
            expected = "a string, a number, true or false"
            given, fix = Literally(kind_of(value)), "Leave it out, or give it a value."
            raise InvalidRequest(f"parameter {name!r} of {subject}", given=given, expected=expected, fix=fix)


def parameters_of(parameters: Mapping[str, pb.InferParameter]) -> dict[str, Any]:
    """Return the parameters of a response or of a tensor as JSON has them."""
    return {name: getattr(value, str(value.WhichOneof("parameter_choice"))) for name, value in parameters.items()}


def load_parameters(document: Mapping[str, Any]) -> dict[str, pb.ModelRepositoryParameter]:
    """Return the parameters of a load or unload request.

    Raises:
        InvalidRequest: one is neither a bool, nor a whole number of 64 bits, nor a string.
    """
    found: dict[str, pb.ModelRepositoryParameter] = {}
    for name, value in field(document, "parameters", dict, default={}).items():
        if type(value) is bool:
            found[name] = pb.ModelRepositoryParameter(bool_param=value)
        elif type(value) is str:
            found[name] = pb.ModelRepositoryParameter(string_param=value)
        else:
            found[name] = pb.ModelRepositoryParameter(int64_param=int64(value, f"parameter {name!r}"))
    return found


def region(name: str, document: Mapping[str, Any]) -> pb.SystemSharedMemoryRegisterRequest:
    """Return the request to register a region of shared memory.

    Raises:
        InvalidRequest: a field is missing, of another type or out of range.
    """
    return pb.SystemSharedMemoryRegisterRequest(
        name=name,
        key=field(document, "key", str),
        offset=whole(document.get("offset", 0), _UINT64, "offset of body"),
        byte_size=whole(field(document, "byte_size", int), _UINT64, "byte_size of body"),
    )


def log_settings(document: Mapping[str, Any]) -> pb.LogSettingsRequest:
    """Return the request to change settings of the log.

    Raises:
        InvalidRequest: a value is neither a bool, nor a whole number of 32 bits, nor a string.
    """
    request = pb.LogSettingsRequest()
    for name, value in document.items():
        setting = request.settings[name]
        if type(value) is bool:
            setting.bool_param = value
        elif type(value) is str:
            setting.string_param = value
        else:
            setting.uint32_param = whole(value, _UINT32, f"log setting {name!r}")
    return request


def trace_setting(model: str, document: Mapping[str, Any]) -> pb.TraceSettingRequest:
    """Return the request to change trace settings; null clears one.

    Raises:
        InvalidRequest: a value is neither null, nor a string, nor a list of strings.
    """
    request = pb.TraceSettingRequest(model_name=model)
    for name, value in document.items():
        subject = f"trace setting {name!r}"
        values = value if type(value) is list else [] if value is None else [value]
        request.settings[name].value.extend(checked(one, str, subject) for one in values)
    return request


def settings_of(response: pb.LogSettingsResponse) -> dict[str, Any]:
    """Return the settings of the log as JSON has them."""
    return {
        name: getattr(value, str(value.WhichOneof("parameter_choice"))) for name, value in response.settings.items()
    }


def trace_of(response: pb.TraceSettingResponse) -> dict[str, Any]:
    """Return the trace settings as JSON has them: only the level is a list, because it may have several values."""
    values = {name: list(setting.value) for name, setting in response.settings.items()}
    return {name: value if name == "trace_level" else value[0] for name, value in values.items()}
