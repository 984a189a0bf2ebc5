"""One request and its response, as the functions of ASGI."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextvars import Context
from typing import Final, Protocol
from urllib.parse import unquote

import h11

from edge.connections.quota import Share
from edge.errors import INTERNAL, InvalidRequest, Raw, RequestError
from edge.http.messages import (
    RETRY_SECONDS,
    Application,
    Headers,
    Message,
    Scope,
    body_bytes,
    error_response,
    no_room,
    response_of,
    state_of,
)

log = logging.getLogger(__name__)

#: No more of a body is parsed while the application has not taken this much.
_MAX_WAITING_BYTES: Final = 64 * 1024
#: So many chunks of a body may be small; each takes several microseconds, however small it is.
_SMALL_CHUNKS: Final = 1024
_LEAST_CHUNK_BYTES: Final = 256
_GONE: Final[Message] = {"type": "http.disconnect"}


class _Connection(Protocol):
    """The connection as its requests see it."""

    share: Share
    http: h11.Connection
    transport: asyncio.Transport
    ending: bool
    scheme: str
    client: tuple[str, int] | None
    server: tuple[str, int] | None

    def read(self) -> None: ...
    def pause(self) -> None: ...
    def send_continue(self) -> None: ...
    async def writable(self) -> None: ...
    def write(self, pieces: Sequence[bytes], size: int) -> int: ...
    def finish(self) -> None: ...


class Exchange:
    """One request and its response. The bytes of both count in the share of the connection until the response ends."""

    def __init__(self, connection: _Connection, request: h11.Request, application: Application) -> None:
        self._connection = connection
        self._share = connection.share
        self._method = request.method
        headers = list(request.headers)
        self._scope = _scope(connection, request, headers)
        self._size_bytes = body_bytes(headers)
        self._body = bytearray()
        self._size = 0
        self._chunks = 0
        self._held = 0
        self._begun = False  # the application has asked for the body
        self._received = False  # all of the body
        self._taken = False  # all of the body, by the application
        self.failed = False  # whether the body is wrong or too large, so that no more of it is parsed
        self._error: RequestError | None = None
        self._start: Message | None = None
        self._responding = False
        self._ended = False
        self._news = asyncio.Event()
        # The run of the application, in a context of its own: the event loop would pass on that of an earlier request.
        self.task = Context().run(asyncio.get_running_loop().create_task, self._run(application))

    @property
    def has_body(self) -> bool:
        return self._size_bytes != 0

    @property
    def has_chunks(self) -> bool:
        """Whether the body comes in chunks, and has not ended."""
        return self._size_bytes is None and not self._received

    def receive_data(self, data: bytes | bytearray, new_chunk: bool) -> None:
        self._size += len(data)
        self._share.progressed("body", len(data))
        if self._size_bytes is None:
            self._chunks += new_chunk
            if self._chunks > _SMALL_CHUNKS + self._size // _LEAST_CHUNK_BYTES:
                self._share.refused("chunks")
                given, expected = f"{self._chunks} in {self._size} bytes", f"{_LEAST_CHUNK_BYTES} bytes or more in most"
                fix = "Buffer the body, or send a Content-Length."
                self.fail(InvalidRequest("chunks of the body", given=Raw(given), expected=expected, fix=fix))
                return
            if not self._share.hold(len(data)):
                self.fail(no_room(self._size))
                return
            self._held += len(data)
        self._body += data
        if len(self._body) > _MAX_WAITING_BYTES:
            self._connection.pause()
        self._news.set()

    def receive_end(self) -> None:
        self._received = True
        self._share.met("body")
        self._news.set()

    def fail(self, error: RequestError) -> None:
        """Make the application's next call for the body raise an error, and read nothing more of it."""
        self.failed, self._error = True, error
        self._connection.pause()
        self._share.met("body")
        self._news.set()

    def leave(self) -> None:
        """Note that the client has left."""
        self._ended = True
        self._body = bytearray()
        self._news.set()

    async def _run(self, application: Application) -> None:
        try:
            await application(self._scope, self._receive, self._send)
        except Exception:
            log.exception("a request for %s failed", self._scope["path"])
        if self._ended:
            return
        if self._responding:  # it cannot be completed
            self._connection.transport.abort()
        else:
            await self._respond(error_response(500, INTERNAL))

    async def _receive(self) -> Message:
        if not self._taken and not self._begun:
            self._begin()
        while not self._ended:
            if not self._taken:
                if self._body or self._received:
                    return self._take()
                if self._error:
                    error, self._error = self._error, None  # its traceback refers to this
                    raise error
                if not self.failed:
                    self._connection.read()
                    if self._body or self._received or self.failed:
                        continue
            self._news.clear()
            await self._news.wait()
        return _GONE

    def _begin(self) -> None:
        self._begun = True
        if self._size_bytes:
            if not self._share.hold(self._size_bytes):
                raise no_room(self._size_bytes)
            self._held += self._size_bytes
        if not self._received:
            self._share.expect("body")
            self._connection.send_continue()

    def _take(self) -> Message:
        body, self._body = bytes(self._body), bytearray()
        self._taken = self._received
        if self._taken:
            self._connection.read()  # to notice that the client leaves
        return {"type": "http.request", "body": body, "more_body": not self._taken}

    async def _send(self, message: Message) -> None:
        if self._ended:
            return
        if message["type"] == "http.response.start":
            self._start = message
            return
        body = message.get("body", b"") if self._method != b"HEAD" else b""
        if not self._share.hold(len(body)):
            if self._responding:
                self._connection.transport.abort()
            else:
                await self._respond(error_response(429, no_room(len(body)), {"Retry-After": str(RETRY_SECONDS)}))
            return
        self._held += len(body)
        await self._write(body, message.get("more_body", False))

    async def _respond(self, response: tuple[Message, bytes]) -> None:
        self._start, body = response
        await self._write(body if self._method != b"HEAD" else b"", False)

    async def _write(self, body: bytes, more: bool) -> None:
        connection = self._connection
        await connection.writable()
        if self._ended:  # meanwhile
            return
        pieces = []
        if self._start is not None:
            pieces.append(
                connection.http.send(response_of(self._start, last=connection.ending or not self._received)) or b""
            )
            self._start, self._responding = None, True
        if body:
            pieces += connection.http.send_with_data_passthrough(h11.Data(data=body)) or ()
        if not more:
            pieces.append(connection.http.send(h11.EndOfMessage()) or b"")
            self._ended = True  # not before, because it raises an error for a response that is no HTTP
        unread = connection.write(pieces, len(body))
        self._held -= unread
        released = len(body) - unread if more else self._held
        self._held -= released
        self._share.release(released)
        if not more:
            self._news.set()
            connection.finish()


def _scope(connection: _Connection, request: h11.Request, headers: Headers) -> Scope:
    path, _, query = request.target.partition(b"?")
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": request.http_version.decode(),
        "scheme": connection.scheme,
        "client": connection.client,
        "server": connection.server,
        "method": request.method.decode(),
        "root_path": "",
        "path": unquote(path.decode()),
        "raw_path": path,
        "query_string": query,
        "headers": headers,
        "state": state_of(connection.share),
    }
