"""A listening port: accepts connections within the quota, their TLS handshakes included."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Final

from edge.connections.quota import Quota, Share

log = logging.getLogger(__name__)

_BACKLOG: Final = 1024
#: The pause after a connection that could not be accepted, because the process or the system has no file for it.
_PAUSE_SECONDS: Final = 0.1


class Listener:
    """A listening port. It is opened and closed inside one running event loop.

    Args:
        name: of the port, in metrics.
        protocol: makes the protocol of a connection from its share of the quota; the protocol closes the share.
        handshake_seconds: the limit for TLS.
    """

    def __init__(
        self,
        name: str,
        quota: Quota,
        max_connections: int,
        protocol: Callable[[Share], asyncio.Protocol],
        context: ssl.SSLContext | None = None,
        handshake_seconds: float = 10.0,
    ) -> None:
        self._name = name
        self._quota = quota
        self._max_connections = max_connections
        self._protocol = protocol
        self._context = context
        self._handshake_seconds = handshake_seconds if context else None
        self._establishing: set[asyncio.Task[None]] = set()

    async def open(self, host: str, port: int) -> int:
        """Listen, and return the port number; port 0 takes any free one.

        Raises:
            OSError: the address or the port cannot be taken.
        """
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, *_, address = found[0]
        self._socket = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
        self._socket.setblocking(False)
        # Connections inherit it: a client delays its acknowledgement of a small packet by 40 ms.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._accepting = loop.create_task(self._accept())
        bound: int = self._socket.getsockname()[1]
        return bound

    async def close(self) -> None:
        """Accept no further connection; those that still shake hands end."""
        self._accepting.cancel()
        for task in self._establishing:
            task.cancel()
        await asyncio.gather(self._accepting, *self._establishing, return_exceptions=True)
        self._socket.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(self._socket)
            except OSError as error:
                log.debug("the port of %s could not accept a connection: %s", self._name, error)
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            share = self._quota.connect(self._name, self._max_connections, accepted.close)
            if share is None:
                accepted.close()
                continue
            task = loop.create_task(self._establish(accepted, share))
            share.follow(task.cancel)
            self._establishing.add(task)
            task.add_done_callback(self._establishing.discard)

    async def _establish(self, accepted: socket.socket, share: Share) -> None:
        made = False

        def protocol() -> asyncio.Protocol:
            nonlocal made
            made = True
            return self._protocol(share)

        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                protocol, accepted, ssl=self._context, ssl_handshake_timeout=self._handshake_seconds
            )
        except (OSError, asyncio.CancelledError) as error:  # SSLError and TimeoutError are OSErrors
            log.debug("a connection to the port of %s ended in its handshake: %s", self._name, error)
            share.close()
            if not made:
                accepted.close()
