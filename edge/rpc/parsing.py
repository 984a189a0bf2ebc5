"""Decompression and limits of a request's bytes, before they are parsed."""

from __future__ import annotations

import zlib
from typing import Final, NamedTuple

from edge.serving.statuses import Code

#: The ``wbits`` argument of zlib for each ``grpc-encoding`` that a client may use.
WINDOW_BITS: Final = {b"gzip": 16 + zlib.MAX_WBITS, b"deflate": zlib.MAX_WBITS}
UNPARSEABLE: Final = (
    "request message: got bytes that do not parse, expected the protobuf of this method. "
    "Send the type that the .proto file names for it."
)


class Status(NamedTuple):
    """The end of a failed call: code, message and trailing metadata."""

    code: Code
    details: str
    trailers: tuple[tuple[str, str], ...] = ()


class Refused(Exception):
    """Ends a call with a status."""

    def __init__(self, code: Code, details: str, trailers: tuple[tuple[str, str], ...] = ()) -> None:
        super().__init__(details)
        self.status = Status(code, details, trailers)


def inflate(data: bytes, encoding: bytes, max_bytes: int) -> bytes | Status | None:
    """Return the contents of exactly one stream of an encoding.

    None means that the data are something else, a Status that the contents exceed the limit, where decompression stops.
    """
    inflater = zlib.decompressobj(WINDOW_BITS[encoding])
    try:
        inflated = inflater.decompress(data, max_bytes + 1)
    except zlib.error:
        return None
    if len(inflated) > max_bytes:
        return too_large("more, uncompressed", max_bytes)
    return inflated if inflater.eof and not inflater.unused_data else None


def too_large(given: str, max_bytes: int) -> Status:
    """Return the status of a message above the limit of its method."""
    details = f"message: got {given}, expected at most {max_bytes} bytes. Split it, or raise --max-message-bytes."
    return Status(Code.RESOURCE_EXHAUSTED, details)


def encoding_of(data: bytes) -> bytes | None:
    """Return the encoding by the first bytes of a message; None for plain protobuf.

    No protobuf begins as gzip does. One may begin as deflate does, but does not end with the checksum then.
    """
    if data[:2] == b"\x1f\x8b":
        return b"gzip"
    if data[:1] == b"\x78" and int.from_bytes(data[:2], "big") % 31 == 0:
        return b"deflate"
    return None
