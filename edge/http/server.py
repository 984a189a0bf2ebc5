"""An HTTP port."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from edge.connections.listener import Listener
from edge.connections.quota import Quota, Share
from edge.http.connection import HttpConnection
from edge.http.messages import Application

if TYPE_CHECKING:
    from edge.security.certificates import ServerCertificates

_DRAIN_CHECK_SECONDS: Final = 0.01


class HttpServer:
    """Serves an ASGI application over HTTP/1.1. It is created, used and drained inside one running event loop.

    Args:
        name: of the port, as in :class:`edge.connections.listener.Listener`.
    """

    def __init__(
        self,
        name: str,
        application: Application,
        quota: Quota,
        max_connections: int,
        certificates: ServerCertificates | None = None,
    ) -> None:
        self.port = 0  # until the server listens
        self._application = application
        self._connections: set[HttpConnection] = set()
        context = certificates.follow(lambda now: now.http) if certificates else None
        self._listener = Listener(name, quota, max_connections, self._connection, context)

    async def start(self, host: str, port: int) -> None:
        """Listen.

        Raises:
            UsageError: the port cannot be taken.
        """
        self.port = await self._listener.open(host, port)

    async def drain(self, grace_seconds: float) -> None:
        """Accept no further request, and close the port after the accepted ones end. A second call has no effect."""
        if not self.port:
            return
        self.port = 0
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
