"""The sending half of a connection of HTTP/1.1."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Sequence
from typing import Final, cast

import h11

from edge.connections.quota import READING, Share

#: Above this, a copy costs more than another packet.
_MAX_JOINED_BYTES: Final = 64 * 1024


class SendingHalf(asyncio.Protocol):
    """What a connection sends, and what its client has not read of it.

    Attributes:
        http: the state of the protocol.
        ending: whether the next response is the last one.
    """

    def __init__(self, share: Share, http: h11.Connection) -> None:
        self.share = share
        self.http = http
        self.ending = False
        self._writable = asyncio.Event()
        self._writable.set()
        self._unread_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=1, low=0)  # to know exactly when all is sent
        self.scheme = "https" if transport.get_extra_info("sslcontext") else "http"
        self.client = _address(transport.get_extra_info("peername"))
        self.server = _address(transport.get_extra_info("sockname"))

    def connection_lost(self, error: Exception | None) -> None:
        """Let nobody wait."""
        self._writable.set()
        self.transport.close()  # or TLS in Python 3.10 warns of an open one

    def pause_writing(self) -> None:
        """Wait with further answers: the client does not read."""
        self._writable.clear()
        self.share.expect(READING)

    def resume_writing(self) -> None:
        """Go on: the client has read everything."""
        self.share.met(READING)
        self.share.release(self._unread_bytes)
        self._unread_bytes = 0
        self._writable.set()

    async def writable(self) -> None:
        """Wait until the client has read what was sent."""
        await self._writable.wait()

    def write(self, pieces: Sequence[bytes], size: int) -> int:
        """Send bytes, of which ``size`` count in the share, and return how many of those wait for the client.

        Those are released once the client has read them; the caller releases the others.
        """
        for piece in (b"".join(pieces),) if size <= _MAX_JOINED_BYTES else pieces:
            self.transport.write(piece)
        if self._writable.is_set():
            return 0
        self.share.progressed(READING, self.transport.get_write_buffer_size())
        self._unread_bytes += size
        return size

    def send_continue(self) -> None:
        """Let a client send its body that waits for the permission."""
        if self.http.they_are_waiting_for_100_continue:
            response = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
            self.transport.write(self.http.send(response) or b"")

    @abstractmethod
    def read(self) -> None:
        """Read the body of the request in progress."""

    @abstractmethod
    def pause(self) -> None:
        """Read nothing more until :meth:`read`."""

    @abstractmethod
    def finish(self) -> None:
        """Begin with the next request, or end: the response is complete."""


def _address(name: object) -> tuple[str, int] | None:
    return (str(name[0]), int(name[1])) if isinstance(name, tuple) else None
