"""Limits of a connection that concern time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from edge.connections.quota import Share, patience_seconds
from edge.http2.rpc import Rpc
from edge.rpc.limits import Limits


class ConnectionLimits:
    """Enforces the limits of one connection that concern time: handshake, idleness, pings and slow requests."""

    def __init__(self, limits: Limits, share: Share, on_slow_handshake: Callable[[], None]) -> None:
        self._limits = limits
        self._share = share
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

    def late_requests(self, now: float, rpcs: Mapping[int, Rpc]) -> list[Rpc]:
        """Return the calls whose request is still not complete; called about once a second."""
        unfinished = {stream_id: rpc for stream_id, rpc in rpcs.items() if rpc.unfinished}
        self._unfinished = {stream_id: self._unfinished.get(stream_id, now) for stream_id in unfinished}
        return [
            rpc
            for stream_id, rpc in unfinished.items()
            if now - self._unfinished[stream_id] > patience_seconds(rpc.received_bytes)
        ]

    def close(self) -> None:
        """Stop the timer."""
        self._timer.cancel()
