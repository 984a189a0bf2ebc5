"""Reading that lets other connections take turns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import perf_counter
from typing import Final

#: The time that the bytes of one connection may take in a turn of the event loop.
_TURN_SECONDS: Final = 0.002
#: Bytes that are parsed before the time is read again: at first, and where they are parsed fast, as those of tensors.
_SLICE_BYTES: Final = 4 * 1024
_MAX_SLICE_BYTES: Final = 64 * 1024


class PacedReader:
    """Passes what a connection receives to its parser, a slice at a time, while its turn of the event loop lasts.

    The rest waits for the next turn, in which other connections are served too, and nothing more is read meanwhile.
    """

    __slots__ = ("_closed", "_loop", "_parse", "_rest", "_transport")

    def __init__(self, transport: asyncio.Transport, parse: Callable[[bytes], object]) -> None:
        self._transport = transport
        self._parse = parse
        self._loop = asyncio.get_running_loop()
        self._rest = b""
        self._closed = False

    def data_received(self, data: bytes) -> None:
        """Parse bytes now, or behind those that wait."""
        if self._rest:
            self._rest += data
        elif len(data) <= _SLICE_BYTES:
            self._parse(data)
        else:
            self._take(data)

    def close(self) -> None:
        """Forget what waits: the connection has ended."""
        self._closed = True
        self._rest = b""
        self._parse = _ignore  # a method of the connection, which refers to this

    def _take(self, data: bytes) -> None:
        began = now = perf_counter()
        view = memoryview(data)
        at, size = 0, _SLICE_BYTES
        while at < len(data) and not self._closed:
            self._parse(bytes(view[at : at + size]))
            at += size
            before, now = now, perf_counter()
            if at < len(data) and now - began > _TURN_SECONDS:
                self._rest = data[at:]
                if not self._transport.is_closing():
                    self._transport.pause_reading()
                    self._loop.call_soon(self._continue)
                return
            if now - before < _TURN_SECONDS / 8:
                size = min(2 * size, _MAX_SLICE_BYTES)
        self._rest = b""

    def _continue(self) -> None:
        if self._closed:
            return
        data, self._rest = self._rest, b""
        self._take(data)
        if not self._rest and not self._transport.is_closing():
            self._transport.resume_reading()


def _ignore(data: bytes) -> None:
    pass
