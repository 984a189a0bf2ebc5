"""An HTTP port and its connections: requests one after another, with limits on each head, body and answer."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

import h11

from edge.connections.listener import Listener
from edge.connections.paced import PacedReader
from edge.connections.quota import READING, Quota, Share
from edge.errors import InvalidRequest, Raw
from edge.http.exchange import Exchange
from edge.http.messages import Application, error_response, response_of

if TYPE_CHECKING:
    from edge.security.certificates import ServerCertificates

#: The limits for the request line and all headers together, and for their number.
_MAX_HEAD_BYTES: Final = 32 * 1024
_MAX_HEADERS: Final = 128
#: The limit for the line before a chunk, and for the headers after the last one, give or take as much.
_CHUNK_HEAD_BYTES: Final = 4096
#: An idle connection closes after this time. Stock clients reuse connections, and many proxies do for a minute.
_KEEP_ALIVE_SECONDS: Final = 75.0
#: A client that still sends may lose the answer if its connection closes, so this much is read and thrown away: of the
#: body of a request, and of what is none.
_DISCARDED_BODY_BYTES: Final = 64 * 1024**2
_DISCARDED_BYTES: Final = 128 * 1024
#: Above this, a copy costs more than another packet.
_MAX_JOINED_BYTES: Final = 64 * 1024
_DRAIN_CHECK_SECONDS: Final = 0.01
_BLANK_LINE: Final = re.compile(rb"\n\r?\n")


class HttpConnection(asyncio.Protocol):
    """A client's connection; ``connections`` holds it while it is open."""

    def __init__(self, application: Application, share: Share, connections: set[HttpConnection]) -> None:
        self.share = share
        self.http = h11.Connection(h11.SERVER, _MAX_HEAD_BYTES)  # the state of the protocol
        self.ending = False  # whether the next response is the last one
        self._writable = asyncio.Event()
        self._writable.set()
        self._unread_bytes = 0
        self._application, self._connections = application, connections
        self._exchange: Exchange | None = None
        self._discard_bytes: int | None = None  # None while what is received is parsed

    @property
    def task(self) -> asyncio.Task[None] | None:
        """The run of the application for the request in progress."""
        return self._exchange.task if self._exchange else None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=1, low=0)  # to know exactly when all is sent
        self.scheme = "https" if transport.get_extra_info("sslcontext") else "http"
        self.client = _address(transport.get_extra_info("peername"))
        self.server = _address(transport.get_extra_info("sockname"))
        self._reader = PacedReader(self.transport, self._parse, self.share)
        self.share.follow(self.transport.abort)
        self.share.expect("head")
        self._connections.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        """Release everything, and let nobody wait."""
        self._connections.discard(self)
        self.share.close()
        self._reader.close()
        self._writable.set()
        self.transport.close()  # or TLS in Python 3.10 warns of an open one
        if self._exchange:
            self._exchange.leave()
            self._exchange = None

    def data_received(self, data: bytes) -> None:
        if self._discard_bytes is None:
            self._reader.data_received(data)
            return
        self._discard_bytes -= len(data)
        if self._discard_bytes < 0:
            self.transport.abort()

    def read(self) -> None:
        """Read the body of the request in progress."""
        self._reader.resume()
        self._advance()

    def pause(self) -> None:
        """Read nothing more until :meth:`read`."""
        self._reader.pause()

    def finish(self) -> None:
        """Begin with the next request, or end: the response is complete."""
        self._exchange = None
        self.share.met("body")
        if self.ending or self.http.our_state is not h11.DONE or self.http.their_state is not h11.DONE:
            self._end(_DISCARDED_BODY_BYTES)
            return
        self.http.start_next_cycle()
        self.share.idle(_KEEP_ALIVE_SECONDS)
        self._reader.resume()
        if self.http.trailing_data[0]:
            self._advance()

    def pause_writing(self) -> None:
        self._writable.clear()
        self.share.expect(READING)

    def resume_writing(self) -> None:
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

    def drain(self) -> None:
        """End after the request in progress, or at once."""
        self.ending = True
        if not self._exchange:
            self.transport.close()

    def _parse(self, data: bytes) -> None:
        # Headers after the last chunk are parsed at once, as soon as they are there.
        size = _CHUNK_HEAD_BYTES if self._exchange and self._exchange.has_chunks else len(data)
        for at in range(0, len(data), size):
            self.http.receive_data(data[at : at + size])
            self._advance()

    def _advance(self) -> None:
        """Handle what has been received, up to the beginning of a body or of a request that has to wait."""
        try:
            while self._discard_bytes is None:
                if self.http.their_state is h11.IDLE:
                    self._check_head()
                event = self.http.next_event()
                kind = type(event)
                if kind is h11.Request:
                    self.share.met("head")
                    self._exchange = Exchange(self, cast(h11.Request, event), self._application)
                    if self._exchange.has_body:
                        self._reader.pause()  # until the application asks for it
                        return
                elif kind is h11.EndOfMessage:
                    if self._exchange:
                        self._exchange.receive_end()
                    if not self.http.trailing_data[0]:
                        return
                elif event is h11.NEED_DATA:
                    self._check_chunk()
                    return
                elif event is h11.PAUSED:
                    self._reader.pause()  # until the response in progress is complete
                    return
                elif self._exchange:
                    data = cast(h11.Data, event)
                    self._exchange.receive_data(data.data, data.chunk_start)
                    if self._exchange.failed:
                        return
        except h11.RemoteProtocolError as error:
            self._refuse(error)

    def _check_head(self) -> None:
        received, _ = self.http.trailing_data
        if not received:
            return
        self.share.busy()
        self.share.expect("head")
        end = _BLANK_LINE.search(received)
        head = received[: end.end()] if end else received
        if len(head) > _MAX_HEAD_BYTES or head.count(b"\n") > _MAX_HEADERS + 2:
            self.share.refused("head")
            raise h11.RemoteProtocolError("a larger head", error_status_hint=431)

    def _check_chunk(self) -> None:
        if self._exchange and self._exchange.has_chunks and len(self.http.trailing_data[0]) > _CHUNK_HEAD_BYTES:
            raise h11.RemoteProtocolError("a larger head of a chunk")

    def _refuse(self, error: h11.RemoteProtocolError) -> None:
        expected = f"HTTP/1.1, with at most {_MAX_HEAD_BYTES} bytes and {_MAX_HEADERS} headers before the body"
        fix = "Send requests as RFC 9112 defines them."
        # Not the library's text, which quotes what was received.
        refusal = InvalidRequest("request", given=Raw("other bytes"), expected=expected, fix=fix)
        if self._exchange:
            self._exchange.fail(refusal)
            return
        start, body = error_response(error.error_status_hint, refusal)
        self.transport.write((self.http.send(response_of(start, last=True)) or b"") + body)
        self._end(_DISCARDED_BYTES)

    def _end(self, discard_bytes: int) -> None:
        """Close the connection, once the client has had a chance to read the answer."""
        if self.http.their_state in (h11.DONE, h11.MUST_CLOSE):
            self.transport.close()
            return
        self._discard_bytes = discard_bytes
        self._reader.close()
        self.share.met("head")
        self.share.expect("close")
        if self.transport.can_write_eof():
            with suppress(OSError):  # the client has reset the connection, which ends it soon
                self.transport.write_eof()
        self.transport.resume_reading()


