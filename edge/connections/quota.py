"""Quotas on connections, calls and bytes of clients, counted before the server holds them.

One :class:`Quota` counts for all ports of a process. Each connection has a :class:`Share` of it, and pays for its calls
and headers, for its messages from the announcement of their size to the end of their call, and for answers that its
client has not read.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import resource
from collections import Counter
from collections.abc import Callable
from typing import Final, NamedTuple

log = logging.getLogger(__name__)

#: The files that the process needs beside its connections: models, libraries, logs.
_OTHER_FILES: Final = 256
_SWEEP_SECONDS: Final = 1.0
#: A client that sends or reads this much in each second, after a time to begin, is never too slow.
_LEAST_BYTES_PER_SECOND: Final = 16 * 1024
_PATIENCE_SECONDS: Final = 10.0
#: The time to begin with reading an answer: clients may wait for their user.
_READING_SECONDS: Final = 60.0
#: What a client has to do with an answer, for :meth:`Share.expect`, and the reason if it does not.
READING: Final = "answer"


class Refusal(NamedTuple):
    """Why clients of a port were refused or disconnected."""

    port: str
    reason: str


def patience_seconds(size_bytes: int) -> float:
    """Return the time in which a client has to send this much in all."""
    return _PATIENCE_SECONDS + size_bytes / _LEAST_BYTES_PER_SECOND


class Quota:
    """The limits of a process on what all its clients make it hold. Only the event loop uses it.

    If a client's share would exceed ``max_connection_bytes``, what it asks for is refused. If all shares would exceed
    ``max_bytes``, the connection with the largest one is closed, so that a client with a small share is served.
    """

    def __init__(self, max_bytes: int, max_connection_bytes: int, max_connections: int | None = None) -> None:
        self.max_bytes, self.max_connection_bytes = max_bytes, max_connection_bytes
        self.max_connections = free_files() if max_connections is None else max_connections
        self.held_bytes = 0  # the sum of all shares
        self.refusals: Counter[Refusal] = Counter()  # of clients; threads may read a copy
        self._shares: dict[Share, None] = {}  # in the order of their connections
        self._sweeping: asyncio.TimerHandle | None = None

    def connections_of_ports(self) -> Counter[str]:
        """Return the number of open connections of each port that has some; threads may call it."""
        return Counter(share.port for share in list(self._shares))

    def connect(self, port: str, max_connections: int, close: Callable[[], object]) -> Share | None:
        """Return the share of a new connection of a port, which ``close`` disconnects; None if there is no room.

        The oldest connection that has not completed a call yet makes room for a new one, or else the one that has been
        idle for longest: of the port, or of any if there are too many of all ports.
        """
        others = [share for share in self._shares if share.port == port]
        if len(others) >= max_connections or len(self._shares) >= self.max_connections:
            if len(others) < max_connections:
                others = list(self._shares)
            new = next((share for share in others if not share.proven), None)
            idle = min((share for share in others if share.idle_until < math.inf), key=_idle_until, default=None)
            leaving = new or idle
            if leaving is None:
                self.refusals[Refusal(port, "connections")] += 1
                return None
            leaving.end("connections")
        share = Share(self, port, close)
        self._shares[share] = None
        if self._sweeping is None:
            self._sweeping = asyncio.get_running_loop().call_later(_SWEEP_SECONDS, self._sweep)
        return share

    def _make_room(self, asking: Share, size: int) -> bool:
        while self.held_bytes + size > self.max_bytes:
            largest = max(self._shares, key=lambda share: share.held_bytes)
            if largest.held_bytes <= asking.held_bytes + size:
                return False
            largest.end("memory")
        return True

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        # First, so that an error below does not end the time limits.
        self._sweeping = loop.call_later(_SWEEP_SECONDS, self._sweep) if self._shares else None
        for share in list(self._shares):
            late = next((what for what, limit in share.limits.items() if limit < now), None)
            if late:
                share.end(late)
            elif share.idle_until < now:
                share.disconnect()
            else:
                share._sweep(now)


class Share:
    """What one connection makes the server hold."""

    __slots__ = ("_close", "_now", "_quota", "_sweep", "closed", "held_bytes", "idle_until", "limits", "port", "proven")

    def __init__(self, quota: Quota, port: str, close: Callable[[], object]) -> None:
        self._quota, self._close = quota, close
        self._now = asyncio.get_running_loop().time
        self._sweep: Callable[[float], object] = _nothing
        self.port = port
        self.held_bytes = 0  # its bytes now
        self.proven = False  # whether one of its calls was accepted, so that it does not make room for new connections
        self.closed = False  # whether the connection has ended
        self.limits: dict[str, float] = {}  # what its client has to do, and until which time of the event loop
        # When the connection closes because it has no call, in time of the event loop; infinite if it has.
        self.idle_until = math.inf

    def follow(self, close: Callable[[], object], sweep: Callable[[float], object] | None = None) -> None:
        """Set what disconnects the client, and what each second checks its calls at this time of the event loop."""
        self._close = close
        self._sweep = sweep or _nothing

    def hold(self, size: int, reason: str = "memory") -> bool:
        """Count bytes that the server is about to hold; False, and nothing is counted, if it must not hold them."""
        quota = self._quota
        held = self.held_bytes + size
        if self.closed:
            return False
        if held > quota.max_connection_bytes or (
            quota.held_bytes + size > quota.max_bytes and not quota._make_room(self, size)
        ):
            self.refused(reason)
            return False
        self.held_bytes = held
        quota.held_bytes += size
        return True

    def release(self, size: int) -> None:
        """Count bytes that the server holds no longer."""
        if not self.closed:  # else everything was released
            self.held_bytes -= size
            self._quota.held_bytes -= size

    def expect(self, what: str) -> None:
        """Give the client the time to begin with something, unless it has it already; then it is disconnected."""
        if what not in self.limits and not self.closed:
            seconds = _READING_SECONDS if what == READING else _PATIENCE_SECONDS
            self.limits[what] = self._now() + seconds

    def progressed(self, what: str, size_bytes: int) -> None:
        """The client has done this much of what is expected, and gets the time for it."""
        if what in self.limits:
            self.limits[what] += size_bytes / _LEAST_BYTES_PER_SECOND

    def met(self, what: str) -> None:
        """The client has done what was expected."""
        self.limits.pop(what, None)

    def idle(self, seconds: float) -> None:
        """The connection has no call: it closes after this time, or earlier to make room for others."""
        if not self.closed:
            self.idle_until = self._now() + seconds

    def busy(self) -> None:
        """The connection has a call, or begins one."""
        self.idle_until = math.inf

    def refused(self, reason: str) -> None:
        """Count a refusal."""
        self._quota.refusals[Refusal(self.port, reason)] += 1

    def end(self, reason: str) -> None:
        """Disconnect the client, and count why; without effect if the connection has ended."""
        if self.closed:
            return
        log.debug("disconnected a client of %s: %s", self.port, reason)
        self.refused(reason)
        self.disconnect()

    def disconnect(self) -> None:
        """Disconnect the client, and release everything."""
        close = self._close
        self.close()
        close()

    def close(self) -> None:
        """Release everything: the connection has ended. Only the first call has an effect."""
        if not self.closed:
            self.closed = True
            del self._quota._shares[self]
            self._quota.held_bytes -= self.held_bytes
            self.held_bytes = 0
            self.limits.clear()
            self._close = self._sweep = _nothing  # they refer to the connection, which refers to this


def _nothing(*_: object) -> None:
    pass


def _idle_until(share: Share) -> float:
    return share.idle_until


def free_files() -> int:
    """Raise the process's limit of open files as far as it may, and return how many connections it leaves room for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4096 if hard == resource.RLIM_INFINITY else min(hard, 4096)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    open_now = len(os.listdir("/proc/self/fd"))
    return max(soft - open_now - _OTHER_FILES, 16) if soft != resource.RLIM_INFINITY else 4096
