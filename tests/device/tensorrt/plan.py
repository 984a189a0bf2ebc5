"""The bytes of an engine: a header, the description as JSON, the ONNX model, and a hash of all of it."""

from __future__ import annotations

import hashlib
import json
import struct
from typing import Any

MAGIC = b"ftrt"
_HEADER = struct.Struct("<4sIII")


class Unreadable(Exception):
    """The bytes are not an engine of this version; the text is what TensorRT asserts."""


def write(version_tag: int, description: dict[str, Any], model: bytes) -> bytes:
    """Return the bytes of an engine."""
    text = json.dumps(description).encode()
    content = _HEADER.pack(MAGIC, version_tag, len(text), len(model)) + text + model
    return content + hashlib.sha256(content).digest()


def signed(data: bytes) -> bytes:
    """Return the bytes of an engine that was changed, with the hash that they have now."""
    content = data[: -hashlib.sha256().digest_size]
    return content + hashlib.sha256(content).digest()


def read(data: bytes, version_tag: int) -> tuple[dict[str, Any], bytes]:
    """Return the description and the model of an engine."""
    if len(data) < _HEADER.size or data[:4] != MAGIC:
        raise Unreadable(
            "Serialization assertion plan->header.magicTag == rt::kPLAN_MAGIC_TAG failed.Trying to load an engine "
            "created with incompatible serialization version. Check that the engine was not created using safety "
            "runtime, same OS was used and version compatibility parameters were set accordingly."
        )
    _, found, text_size, model_size = _HEADER.unpack_from(data)
    if found != version_tag:
        raise Unreadable(
            "Serialization assertion stdVersionRead == kSERIALIZATION_VERSION failed.Version tag does not match. Note: "
            f"Current Version: {version_tag}, Serialized Engine Version: {found}"
        )
    end = _HEADER.size + text_size + model_size
    if len(data) != end + hashlib.sha256().digest_size or hashlib.sha256(data[:end]).digest() != data[end:]:
        raise Unreadable("Serialization assertion checksum == computedChecksum failed.Engine data is corrupt.")
    text = data[_HEADER.size : _HEADER.size + text_size]
    return json.loads(text), data[_HEADER.size + text_size : end]
