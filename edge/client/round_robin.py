"""Round robin over several servers, which leaves out those that fail.

A server is taken out when it cannot be reached, says that it is not ready, or misses several deadlines in a row. It
returns after a time that doubles with each failure in a row and, if its connection was lost, only once the connection
is back, so that no request is spent on finding out. While all servers are out, all of them are tried.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, NamedTuple

from edge.client.refusals import EXPIRED, UNAVAILABLE, Refusal

#: Seconds that a server is out after its first failure, and after many.
FIRST_OUT: Final = 0.1
LONGEST_OUT: Final = 10.0
#: Missed deadlines in a row that take a server out: a board without power sends no error.
MISSES: Final = 3
_MOST_FAILURES = 16  # limits the exponent; the time has reached its maximum long before


@dataclass
class _Standing:
    failures: int = 0
    misses: int = 0
    out_until: float = 0.0
    lost: bool = False

    def is_in(self, now: float) -> bool:
        return not self.lost and now >= self.out_until


class Turn(NamedTuple):
    """The next server, and whether it is believed to work."""

    server: int
    is_in: bool


class RoundRobin:
    """Chooses the next server of a client. Safe to share between threads.

    Args:
        count: number of servers; each is known by its index.

    Attributes:
        count: number of servers.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._lock = threading.Lock()
        self._standings = [_Standing() for _ in range(count)]
        self._next = 0

    def turn(self, now: float, avoid: Collection[int] = ()) -> Turn:
        """Return the next server that is in; if none is, the one that returns first.

        Args:
            now: ``time.monotonic()`` seconds.
            avoid: servers to use only if there is no other.
        """
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
        """Record an answer, whatever its status: the server works."""
        with self._lock:
            self._standings[server] = _Standing()

    def refused(self, server: int, refusal: Refusal, now: float) -> bool:
        """Record a failed call.

        Returns:
            Whether the connection was lost: the server is then out until :meth:`connected` is called.
        """
        with self._lock:
            standing = self._standings[server]
            if refusal.code == EXPIRED:
                standing.misses += 1
                if standing.misses < MISSES:
                    return False
            elif refusal.code != UNAVAILABLE:
                self._standings[server] = _Standing()
                return False
            # Concurrent requests that fail together count as one failure.
            if now >= standing.out_until:
                standing.out_until = now + min(FIRST_OUT * 2**standing.failures, LONGEST_OUT)
                standing.failures = min(standing.failures + 1, _MOST_FAILURES)
            standing.lost |= refusal.code == UNAVAILABLE
            return standing.lost

    def connected(self, server: int) -> None:
        """Record that a connection is back, or that it is time to try it."""
        with self._lock:
            self._standings[server].lost = False

    def are_in(self, now: float) -> list[bool]:
        """Return for each server whether it is in."""
        with self._lock:
            return [standing.is_in(now) for standing in self._standings]
