"""The answers that a connection's client has not read."""

from __future__ import annotations

from typing import Final

from edge.connections.quota import READING, Share

#: An answer above this size counts as unread until it is sent.
_LARGE_BYTES: Final = 16 * 1024
_REASON: Final = "unread answers"


class UnreadAnswers:
    """Counts them in the connection's share, which disconnects a client that reads too slowly.

    Attributes:
        size_bytes: those that are counted.
    """

    __slots__ = ("_share", "size_bytes")

    def __init__(self, share: Share) -> None:
        self._share = share
        self.size_bytes = 0

    def take(self, size: int) -> bool:
        """Count an answer before it is queued; False if the client has too many already."""
        if size <= _LARGE_BYTES and not self.size_bytes:
            return True
        if not self._share.hold(size, _REASON):
            return False
        self.size_bytes += size
        return True

    def sent(self, size: int, queued: int) -> None:
        """Count bytes that were sent, and what is queued now; disconnect the client if that is too much."""
        if queued > self.size_bytes and not self._share.hold(queued - self.size_bytes, _REASON):
            self._share.end(_REASON)
        elif queued < self.size_bytes:
            self._share.release(self.size_bytes - queued)
        self.size_bytes = queued
        if queued:
            self._share.expect(READING)
            self._share.progressed(READING, size)
        else:
            self._share.met(READING)
