"""The bytes of an engine: a header, the description as JSON, the ONNX model, and a hash; and the memory for them."""

from __future__ import annotations

import hashlib
import json
import struct
from typing import Any

MAGIC = b"ftrt"
_HEADER = struct.Struct("<4sIII")


class IHostMemory(bytes):
    """A buffer: ``bytes`` and ``memoryview`` take it, but it has no length and no elements of its own.

    ``bytes`` is its base because only types written in C offer the buffer protocol before Python 3.12.
    """

    def _refuse(self, *arguments: object) -> Any:
        raise TypeError("'IHostMemory' object is a buffer; take bytes() or memoryview() of it")

    __len__ = __getitem__ = __iter__ = __contains__ = __add__ = _refuse


class Unreadable(Exception):
    """The bytes are not an engine of this version; the text is what TensorRT asserts."""


def write(version_tag: int, description: dict[str, Any], model: bytes) -> bytes:
    """Return the bytes of an engine."""
    text = json.dumps(description).encode()
    content = _HEADER.pack(MAGIC, version_tag, len(text), len(model)) + text + model
    return content + hashlib.sha256(content).digest()


def read(data: bytes, version_tag: int) -> tuple[dict[str, Any], bytes]:
    """Return the description and the model of an engine."""
    if len(data) < _HEADER.size or data[:4] != MAGIC:
        raise Unreadable("Serialization assertion plan->header.magicTag == rt::kPLAN_MAGIC_TAG failed.")
    _, tag, text_size, model_size = _HEADER.unpack_from(data)
    if tag != version_tag:
        versions = f"Current Version: {version_tag}, Serialized Engine Version: {tag}"
        raise Unreadable(f"Serialization assertion failed.Version tag does not match. Note: {versions}")
    end = _HEADER.size + text_size + model_size
    if hashlib.sha256(data[:end]).digest() != data[end:]:
        raise Unreadable("Serialization assertion checksum == computedChecksum failed.Engine data is corrupt.")
    text = data[_HEADER.size : _HEADER.size + text_size]
    return json.loads(text), data[_HEADER.size + text_size : end]
