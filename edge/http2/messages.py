"""gRPC's message framing: a flag byte for compression, four bytes of length, the message."""

from __future__ import annotations

import zlib

import grpc

PREFIX_BYTES = 5
#: The ``wbits`` argument of zlib for each ``grpc-encoding`` that a client may use.
_WINDOW_BITS = {b"gzip": 16 + zlib.MAX_WBITS, b"deflate": zlib.MAX_WBITS}
IDENTITY = b"identity"
ENCODINGS = (IDENTITY, *sorted(_WINDOW_BITS))


class Refused(Exception):
    """An invalid request, which ends its call with a status."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.code, self.details = code, details


def prefix(message: bytes) -> bytes:
    """Return the 5 bytes that precede an uncompressed message."""
    return b"\0" + len(message).to_bytes(4, "big")


class Messages:
    """Reassembles the messages of one stream, whose ``grpc-encoding`` is ``encoding``.

    A message whose prefix announces more than the limit is refused before any of it is buffered, and decompression
    stops at the limit.
    """

    __slots__ = ("_compressed", "_encoding", "_length", "_max_bytes", "_parts", "_size")

    def __init__(self, max_bytes: int, encoding: bytes = IDENTITY) -> None:
        self._max_bytes = max_bytes
        self._encoding = encoding
        self._parts: list[bytes] = []
        self._size = 0
        self._length = -1  # of the current message; -1 until its prefix is complete
        self._compressed = False

    @property
    def begun(self) -> bool:
        """Whether an incomplete message is buffered."""
        return self._size > 0 or self._length >= 0

    def feed(self, data: bytes) -> list[bytes]:
        """Return the messages that these bytes complete, decompressed."""
        if not self._size and self._length < 0 and len(data) >= PREFIX_BYTES:  # most messages arrive in one piece
            self._begin(data)
            if len(data) - PREFIX_BYTES == self._length:
                return [self._end(data[PREFIX_BYTES:])]
            self._length = -1
        self._parts.append(data)
        self._size += len(data)
        messages = []
        while self._size >= (PREFIX_BYTES if self._length < 0 else self._length):
            joined = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
            at = 0
            while True:  # over all complete messages, without copying the rest for each
                if self._length < 0:
                    if len(joined) - at < PREFIX_BYTES:
                        break
                    self._begin(joined, at)
                    at += PREFIX_BYTES
                if len(joined) - at < self._length:
                    break
                at += (length := self._length)
                messages.append(self._end(joined[at - length : at]))
            self._parts = [joined[at:]] if at < len(joined) else []
            self._size = len(joined) - at
        return messages

    def _begin(self, data: bytes, at: int = 0) -> None:
        flag, length = data[at], int.from_bytes(data[at + 1 : at + PREFIX_BYTES], "big")
        if flag > 1:
            raise Refused(grpc.StatusCode.INTERNAL, f"compressed flag: got {flag}, expected 0 or 1")
        if flag and self._encoding == IDENTITY:
            details = "compressed flag: got 1 without grpc-encoding, expected 0. Send grpc-encoding with the call."
            raise Refused(grpc.StatusCode.INTERNAL, details)
        if length > self._max_bytes:
            raise self._too_large(f"{length} bytes")
        self._compressed, self._length = bool(flag), length

    def _end(self, message: bytes) -> bytes:
        self._length = -1
        return self._inflated(message) if self._compressed else message

    def _inflated(self, message: bytes) -> bytes:
        inflater = zlib.decompressobj(_WINDOW_BITS[self._encoding])
        try:
            inflated = inflater.decompress(message, self._max_bytes + 1)
        except zlib.error:
            inflated = b""
        if len(inflated) > self._max_bytes:
            raise self._too_large("more, uncompressed")
        if not inflater.eof or inflater.unused_data:
            details = f"message: expected exactly one {self._encoding.decode()} stream. Compress it again."
            raise Refused(grpc.StatusCode.INTERNAL, details)
        return inflated

    def _too_large(self, given: str) -> Refused:
        details = f"message: got {given}, expected at most {self._max_bytes} bytes. Split it, or raise "
        return Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{details}--max-message-bytes.")
