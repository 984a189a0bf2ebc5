"""Reading that lets other connections take turns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import perf_counter
from typing import Final

from edge.connections.quota import Share

#: The time that the bytes of one connection may take in a turn of the event loop.
_TURN_SECONDS: Final = 0.002
#: Bytes that are parsed before the time is read again: at first, and where they are parsed fast, as those of tensors.
_SLICE_BYTES: Final = 4 * 1024
_MAX_SLICE_BYTES: Final = 64 * 1024


class PacedReader:
    """Passes what a connection receives to its parser, a slice at a time, while its turn of the event loop lasts.

    The rest waits for the next turn, in which other connections are served too, and nothing more is read meanwhile.
    What waits counts in the connection's share, if there is one.
    """

    __slots__ = ("_closed", "_loop", "_parse", "_paused", "_reading", "_rest", "_scheduled", "_share", "_transport")

    def __init__(
        self, transport: asyncio.Transport, parse: Callable[[bytes], object], share: Share | None = None
    ) -> None:
        self._transport, self._parse, self._share = transport, parse, share
        self._loop = asyncio.get_running_loop()
        self._rest = b""
        self._reading = True
        self._paused = False
        self._scheduled = False
        self._closed = False

    def data_received(self, data: bytes) -> None:
        """Parse bytes now, or behind those that wait."""
        if self._rest or self._paused:
            self._keep(self._rest + data)
        elif len(data) <= _SLICE_BYTES:
            self._parse(data)
        else:
            self._take(data)

    def pause(self) -> None:
        """Neither parse nor read anything more, until :meth:`resume`. The parser may call it."""
        self._paused = True
        self._set_reading()

    def resume(self) -> None:
        """Go on, in the next turn with what waits."""
        self._paused = False
        self._set_reading()

    def close(self) -> None:
        """Forget what waits: the connection has ended, or nothing more of it is parsed."""
        self._keep(b"")
        self._closed = True
        self._parse = _ignore  # a method of the connection, which refers to this

    def _take(self, data: bytes) -> None:
        began = now = perf_counter()
        view = memoryview(data)
        at, size = 0, _SLICE_BYTES
        while at < len(data) and not self._closed:
            if self._paused or now - began > _TURN_SECONDS:
                self._keep(data[at:])
                return
            self._parse(bytes(view[at : at + size]))
            at += size
            before, now = now, perf_counter()
            if now - before < _TURN_SECONDS / 8:
                size = min(2 * size, _MAX_SLICE_BYTES)

    def _keep(self, rest: bytes) -> None:
        if self._share:
            self._share.release(len(self._rest))
            if rest and not self._share.hold(len(rest)):
                self._rest = b""
                self._share.disconnect()
                return
        self._rest = rest
        self._set_reading()

    def _set_reading(self) -> None:
        if self._closed:
            return
        reading = not self._rest and not self._paused
        if reading != self._reading and not self._transport.is_closing():
            self._reading = reading
            (self._transport.resume_reading if reading else self._transport.pause_reading)()
        if self._rest and not self._paused and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._continue)

    def _continue(self) -> None:
        self._scheduled = False
        if self._rest and not self._paused and not self._closed:
            data = self._rest
            if self._share:
                self._share.release(len(data))
            self._rest = b""
            self._take(data)
            self._set_reading()


def _ignore(data: bytes) -> None:
    pass
