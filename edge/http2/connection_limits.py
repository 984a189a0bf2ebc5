"""Limits of a connection: on the answers that its client has not read, and on time."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from typing import Final

from edge.connections.quota import READING, Share, patience_seconds
from edge.http2.rpc import Rpc
from edge.rpc.limits import Limits

#: An answer above this size counts as unread until it is sent.
_LARGE_BYTES: Final = 16 * 1024
_REASON: Final = "unread answers"


class UnreadAnswers:
    """Counts them in the connection's share, which disconnects a client that reads too slowly."""

    __slots__ = ("_share", "size_bytes")

    def __init__(self, share: Share) -> None:
        self._share = share
        self.size_bytes = 0  # those that are counted

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


#: The tick of an event loop's timers, which may fire this much too early.
_TICK_SECONDS: Final = 0.001
#: The least time between two looks for late calls, for each open call, so that looking takes a small part of it.
_PAUSE_SECONDS: Final = 2e-6


class ConnectionLimits:
    """Enforces the limits of one connection that concern time: handshake, idleness, pings, slow requests, deadlines.

    ``rpcs`` are its open calls, which change.
    """

    def __init__(
        self, limits: Limits, share: Share, rpcs: Mapping[int, Rpc], on_slow_handshake: Callable[[], None]
    ) -> None:
        self._limits, self._share, self._rpcs = limits, share, rpcs
        # One timer for all calls: most end long before their deadline, and one for each would cost more than its start.
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_at = math.inf
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(limits.handshake_seconds, on_slow_handshake)
        self._handshake_done = False
        self._last_ping = -limits.min_ping_seconds
        self._strikes = 0
        self._unfinished: dict[int, float] = {}  # when the streams whose request is not complete were first seen

    def handshake_done(self) -> None:
        """Stop the handshake timer and start the idle time. Only the first call has an effect."""
        if not self._handshake_done:
            self._handshake_done = True
            self._timer.cancel()
            self.set_busy(False)

    def set_busy(self, busy: bool) -> None:
        """Record whether any call is open."""
        if busy:
            self._share.busy()
        else:
            self._share.idle(self._limits.idle_seconds)

    def response_sent(self) -> None:
        """Reset the ping strikes, as gRPC does whenever the server sends headers or data."""
        self._strikes = 0

    def ping_received(self) -> bool:
        """Record a ping, and return whether the client has now sent more than ``max_ping_strikes`` too early."""
        now = self._loop.time()
        if now - self._last_ping < self._limits.min_ping_seconds:
            self._strikes += 1
        self._last_ping = now
        return self._strikes > self._limits.max_ping_strikes

    def end_by(self, deadline: float) -> None:
        """End each call that is open at its deadline; this is that of a new one, in ``time.monotonic()`` seconds."""
        if deadline < self._alarm_at:
            if self._alarm:
                self._alarm.cancel()
            self._alarm_at = deadline
            self._alarm = self._loop.call_later(max(deadline - time.monotonic(), 0.0), self._end_late)

    def _end_late(self) -> None:
        now = time.monotonic()
        self._alarm, self._alarm_at = None, math.inf
        for rpc in [rpc for rpc in self._rpcs.values() if rpc.deadline <= now + _TICK_SECONDS and not rpc.done]:
            rpc.expire()
        following = min((rpc.deadline for rpc in self._rpcs.values() if not rpc.done), default=math.inf)
        if following < math.inf:
            self.end_by(max(following, now + _PAUSE_SECONDS * len(self._rpcs)))

    def late_requests(self, now: float) -> list[Rpc]:
        """Return the calls whose request is still not complete; called about once a second."""
        unfinished = {stream_id: rpc for stream_id, rpc in self._rpcs.items() if rpc.unfinished}
        self._unfinished = {stream_id: self._unfinished.get(stream_id, now) for stream_id in unfinished}
        return [
            rpc
            for stream_id, rpc in unfinished.items()
            if now - self._unfinished[stream_id] > patience_seconds(rpc.received_bytes)
        ]

    def close(self) -> None:
        self._timer.cancel()
        if self._alarm:
            self._alarm.cancel()
