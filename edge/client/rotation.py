"""Several servers that answer the same requests, taken in turns: which comes next, and which are out for now.

A server goes out when it cannot be reached or says that it is not ready, or when several requests in a row got no
answer in time. It comes back once its time is over, which doubles with each failure in a row, and, where its connection
was lost, once that stands again, so that no request is spent on finding out. While all of them are out, all are asked:
one may be up again by now.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, NamedTuple

from edge.client.refusals import EXPIRED, UNAVAILABLE, Refusal

#: Seconds for which a server is out after its first failure, and at most.
FIRST_OUT: Final = 0.1
LONGEST_OUT: Final = 10.0
#: Requests in a row that got no answer in time, after which a server is out: a board without power refuses nothing.
MISSES: Final = 3
_MOST_FAILURES = 16  # counted; the time has long reached its limit


@dataclass
class _Standing:
    failures: int = 0
    misses: int = 0
    out_until: float = 0.0
    lost: bool = False

    def is_in(self, now: float) -> bool:
        return not self.lost and now >= self.out_until


class Turn(NamedTuple):
    """Whose turn it is, and whether that server is known to be out."""

    server: int
    is_in: bool


class Rotation:
    """The servers of one client. Safe to share between threads.

    Args:
        count: of the servers; they are known by their index.

    Attributes:
        count: of the servers.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._lock = threading.Lock()
        self._standings = [_Standing() for _ in range(count)]
        self._next = 0

    def turn(self, now: float, avoid: Collection[int] = ()) -> Turn:
        """Return the next server that is in; where none is, the one that comes back first.

        Args:
            now: ``time.monotonic()`` seconds.
            avoid: servers to take only if there is no other.
        """
        with self._lock:
            order = [(self._next + step) % self.count for step in range(self.count)]
            order = [server for server in order if server not in avoid] or order
            found = next((server for server in order if self._standings[server].is_in(now)), None)
            server = min(order, key=lambda one: self._standings[one].out_until) if found is None else found
            # Not by a second attempt: it would put the next request's first one before the same closed door.
            if not avoid:
                self._next = (server + 1) % self.count
            return Turn(server, found is not None)

    def answered(self, server: int) -> None:
        """Note that a server answered, whatever it said: it is in."""
        with self._lock:
            self._standings[server] = _Standing()

    def refused(self, server: int, refusal: Refusal, now: float) -> bool:
        """Note the end of a call without an answer.

        Returns:
            Whether its connection is to be watched: the server is out until :meth:`connected` is called.
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
            # Many requests that were on their way when it went are one failure.
            if now >= standing.out_until:
                standing.out_until = now + min(FIRST_OUT * 2**standing.failures, LONGEST_OUT)
                standing.failures = min(standing.failures + 1, _MOST_FAILURES)
            standing.lost |= refusal.code == UNAVAILABLE
            return standing.lost

    def connected(self, server: int) -> None:
        """Note that the connection to a server stands, or that it is time to try."""
        with self._lock:
            self._standings[server].lost = False

    def are_in(self, now: float) -> list[bool]:
        """Say of each server whether it is in."""
        with self._lock:
            return [standing.is_in(now) for standing in self._standings]
