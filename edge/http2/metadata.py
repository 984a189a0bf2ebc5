"""gRPC's header fields and trailers: call parameters, status, and custom metadata."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Sequence
from typing import NamedTuple
from urllib.parse import quote_from_bytes

from edge.http2.messages import ENCODINGS, IDENTITY
from edge.rpc.methods import Refused
from edge.serving.statuses import Code

Field = tuple[bytes, bytes]
#: Metadata as servicers see it: lower-case keys; values are bytes for keys that end in ``-bin``, else text.
Metadata = tuple[tuple[str, str | bytes], ...]

RESPONSE: tuple[Field, ...] = (
    (b":status", b"200"),
    (b"content-type", b"application/grpc"),
    (b"grpc-accept-encoding", b", ".join(ENCODINGS)),
)
OK_TRAILERS: tuple[Field, ...] = ((b"grpc-status", b"0"),)
_SECONDS = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
#: Overhead that counts toward the size of each field (RFC 9113, 6.5.2).
_FIELD_BYTES = 32
#: The same in memory: two objects of bytes and a tuple.
_FIELD_OBJECT_BYTES = 160
#: Fields of the transport, which are not part of the metadata.
_OWN = frozenset((b"te", b"content-type", b"grpc-timeout", b"grpc-encoding", b"grpc-accept-encoding"))
#: Characters that ``grpc-message`` carries unescaped: printable ASCII except the percent sign.
_PLAIN = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")


class NotGrpc(Exception):
    """A request that is not gRPC, which is answered with an HTTP status alone."""

    def __init__(self, status: bytes) -> None:
        super().__init__(status.decode())
        self.status = status


class Head(NamedTuple):
    """The parameters of a call."""

    path: str  # of the method, as in /package.Service/Method
    timeout: float | None  # in seconds
    encoding: bytes  # of its messages
    size_bytes: int  # of its fields in memory


def read_head(fields: Sequence[Field], max_bytes: int) -> Head:
    """Read the parameters of a call from its fields, of at most ``max_bytes`` as HTTP/2 counts them.

    Raises:
        NotGrpc: the method is not POST, or the content type is not gRPC's.
        Refused: the fields exceed the limit, or the encoding or the timeout is invalid.
    """
    text = sum([len(name) + len(value) for name, value in fields])
    size = text + _FIELD_BYTES * len(fields)
    if size > max_bytes:
        details = f"metadata: got {size} bytes, expected at most {max_bytes}. Send fewer or shorter fields."
        raise Refused(Code.RESOURCE_EXHAUSTED, details)
    named = dict(fields)
    if named[b":method"] != b"POST":
        raise NotGrpc(b"405")
    content_type = named.get(b"content-type", b"")
    if content_type[:16] != b"application/grpc" or content_type[16:17] not in (b"", b"+", b";"):
        raise NotGrpc(b"415")
    encoding = named.get(b"grpc-encoding", IDENTITY)
    if encoding not in ENCODINGS:
        expected = b", ".join(ENCODINGS).decode()
        details = f"grpc-encoding: got {encoding[:20]!r}, expected one of {expected}. Use one of them."
        raise Refused(Code.UNIMPLEMENTED, details)
    timeout = named.get(b"grpc-timeout")
    path = named[b":path"].decode("ascii", "replace")
    seconds = None if timeout is None else _seconds(timeout)
    return Head(path, seconds, encoding, text + _FIELD_OBJECT_BYTES * len(fields))


def _seconds(timeout: bytes) -> float:
    number, unit = timeout[:-1], _SECONDS.get(timeout[-1:])
    if unit is None or not number.isdigit() or len(number) > 8:
        expected = "at most 8 digits and one of H, M, S, m, u, n"
        details = f"grpc-timeout: got {timeout[:20]!r}, expected {expected}. Send 500m, for example, for 500 ms."
        raise Refused(Code.INTERNAL, details)
    return int(number) * unit


def read_metadata(fields: Iterable[Field]) -> Metadata:
    """Return the custom metadata among the header fields."""
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


def trailers(code: Code, details: str, metadata: Iterable[tuple[str, str | bytes]]) -> tuple[Field, ...]:
    """Return the trailers of a call: status, message and custom metadata."""
    fields = [(b"grpc-status", b"%d" % code)]
    if details:
        fields.append((b"grpc-message", quote_from_bytes(details.encode(errors="replace"), _PLAIN).encode()))
    for key, value in metadata:
        data = value.encode() if isinstance(value, str) else value
        fields.append((key.encode(), base64.b64encode(data).rstrip(b"=") if key.endswith("-bin") else data))
    return tuple(fields)
