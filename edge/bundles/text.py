"""Text as the protocol carries it: BYTES elements that must be UTF-8 before anything reads them."""

from __future__ import annotations

import numpy as np

from edge.datatypes import Array
from edge.errors import InvalidRequest


def decode(elements: Array, subject: str) -> Array:
    """Return an array of ``str`` of the same shape.

    Raises:
        InvalidRequest: an element is not UTF-8.
    """
    texts = np.empty(elements.size, np.object_)
    texts[:] = [_decode(element, subject) for element in elements.ravel().tolist()]
    return texts.reshape(elements.shape)


def encode(texts: Array) -> Array:
    """Return an array of ``bytes`` of the same shape."""
    elements = np.empty(texts.size, np.object_)
    elements[:] = [text.encode() for text in texts.ravel().tolist()]
    return elements.reshape(texts.shape)


def _decode(element: bytes, subject: str) -> str:
    try:
        return element.decode()
    except UnicodeDecodeError:
        raise InvalidRequest(f"text in {subject}", given=element, expected="UTF-8", fix="Encode it as UTF-8.") from None
