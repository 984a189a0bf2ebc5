"""A listening port or Unix socket: accepts connections within the quota, their TLS handshakes included."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Final

from edge.connections.quota import Quota, Share
from edge.connections.socket_file import SocketFile
from edge.errors import Raw, UsageError

log = logging.getLogger(__name__)

_BACKLOG: Final = 1024
#: The pause after a connection that could not be accepted, because the process or the system has no file for it.
_PAUSE_SECONDS: Final = 0.1
#: Errors of an address that a host has by name alone, such as ::1 without IPv6.
_ABSENT: Final = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def port_is_taken(option: str, host: str, port: int, reason: str) -> UsageError:
    """Return the error of a server that cannot listen."""
    given, fix = Raw(reason.splitlines()[0]), f"Give another {option}, or 0 for any free one."
    return UsageError(f"{option} {port}", given=given, expected=f"a free port on {host}", fix=fix)


class Listener:
    """A listening port or Unix socket. It is opened and closed inside one running event loop.

    Args:
        name: of the port, in metrics and in the options that set it.
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
        self._name, self._quota, self._max_connections = name, quota, max_connections
        self._protocol, self._context = protocol, context
        self._handshake_seconds = handshake_seconds if context else None
        self._sockets: list[socket.socket] = []
        self._file: SocketFile | None = None
        self._accepting: list[asyncio.Task[None]] = []
        self._establishing: set[asyncio.Task[None]] = set()

    async def open(self, host: str, port: int, path: Path | None = None) -> int:
        """Listen on all addresses of a host, and return the port number; port 0 takes any free one.

        With a ``path``, listen on that Unix socket instead, and return 0. Raise a UsageError if an address or the port
        cannot be taken, and as :class:`SocketFile` does.
        """
        if path:
            file = SocketFile(f"--{self._name}-socket", path)
            self._sockets, bound = [file.make(_listening_at)], 0
            self._file = file
        else:
            bound = await self._open_port(host, port)
        self._accepting = [asyncio.create_task(self._accept(each)) for each in self._sockets]
        return bound

    async def _open_port(self, host: str, port: int) -> int:
        loop = asyncio.get_running_loop()
        bound, absent = port, None
        try:
            addresses = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            for family, *_, address in dict.fromkeys(addresses):
                made = _listening(family, str(address[0]), bound)
                if isinstance(made, OSError):
                    absent = made
                    continue
                self._sockets.append(made)
                bound = made.getsockname()[1]
            if absent and not self._sockets:
                raise absent
        except OSError as error:
            self._close_sockets()
            raise port_is_taken(f"--{self._name}-port", host, port, str(error)) from None
        return bound

    async def close(self) -> None:
        """Accept no further connection; those that still shake hands end."""
        tasks = [*self._accepting, *self._establishing]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._close_sockets()

    def _close_sockets(self) -> None:
        for each in self._sockets:
            each.close()
        self._sockets.clear()
        if self._file:
            self._file.remove()

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(listening)
            except OSError as error:
                log.debug("the port of %s could not accept a connection: %s", self._name, error)
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            share = self._quota.connect(self._name, self._max_connections, accepted.close)
            if share is None:
                accepted.close()
            else:
                task = loop.create_task(self._establish(accepted, share))
                share.follow(task.cancel)
                self._establishing.add(task)
                task.add_done_callback(self._establishing.discard)
            await asyncio.sleep(0)  # sock_accept() does not wait where a connection is there already

    async def _establish(self, accepted: socket.socket, share: Share) -> None:
        made = False

        def protocol() -> asyncio.Protocol:
            nonlocal made
            made = True
            return self._protocol(share)

        try:
            transport, _ = await asyncio.get_running_loop().connect_accepted_socket(
                protocol, accepted, ssl=self._context, ssl_handshake_timeout=self._handshake_seconds
            )
            if share.closed:  # while it shook hands
                transport.abort()
        except (Exception, asyncio.CancelledError) as error:
            log.debug("a connection to the port of %s ended in its handshake: %s", self._name, error)
            share.close()
            if not made:
                accepted.close()


def _listening_at(path: Path) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    try:
        made.bind(os.fsencode(path))
        made.listen(_BACKLOG)
    except OSError:
        made.close()
        raise
    made.setblocking(False)
    return made


def _listening(family: int, host: str, port: int) -> socket.socket | OSError:
    """Return a listening socket, or the error of an address that this machine does not have."""
    try:
        made = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        if error.errno in _ABSENT:
            return error
        raise
    made.setblocking(False)
    # Connections inherit it: a client delays its acknowledgement of a small packet by 40 ms.
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made
