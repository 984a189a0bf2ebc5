"""gRPC's message framing: a flag byte for compression, four bytes of length, the message."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable
from typing import NamedTuple

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

        Raises:
            Refused: it is no stream of its encoding, or exceeds a limit.
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
        """Return the messages that these bytes complete; ``hold`` admits each that is not small, or it is refused."""
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
