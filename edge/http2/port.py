"""Listening socket of the nghttp2 transport: accepts connections and drains them."""

from __future__ import annotations

import asyncio
import ssl
import time

from edge.http2.connection import Connection
from edge.http2.routes import Routes
from edge.rpc.limits import Limits

#: Between the first GOAWAY, which announces the shutdown, and the final one: calls already on their way still arrive.
_NOTICE_SECONDS = 0.1
_POLL_SECONDS = 0.01
#: For the statuses of cancelled calls to be sent.
_FLUSH_SECONDS = 1.0


class Port:
    """A listening port. It is opened, used and drained inside one running event loop.

    Args:
        routes: the methods.
        limits: limits of connections and messages.
        context: for TLS; None serves plain text.
    """

    def __init__(self, routes: Routes, limits: Limits, context: ssl.SSLContext | None = None) -> None:
        self._routes = routes
        self._limits = limits
        self._context = context
        self._connections: set[Connection] = set()

    async def open(self, host: str, port: int) -> int:
        """Listen, and return the port number.

        Args:
            host: the address to bind.
            port: the port to bind; 0 takes any free one.

        Raises:
            OSError: the port cannot be bound.
        """
        loop = asyncio.get_running_loop()
        seconds = self._limits.handshake_seconds if self._context else None
        self._server = await loop.create_server(
            self._connection, host, port, ssl=self._context, ssl_handshake_timeout=seconds
        )
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    def _connection(self) -> Connection:
        return Connection(self._routes.find, self._limits, self._connections)

    async def drain(self, grace_seconds: float) -> None:
        """Refuse new calls, let the accepted ones end, then close every connection.

        Args:
            grace_seconds: how long accepted calls may take; then they are cancelled.
        """
        limit = time.monotonic() + grace_seconds
        self._server.close()
        for connection in list(self._connections):
            connection.refuse_soon()
        if self._connections:
            await asyncio.sleep(min(_NOTICE_SECONDS, grace_seconds))
        for connection in list(self._connections):
            connection.refuse()
        while not all(connection.idle for connection in self._connections) and time.monotonic() < limit:
            await asyncio.sleep(_POLL_SECONDS)
        await asyncio.gather(*(connection.stop() for connection in list(self._connections)))
        limit = time.monotonic() + _FLUSH_SECONDS
        while self._connections and time.monotonic() < limit:
            await asyncio.sleep(_POLL_SECONDS)
        for connection in list(self._connections):
            connection.abort()
