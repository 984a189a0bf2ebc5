"""gRPC messages in a stream of bytes: one byte that says whether it is compressed, four of length, then the message."""

from __future__ import annotations

import zlib

import grpc

PREFIX_BYTES = 5
#: What a client may compress with, by ``grpc-encoding``, and how zlib calls it.
_WINDOW_BITS = {b"gzip": 16 + zlib.MAX_WBITS, b"deflate": zlib.MAX_WBITS}
#: What the server tells clients that it reads.
ENCODINGS = b"identity, deflate, gzip"
IDENTITY = b"identity"


class Refused(Exception):
    """What a client sent ends its call.

    Args:
        code: the status.
        details: what is wrong, for the client.
    """

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.code = code
        self.details = details


def prefix(message: bytes) -> bytes:
    """Return what stands before a message that is not compressed."""
    return b"\0" + len(message).to_bytes(4, "big")


class Messages:
    """Puts the messages of one stream together again.

    Nothing is kept of a message whose length is above the limit, nor more of a compressed one than the limit.

    Args:
        max_bytes: the largest message.
        encoding: what compressed messages are compressed with.
    """

    __slots__ = ("_compressed", "_encoding", "_length", "_max_bytes", "_parts", "_size")

    def __init__(self, max_bytes: int, encoding: bytes = IDENTITY) -> None:
        self._max_bytes = max_bytes
        self._encoding = encoding
        self._parts: list[bytes] = []
        self._size = 0
        self._length = -1  # of the message that has begun; -1 before its prefix is whole
        self._compressed = False

    @property
    def begun(self) -> bool:
        """Whether a part of a message has come and the rest has not."""
        return self._size > 0 or self._length >= 0

    def feed(self, data: bytes) -> list[bytes]:
        """Return the messages that these bytes complete.

        Raises:
            Refused: a message is too large, or compressed in a way that was not agreed on.
        """
        if not self._size and self._length < 0 and len(data) >= PREFIX_BYTES:  # most often, a message comes whole
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
            while True:  # over what is there, without copying the rest each time
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
            raise Refused(grpc.StatusCode.INTERNAL, f"a message begins with the flag {flag}, and there is 0 or 1")
        if flag and self._encoding == IDENTITY:
            raise Refused(grpc.StatusCode.INTERNAL, "a message is compressed, and grpc-encoding does not say how")
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
            raise self._too_large("more")
        if not inflater.eof:
            raise Refused(grpc.StatusCode.INTERNAL, f"a message is not {self._encoding.decode()}")
        return inflated

    def _too_large(self, given: str) -> Refused:
        details = f"message: got {given}, expected at most {self._max_bytes} bytes. Split it, or raise "
        return Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{details}--max-message-bytes.")


def known_encoding(encoding: bytes) -> bool:
    """Say whether messages that are compressed like this can be read."""
    return encoding == IDENTITY or encoding in _WINDOW_BITS
