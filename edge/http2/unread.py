"""The answers that a connection's client has not read."""

from __future__ import annotations

from typing import Final

from edge.connections.quota import Share, patience_seconds

#: An answer above this size counts as unread until it is sent.
_LARGE_BYTES: Final = 16 * 1024
#: Clients that read slowly get this much more time than those that send slowly: they may wait for their user.
_READING_SECONDS: Final = 50.0
_REASON: Final = "unread answers"


class UnreadAnswers:
    """Counts them in the connection's share, and measures how fast the client reads them."""

    __slots__ = ("_bytes", "_sent_bytes", "_share", "_since")

    def __init__(self, share: Share) -> None:
        self._share = share
        self._bytes = 0  # as counted in the share
        self._sent_bytes = 0
        self._since: tuple[float, int] | None = (
            None  # when the client was behind at first, and the bytes sent until then
        )

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
        self._sent_bytes += size
        if queued > self._bytes and not self._share.hold(queued - self._bytes, _REASON):
            self._share.end(_REASON)
        elif queued < self._bytes:
            self._share.release(self._bytes - queued)
        self._bytes = queued

    def sweep(self, now: float) -> None:
        """Disconnect a client that reads too slowly."""
        if not self._bytes:
            self._since = None
            return
        since, sent = self._since = self._since or (now, self._sent_bytes)
        if now - since > _READING_SECONDS + patience_seconds(self._sent_bytes - sent):
            self._share.end("slow reader")