def _address(name: object) -> tuple[str, int] | None:
    return (str(name[0]), int(name[1])) if isinstance(name, tuple) else None


class HttpServer:
    """Serves an ASGI application over HTTP/1.1. It is created, used and drained inside one running event loop."""

    def __init__(
        self,
        name: str,
        application: Application,
        quota: Quota,
        max_connections: int,
        certificates: ServerCertificates | None = None,
    ) -> None:
        self.port = 0  # until the server listens, and on a Unix socket
        self._application = application
        self._connections: set[HttpConnection] = set()
        context = certificates.follow(lambda now: now.http) if certificates else None
        self._listener = Listener(name, quota, max_connections, self._connection, context)

    async def start(self, host: str, port: int, path: Path | None = None) -> None:
        """Listen, on the Unix socket ``path`` instead of the port if there is one.

        Raise a UsageError if the address cannot be taken.
        """
        self.port = await self._listener.open(host, port, path)

    async def drain(self, grace_seconds: float) -> None:
        """Accept no further request, and close the port after the accepted ones end. A second call has no effect."""
        await self._listener.close()
        for connection in list(self._connections):
            connection.drain()
        end = asyncio.get_running_loop().time() + grace_seconds
        while self._connections and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(_DRAIN_CHECK_SECONDS)
        tasks = [connection.task for connection in self._connections if connection.task]
        for connection in list(self._connections):
            connection.transport.abort()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _connection(self, share: Share) -> asyncio.Protocol:
        return HttpConnection(self._application, share, self._connections)
