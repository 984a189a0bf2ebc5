"""A port on which gRPC is spoken over nghttp2: its connections, from the first to the last."""

from __future__ import annotations

import asyncio
import ssl
import time

from edge.http2.connection import Connection
from edge.http2.routes import Routes
from edge.rpc.limits import Limits

#: Between the word that no further call shall begin and the end: calls that were sent meanwhile arrive.
_NOTICE_SECONDS = 0.1
_LOOK_SECONDS = 0.01
#: For the last status of each call to leave.
_LAST_SECONDS = 1.0


class Port:
    """A port. It must be opened, used and drained inside one running event loop.

    Args:
        routes: what answers which call.
        limits: what a client may take.
        context: for TLS; None serves without it.
    """

    def __init__(self, routes: Routes, limits: Limits, context: ssl.SSLContext | None = None) -> None:
        self._routes = routes
        self._limits = limits
        self._context = context
        self._connections: set[Connection] = set()

    async def open(self, host: str, port: int) -> int:
        """Listen, and return where.

        Args:
            host: the address.
            port: 0 is any free one.

        Raises:
            OSError: the port cannot be taken.
        """
        loop = asyncio.get_running_loop()
        seconds = self._limits.handshake_seconds if self._context else None
        self._server = await loop.create_server(
            self._connection, host, port, ssl=self._context, ssl_handshake_timeout=seconds
        )
        taken: int = self._server.sockets[0].getsockname()[1]
        return taken

    def _connection(self) -> Connection:
        return Connection(self._routes.find, self._limits, self._connections)

    async def drain(self, grace_seconds: float) -> None:
        """Refuse new calls, let the accepted ones end, then close the port."""
        limit = time.monotonic() + grace_seconds
        self._server.close()
        for connection in list(self._connections):
            connection.refuse_soon()
        if self._connections:
            await asyncio.sleep(min(_NOTICE_SECONDS, grace_seconds))
        for connection in list(self._connections):
            connection.refuse()
        while not all(connection.idle for connection in self._connections) and time.monotonic() < limit:
            await asyncio.sleep(_LOOK_SECONDS)
        await asyncio.gather(*(connection.stop() for connection in list(self._connections)))
        limit = time.monotonic() + _LAST_SECONDS
        while self._connections and time.monotonic() < limit:
            await asyncio.sleep(_LOOK_SECONDS)
        for connection in list(self._connections):
            connection.abort()
