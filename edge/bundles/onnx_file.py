"""Check that an ONNX file holds all its weights, from its bytes alone and without the onnx package."""

from __future__ import annotations

from collections.abc import Iterator

from edge.errors import BundleError, Raw
from edge.files import COPY_AGAIN

#: Message to its fields that can contain a tensor (onnx.proto3), and the message type of each.
_PATHS_TO_TENSORS: dict[str, dict[int, str]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "function": {7: "node", 11: "attribute"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
}
_EXTERNAL_DATA = 13  # TensorProto.external_data
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED_BYTES = {_FIXED64: 8, _FIXED32: 4}
#: Other readers cut a longer tag to this length, and so see another field than the one written.
_TAG_BITS = 32
_SIZE_BITS = 31
_MAX_DEPTH = 64


def check_self_contained(model: bytes, subject: str) -> None:
    """Raise a BundleError for a model that keeps weights in other files, or for bytes that are not protobuf.

    ONNX Runtime looks for such files in the working directory, and old releases follow ``..``: the model that runs
    would not be the one that was hashed.
    """
    try:
        external = _has_external_data(memoryview(model), "model", _MAX_DEPTH)
    except (ValueError, IndexError):
        given = Raw("broken protobuf")
        raise BundleError(subject, given=given, expected="an ONNX model", fix=COPY_AGAIN) from None
    if external:
        fix = "Export it again with the weights inside."
        raise BundleError(subject, given=Raw("external data"), expected="all weights in the ONNX file", fix=fix)


def _has_external_data(message: memoryview, kind: str, depth: int) -> bool:
    if depth == 0:
        raise ValueError("nested too deeply")
    paths = _PATHS_TO_TENSORS.get(kind, {})
    return any(
        (kind == "tensor" and field == _EXTERNAL_DATA)
        or (field in paths and _has_external_data(content, paths[field], depth - 1))
        for field, content in _messages(message)
    )


def _messages(message: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield number and content of every length-delimited field; https://protobuf.dev/programming-guides/encoding/."""
    position = 0
    while position < len(message):
        tag, position = _varint(message, position, _TAG_BITS)
        wire_type = tag & 7
        if wire_type == _VARINT:
            _, position = _varint(message, position)
        elif wire_type == _BYTES:
            size, position = _varint(message, position, _SIZE_BITS)
            yield tag >> 3, message[position : position + size]
            position += size
        elif wire_type in _FIXED_BYTES:
            position += _FIXED_BYTES[wire_type]
        else:
            raise ValueError("unknown wire type")
    if position != len(message):
        raise ValueError("truncated")


def _varint(message: memoryview, position: int, bits: int = 64) -> tuple[int, int]:
    value = 0
    for shift in range(0, bits, 7):
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value >> bits:
                break
            return value, position
    raise ValueError("varint too long")
