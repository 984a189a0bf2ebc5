"""Check that an ONNX file holds all its weights, from its bytes alone and without the onnx package."""

from __future__ import annotations

from collections.abc import Iterator

from edge.errors import BundleError, Literally

#: Message to the fields that hold messages on the way to a tensor (onnx.proto3), and what those are.
_WAY_TO_TENSORS: dict[str, dict[int, str]] = {
    "model": {7: "graph", 25: "function"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "function": {7: "node", 11: "attribute"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
}
_EXTERNAL_DATA = 13  # TensorProto.external_data
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MAX_DEPTH = 64


def check_self_contained(model: bytes, subject: str) -> None:
    """Refuse a model that keeps weights in other files.

    ONNX Runtime looks for such files in the working directory, and old releases follow ``..``: what runs would not be
    what was hashed.

    Raises:
        BundleError: a tensor has external data, or the bytes are not protobuf.
    """
    try:
        external = _has_external_data(memoryview(model), "model", _MAX_DEPTH)
    except (ValueError, IndexError):
        fix = "Copy the bundle again from where it was exported, or export it again."
        raise BundleError(subject, given=Literally("broken protobuf"), expected="an ONNX model", fix=fix) from None
    if external:
        fix = "Export it again with the weights inside."
        raise BundleError(subject, given=Literally("external data"), expected="all weights in the ONNX file", fix=fix)


def _has_external_data(message: memoryview, kind: str, depth: int) -> bool:
    if depth == 0:
        raise ValueError("nested too deeply")
    way = _WAY_TO_TENSORS.get(kind, {})
    return any(
        (kind == "tensor" and field == _EXTERNAL_DATA)
        or (field in way and _has_external_data(content, way[field], depth - 1))
        for field, content in _messages(message)
    )


def _messages(message: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield number and content of every length-delimited field; https://protobuf.dev/programming-guides/encoding/."""
    position = 0
    while position < len(message):
        tag, position = _varint(message, position)
        wire_type = tag & 7
        if wire_type == _VARINT:
            _, position = _varint(message, position)
        elif wire_type in (_FIXED64, _FIXED32):
            position += 8 if wire_type == _FIXED64 else 4
        elif wire_type == _BYTES:
            size, position = _varint(message, position)
            yield tag >> 3, message[position : position + size]
            position += size
        else:
            raise ValueError("unknown wire type")
    if position != len(message):
        raise ValueError("truncated")


def _varint(message: memoryview, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise ValueError("varint too long")
