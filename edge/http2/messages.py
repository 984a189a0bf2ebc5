"""gRPC in HTTP/2: framing, a flag byte for compression, four bytes of length and the message; headers and trailers."""

from __future__ import annotations

import asyncio
import base64
import binascii
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple
from urllib.parse import quote_from_bytes

from edge.rpc.methods import WINDOW_BITS, Refused, too_large
from edge.serving.statuses import Code

PREFIX_BYTES = 5
IDENTITY = b"identity"
ENCODINGS = (IDENTITY, *sorted(WINDOW_BITS))
#: A message up to this size is part of what its call costs.
SMALL_BYTES = 1024
#: A message that inflates to this much takes about a millisecond; more is inflated in such pieces in a thread.
_INLINE_BYTES = 256 * 1024
_PIECE_BYTES = 4 * 1024**2
Field = tuple[bytes, bytes]
#: Metadata as servicers see it: lower-case keys; values are bytes for keys that end in ``-bin``, else text.
CallMetadata = tuple[tuple[str, str | bytes], ...]

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


def no_room(size: int) -> Refused:
    """Return the refusal of bytes that the quota does not admit."""
    details = f"message: got {size} bytes beside those that the server holds already, expected fewer. Try again later."
    return Refused(Code.RESOURCE_EXHAUSTED, details)


def prefix(message: bytes) -> bytes:
    """Return the 5 bytes that precede an uncompressed message."""
    return b"\0" + len(message).to_bytes(4, "big")


class Packed(NamedTuple):
    """A compressed message, and the limit for its contents."""

    data: bytes
    encoding: bytes
    max_bytes: int

    async def inflated(self, hold: Callable[[int], bool]) -> bytes:
        """Decompress it, what is large beside the event loop; ``hold`` admits each piece.

        Raise a Refused if it is no stream of its encoding, or exceeds a limit.
        """
        inflater = zlib.decompressobj(WINDOW_BITS[self.encoding])
        try:
            piece = inflater.decompress(self.data, _INLINE_BYTES)
            pieces, size = [piece], len(piece)
            # A piece that is full may not be the last one, even if all data are consumed.
            while piece and size <= self.max_bytes and not inflater.eof:
                if not inflater.unconsumed_tail and size % _INLINE_BYTES:
                    break
                if not hold(_PIECE_BYTES):
                    raise no_room(size + _PIECE_BYTES)
                piece = await asyncio.to_thread(inflater.decompress, inflater.unconsumed_tail, _PIECE_BYTES)
                pieces.append(piece)
                size += len(piece)
        except zlib.error:
            pieces, size = [], -1
        if size > self.max_bytes:
            raise Refused(*too_large("more, uncompressed", self.max_bytes))
        if size < 0 or not inflater.eof or inflater.unused_data:
            details = f"message: expected exactly one {self.encoding.decode()} stream. Compress it again."
            raise Refused(Code.INTERNAL, details)
        return b"".join(pieces)


class Messages:
    """Reassembles the messages of one stream, whose ``grpc-encoding`` is ``encoding``.

    A message whose prefix announces more than the limit is refused before any of it is buffered.
    """

    __slots__ = ("_buffer", "_compressed", "_encoding", "_length", "_max_bytes")

    def __init__(self, max_bytes: int, encoding: bytes = IDENTITY) -> None:
        self._max_bytes, self._encoding = max_bytes, encoding
        self._buffer = bytearray()  # pieces would cost more than their bytes where a client sends small ones
        self._length = -1  # of the current message; -1 until its prefix is complete
        self._compressed = False

    @property
    def begun(self) -> bool:
        """Whether an incomplete message is buffered."""
        return bool(self._buffer) or self._length >= 0

    @property
    def size(self) -> int:
        """The bytes of the incomplete message."""
        return len(self._buffer)

    def feed(self, data: bytes, hold: Callable[[int], bool]) -> list[bytes | Packed]:
        """Return the messages that these bytes complete; ``hold`` admits each that is not small, or it is refused.

        One that came alone, and in several pieces, is the buffer itself: to copy 60 MB stops the event loop for 25 ms.
        """
        if self._length < 0 and not self._buffer and len(data) >= PREFIX_BYTES:  # most messages arrive in one piece
            self._begin(data, 0, hold)
            if len(data) - PREFIX_BYTES == self._length:
                return [self._end(data[PREFIX_BYTES:])]
            data = data[PREFIX_BYTES:]
        self._buffer += data
        messages: list[bytes | Packed] = []
        at = 0
        while True:  # over all complete messages, without moving the rest for each
            if self._length < 0:
                if len(self._buffer) - at < PREFIX_BYTES:
                    break
                self._begin(self._buffer, at, hold)
                at += PREFIX_BYTES
            if len(self._buffer) - at < self._length:
                break
            if len(self._buffer) == self._length:  # then ``at`` is 0
                whole, self._buffer = self._buffer, bytearray()
                messages.append(self._end(whole))  # type: ignore[arg-type]  # protobuf and zlib read either
                break
            with memoryview(self._buffer) as view:
                message = view[at : at + self._length].tobytes()
            at += self._length
            messages.append(self._end(message))
        del self._buffer[:at]
        return messages

    def _begin(self, data: bytes | bytearray, at: int, hold: Callable[[int], bool]) -> None:
        flag, length = data[at], int.from_bytes(data[at + 1 : at + PREFIX_BYTES], "big")
        if flag > 1:
            raise Refused(Code.INTERNAL, f"compressed flag: got {flag}, expected 0 or 1")
        if flag and self._encoding == IDENTITY:
            details = "compressed flag: got 1 without grpc-encoding, expected 0. Send grpc-encoding with the call."
            raise Refused(Code.INTERNAL, details)
        if length > self._max_bytes:
            raise Refused(*too_large(f"{length} bytes", self._max_bytes))
        if length > SMALL_BYTES and not hold(length):
            raise no_room(length)
        self._compressed, self._length = bool(flag), length

    def _end(self, message: bytes) -> bytes | Packed:
        self._length = -1
        return Packed(message, self._encoding, self._max_bytes) if self._compressed else message


class NotGrpc(Exception):
    """A request that is not gRPC, which is answered with an HTTP status alone."""

    def __init__(self, status: bytes) -> None:
        super().__init__(status.decode())
        self.status = status


class RequestHeader(NamedTuple):
    """The parameters of a call."""

    path: str  # of the method, as in /package.Service/Method
    timeout: float | None  # in seconds
    encoding: bytes  # of its messages
    size_bytes: int  # of its fields in memory


def read_head(fields: Sequence[Field], max_bytes: int) -> RequestHeader:
    """Read the parameters of a call from its fields, of at most ``max_bytes`` as HTTP/2 counts them.

    Raise a NotGrpc if the method is not POST, or the content type is not gRPC's, and a Refused if the fields exceed the
    limit, or the encoding or the timeout is invalid.
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
    return RequestHeader(path, seconds, encoding, text + _FIELD_OBJECT_BYTES * len(fields))


def _seconds(timeout: bytes) -> float:
    number, unit = timeout[:-1], _SECONDS.get(timeout[-1:])
    if unit is None or not number.isdigit() or len(number) > 8:
        expected = "at most 8 digits and one of H, M, S, m, u, n"
        details = f"grpc-timeout: got {timeout[:20]!r}, expected {expected}. Send 500m, for example, for 500 ms."
        raise Refused(Code.INTERNAL, details)
    return int(number) * unit


def read_metadata(fields: Iterable[Field]) -> CallMetadata:
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
