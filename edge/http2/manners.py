"""What a client must not do with a connection, whatever it calls on it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from edge.rpc.limits import Limits


class Manners:
    """The bounds of one connection in time: its handshake, its idleness, and its pings.

    Args:
        limits: the bounds.
        too_slow: called when the handshake is not there in time.
        too_idle: called when there has been no call for too long.
    """

    def __init__(self, limits: Limits, too_slow: Callable[[], None], too_idle: Callable[[], None]) -> None:
        self._limits = limits
        self._too_idle = too_idle
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(limits.handshake_seconds, too_slow)
        self._greeted = False
        self._busy = False
        self._idle_since = 0.0
        self._pinged = -limits.min_ping_seconds
        self._strikes = 0

    def greeted(self) -> None:
        """Note that the handshake is over."""
        if not self._greeted:
            self._greeted = True
            self._timer.cancel()
            self.called(False)
            self._look()

    def called(self, busy: bool) -> None:
        """Note that the first call has begun, or the last one ended."""
        self._busy = busy
        self._idle_since = self._loop.time()

    def answered(self) -> None:
        """Note that the server has sent something that was asked for."""
        self._strikes = 0

    def pings_too_often(self) -> bool:
        """Note a ping, and say whether it was one too many."""
        now = self._loop.time()
        if now - self._pinged < self._limits.min_ping_seconds:
            self._strikes += 1
        self._pinged = now
        return self._strikes > self._limits.max_ping_strikes

    def end(self) -> None:
        """Watch no longer."""
        self._timer.cancel()

    def _look(self) -> None:
        left = self._limits.idle_seconds
        if not self._busy:
            left -= self._loop.time() - self._idle_since
        if left <= 0:
            self._too_idle()
        else:
            self._timer = self._loop.call_later(left, self._look)
