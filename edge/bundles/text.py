"""Conversion of BYTES tensors, the protocol's type for text, to and from ``str``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edge.datatypes import Array
from edge.errors import InvalidRequest


def decode(elements: Array, subject: str) -> Array:
    """Return an array of ``str`` of the same shape; raise an InvalidRequest if an element is not UTF-8."""
    texts = np.empty(elements.size, np.object_)
    texts[:] = decode_all(elements.ravel().tolist(), subject)
    return texts.reshape(elements.shape)


def decode_all(encoded: Sequence[bytes], subject: str) -> list[str]:
    """Return texts as ``str``; raise an InvalidRequest if one is not UTF-8."""
    try:
        return [element.decode() for element in encoded]
    except UnicodeDecodeError as error:
        element_number = f" element {encoded.index(error.object) + 1}" if len(encoded) > 1 else ""
        fix = f"Encode it as UTF-8; byte {error.start + 1} is not."
        raise InvalidRequest(
            f"text in {subject}{element_number}", given=error.object, expected="UTF-8", fix=fix
        ) from None


def encode(texts: Array) -> Array:
    """Return an array of ``bytes`` of the same shape."""
    elements = np.empty(texts.size, np.object_)
    elements[:] = [text.encode() for text in texts.ravel().tolist()]
    return elements.reshape(texts.shape)
