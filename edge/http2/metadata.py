"""gRPC's use of HTTP/2 header fields: what a call asks for, how it ends, and metadata both ways."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Sequence
from typing import NamedTuple
from urllib.parse import quote_from_bytes

import grpc

from edge.http2.messages import ENCODINGS, IDENTITY, Refused, known_encoding

Field = tuple[bytes, bytes]
#: As gRPC's servicers see it: keys in lower case, values of keys in ``-bin`` as bytes.
Metadata = tuple[tuple[str, str | bytes], ...]

RESPONSE: tuple[Field, ...] = (
    (b":status", b"200"),
    (b"content-type", b"application/grpc"),
    (b"grpc-accept-encoding", ENCODINGS),
)
OK_TRAILERS: tuple[Field, ...] = ((b"grpc-status", b"0"),)
_SECONDS = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
#: What HTTP/2 adds to the size of each field (RFC 9113, 6.5.2).
_FIELD_BYTES = 32
#: Metadata that is the transport's own.
_OWN = frozenset((b"te", b"content-type", b"grpc-timeout", b"grpc-encoding", b"grpc-accept-encoding"))
#: What may stand in ``grpc-message`` as it is: every printable character of ASCII but the percent sign.
_PLAIN = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")


class NotGrpc(Exception):
    """A request is none of gRPC and gets an answer of plain HTTP.

    Args:
        status: of HTTP.
    """

    def __init__(self, status: bytes) -> None:
        super().__init__(status.decode())
        self.status = status


class Head(NamedTuple):
    """What a call begins with: its method, the seconds that it may take at most, and how messages are compressed."""

    path: str
    timeout: float | None
    encoding: bytes


def read_head(fields: Sequence[Field], max_bytes: int) -> Head:
    """Read the header fields of a call, which HTTP/2 may count as so many bytes at most.

    Raises:
        NotGrpc: it is something else.
        Refused: it cannot be answered.
    """
    size = sum([len(name) + len(value) for name, value in fields]) + _FIELD_BYTES * len(fields)
    if size > max_bytes:
        raise Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, f"metadata: got {size} bytes, expected at most {max_bytes}")
    named = dict(fields)
    if named[b":method"] != b"POST":
        raise NotGrpc(b"405")
    if not _is_grpc(named.get(b"content-type", b"")):
        raise NotGrpc(b"415")
    encoding = named.get(b"grpc-encoding", IDENTITY)
    if not known_encoding(encoding):
        details = f"grpc-encoding: got {encoding!r}, expected one of {ENCODINGS.decode()}. Compress in another way."
        raise Refused(grpc.StatusCode.UNIMPLEMENTED, details)
    timeout = named.get(b"grpc-timeout")
    path = named[b":path"].decode("ascii", "replace")
    return Head(path, None if timeout is None else _seconds(timeout), encoding)


def _is_grpc(content_type: bytes) -> bool:
    kind, rest = content_type[:16], content_type[16:17]
    return kind == b"application/grpc" and rest in (b"", b"+", b";")


def _seconds(timeout: bytes) -> float:
    number, unit = timeout[:-1], _SECONDS.get(timeout[-1:])
    if unit is None or not number.isdigit() or len(number) > 8:
        raise Refused(grpc.StatusCode.INTERNAL, "grpc-timeout: expected at most 8 digits and one of H, M, S, m, u, n")
    return int(number) * unit


def read_metadata(fields: Iterable[Field]) -> Metadata:
    """Return what a client sent as metadata."""
    return tuple(
        (name.decode("ascii", "replace"), _binary(value) if name.endswith(b"-bin") else value.decode("latin-1"))
        for name, value in fields
        if not name.startswith(b":") and name not in _OWN
    )


def _binary(value: bytes) -> bytes:
    try:
        return base64.b64decode(value + b"=" * (-len(value) % 4))
    except binascii.Error:
        return b""


def trailers(code: grpc.StatusCode, details: str, metadata: Iterable[tuple[str, str | bytes]]) -> tuple[Field, ...]:
    """Return the fields that end a call."""
    fields = [(b"grpc-status", str(code.value[0]).encode())]
    if details:
        fields.append((b"grpc-message", quote_from_bytes(details.encode(errors="replace"), _PLAIN).encode()))
    for key, value in metadata:
        data = value.encode() if isinstance(value, str) else value
        fields.append((key.encode(), base64.b64encode(data).rstrip(b"=") if key.endswith("-bin") else data))
    return tuple(fields)
