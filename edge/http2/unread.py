"""The answers that a connection's client has not read."""

from __future__ import annotations

from typing import Final

from edge.connections.quota import READING, Share

#: An answer above this size counts as unread until it is sent.
_LARGE_BYTES: Final = 16 * 1024
_REASON: Final = "unread answers"


class UnreadAnswers:
    """Counts them in the connection's share, which disconnects a client that reads too slowly."""

    __slots__ = ("_bytes", "_share")

    def __init__(self, share: Share) -> None:
        self._share = share
        self._bytes = 0  # as counted in the share

    def take(self, size: int) -> bool:
        """Count an answer before it is queued; False if the client has too many already."""
        if size <= _LARGE_BYTES and not self._bytes:
            return True
        if not self._share.hold(size, _REASON):
            return False
        self._bytes += size
        return True

    def sent(self, size: int, queued: int) -> None:
        """Count bytes that were sent, and what is queued now; disconnect the client if that is too much."""
        if queued > self._bytes and not self._share.hold(queued - self._bytes, _REASON):
            self._share.end(_REASON)
        elif queued < self._bytes:
            self._share.release(self._bytes - queued)
        self._bytes = queued
        if queued:
            self._share.expect(READING)
            self._share.progressed(READING, size)
        else:
            self._share.met(READING)
