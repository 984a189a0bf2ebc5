"""Common base of the blocking and the asyncio client: arguments, connections, and the watch over lost ones."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, ClassVar

from edge.client.connection import Connection, Credentials
from edge.client.retries import DEFAULT_RETRIES, Retries
from edge.client.server_pool import DEFAULT_URL, ServerPool


class BaseClient:
    """Connections to one server, or to several that serve the same models.

    Args:
        url: ``host:port``, or several of them, which take turns.
        timeout_seconds: time limit of a call, all its attempts together.
        retries: limits of the retries; :data:`ONCE` disables them.
        credentials: TLS and a token, the same for all servers; None uses neither.

    Attributes:
        servers: addresses of the servers.

    Raises:
        UsageError: there is no server, a server is given twice or with a scheme, or the time limit is out of range.
    """

    #: :mod:`grpc` or :mod:`grpc.aio`.
    _transport: ClassVar[Any]

    def __init__(
        self,
        url: str | Sequence[str] = DEFAULT_URL,
        timeout_seconds: float = 10.0,
        *,
        retries: Retries = DEFAULT_RETRIES,
        credentials: Credentials | None = None,
    ) -> None:
        tls = bool(credentials and credentials.tls)
        self._pool = ServerPool(url, timeout_seconds, retries, self._watch, tls=tls)
        self.servers = self._pool.urls
        self._connections = [Connection(server, credentials, self._transport) for server in self.servers]
        self._watched: set[int] = set()
        self._lock = threading.Lock()

    def _watch(self, server: int) -> None:
        with self._lock:
            if server in self._watched:
                return
            self._watched.add(server)

        def connected() -> None:
            self._watched.discard(server)
            self._pool.round_robin.connected(server)

        try:
            self._connections[server].when_connected(connected)
        except ValueError:  # grpc raises it if another thread has closed the channel
            connected()
