"""Reading that lets other connections take turns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import perf_counter
from typing import Final

#: The time that the bytes of one connection may take in a turn of the event loop.
_TURN_SECONDS: Final = 0.002
#: Bytes that are parsed before the time is read again.
_SLICE_BYTES: Final = 16 * 1024


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
        end = perf_counter() + _TURN_SECONDS
        view = memoryview(data)
        at = 0
        while at < len(data) and not self._closed:
            self._parse(bytes(view[at : at + _SLICE_BYTES]))
            at += _SLICE_BYTES
            if at < len(data) and perf_counter() > end:
                if not self._rest:
                    self._transport.pause_reading()
                self._rest = data[at:]
                self._loop.call_soon(self._continue)
                return
        self._rest = b""

    def _continue(self) -> None:
        if self._closed:
            return
        data, self._rest = self._rest, b""
        self._take(data)
        if not self._rest and not self._closed:
            self._transport.resume_reading()


def _ignore(data: bytes) -> None:
    pass
