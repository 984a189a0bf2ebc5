"""Round robin over several servers that skips failing ones.

A server is out when it cannot be reached, is not ready, or misses several deadlines in a row. It returns after a time
that doubles with each failure in a row and, if its connection was lost, only once the connection is back. While all
servers are out, the one that returns first is called.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, NamedTuple

from edge.client.failures import EXPIRED, UNAVAILABLE, FailedCall

#: Seconds that a server is out after its first failure, and at most.
FIRST_OUT_SECONDS: Final = 0.1
LONGEST_OUT_SECONDS: Final = 10.0
#: Missed deadlines in a row that take a server out: a board without power sends no error.
MISSES: Final = 3
_MAX_DOUBLINGS = 16  # avoids an overflow; the time has reached its maximum long before


@dataclass
class _Standing:
    failures: int = 0
    misses: int = 0
    out_until: float = 0.0
    lost: bool = False

    def is_in(self, now: float) -> bool:
        return not self.lost and now >= self.out_until


class Turn(NamedTuple):
    """Index of the next server, and whether it is in."""

    server: int
    is_in: bool


class RoundRobin:
    """Chooses the next of ``count`` servers. Thread-safe; times are ``time.monotonic()`` seconds."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._lock = threading.Lock()
        self._standings = [_Standing() for _ in range(count)]
        self._next = 0

    def turn(self, now: float, avoid: Collection[int] = ()) -> Turn:
        """Return the next server that is in; if none is, the one that returns first. ``avoid`` is a last resort."""
        with self._lock:
            order = [(self._next + step) % self.count for step in range(self.count)]
            order = [server for server in order if server not in avoid] or order
            found = next((server for server in order if self._standings[server].is_in(now)), None)
            server = min(order, key=lambda one: self._standings[one].out_until) if found is None else found
            # Only first attempts advance the turn; a retry would send the next request to the server that just failed.
            if not avoid:
                self._next = (server + 1) % self.count
            return Turn(server, found is not None)

    def answered(self, server: int) -> None:
        """Record an answer, which shows that the server works."""
        with self._lock:
            self._standings[server] = _Standing()

    def failed(self, server: int, failure: FailedCall, now: float) -> bool:
        """Record a failed call; return whether the server is out until :meth:`connected` because it was lost."""
        with self._lock:
            standing = self._standings[server]
            if failure.code == EXPIRED:
                standing.misses += 1
                if standing.misses < MISSES:
                    return False
            elif failure.code != UNAVAILABLE:  # the server works
                self._standings[server] = _Standing()
                return False
            # Concurrent requests that fail together count as one failure.
            if now >= standing.out_until:
                out_seconds = min(FIRST_OUT_SECONDS * 2**standing.failures, LONGEST_OUT_SECONDS)
                standing.out_until = now + out_seconds
                standing.failures = min(standing.failures + 1, _MAX_DOUBLINGS)
            standing.lost |= failure.code == UNAVAILABLE
            return standing.lost

    def connected(self, server: int) -> None:
        """Record that a connection is back, or that it is time to try it."""
        with self._lock:
            self._standings[server].lost = False
