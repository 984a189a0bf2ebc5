"""Shared-memory parameters of a request's tensors: region, size and offset."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edge.errors import InvalidRequest, Literally, Unsupported
from edge.pb import inference_pb2 as pb
from edge.serving.shared_memory import SharedMemory, Window

_REGION, _BYTE_SIZE, _OFFSET = "shared_memory_region", "shared_memory_byte_size", "shared_memory_offset"
_INTEGERS = ("int64_param", "uint64_param")
_KINDS: dict[str, tuple[str, ...]] = {_REGION: ("string_param",), _BYTE_SIZE: _INTEGERS, _OFFSET: _INTEGERS}


def is_shared(parameters: Mapping[str, pb.InferParameter]) -> bool:
    """Say whether the parameters of a tensor point to shared memory."""
    # Most tensors have no parameters at all, and this is asked of each tensor of each request.
    return bool(parameters) and any(name in parameters for name in _KINDS)


def input_window(
    parameters: Mapping[str, pb.InferParameter], shared_memory: SharedMemory | None, subject: str
) -> Window:
    """Return the shared memory of an input.

    Raises:
        InvalidRequest: the parameters contradict the region or each other.
        NotFound: there is no such region.
        Unsupported: shared memory is not allowed.
    """
    return _window(parameters, shared_memory, subject, write=False)


def output_windows(request: pb.ModelInferRequest, shared_memory: SharedMemory | None) -> dict[str, Window]:
    """Return the shared memory of the outputs that the request wants there.

    Raises:
        InvalidRequest: the parameters contradict the region or each other.
        NotFound: there is no such region.
        Unsupported: shared memory is not allowed.
    """
    return {
        output.name: _window(output.parameters, shared_memory, f"output {output.name!r}", write=True)
        for output in request.outputs
        if is_shared(output.parameters)
    }


def tell(tensor: pb.ModelInferResponse.InferOutputTensor, window: Window, byte_size: int) -> None:
    """Say in a response where its output is, and how many bytes of the window it takes."""
    tensor.parameters[_REGION].string_param = window.region.name
    tensor.parameters[_BYTE_SIZE].int64_param = byte_size
    if window.offset:
        tensor.parameters[_OFFSET].int64_param = window.offset


def no_shared_memory(subject: str) -> Unsupported:
    """Return the error of who uses shared memory where that is not allowed."""
    expected = "none, because the server runs without --allow-shared-memory"
    fix = "Send the tensor in the message, or start the server with that option."
    return Unsupported(subject, given=Literally("shared memory"), expected=expected, fix=fix)


def _window(
    parameters: Mapping[str, pb.InferParameter], shared_memory: SharedMemory | None, subject: str, *, write: bool
) -> Window:
    if shared_memory is None:
        raise no_shared_memory(subject)
    values: dict[str, Any] = {_OFFSET: 0}
    for name, allowed in _KINDS.items():
        kind = parameters[name].WhichOneof("parameter_choice") if name in parameters else None
        if kind in allowed:
            values[name] = getattr(parameters[name], kind)
        elif name in parameters or name != _OFFSET:
            given = Literally(f"{name} as {kind or 'nothing'}")
            expected = f"{' or '.join(allowed)}"
            fix = f"Send {_REGION} and {_BYTE_SIZE}, and {_OFFSET} unless it is 0."
            raise InvalidRequest(f"{subject} in shared memory", given=given, expected=expected, fix=fix)
    return shared_memory.window(values[_REGION], values[_OFFSET], values[_BYTE_SIZE], subject, write=write)
