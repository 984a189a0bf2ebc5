"""The HTTP port of the protocol, with its limit for request heads and its drain."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import uvicorn

from edge.rest.paths import RestApi
from edge.rpc.endpoint import port_is_taken

if TYPE_CHECKING:
    from edge.security.credentials import ServerCertificates

#: The limit for the request line and all headers together.
_MAX_HEAD_BYTES: Final = 32 * 1024
#: An idle connection closes after this time. Stock clients reuse connections, and many proxies do for a minute.
_KEEP_ALIVE_SECONDS: Final = 75
_BACKLOG: Final = 1024


class RestServer:
    """The HTTP endpoint of the protocol. It is created, used and drained inside one running event loop."""

    def __init__(self, api: RestApi, certificates: ServerCertificates | None = None) -> None:
        self.port = 0  # until the server listens
        self._serving: asyncio.Task[None] | None = None
        self._server = _Server(
            uvicorn.Config(
                api.application,
                # The parser in C is faster, but has no limit for heads.
                http="h11",
                h11_max_incomplete_event_size=_MAX_HEAD_BYTES,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                backlog=_BACKLOG,
                ws="none",
                lifespan="off",
                proxy_headers=False,
                server_header=False,
                access_log=False,
                log_config=None,
                # uvicorn warns of each request that is not HTTP, and scanners send many.
                log_level="error",
                ssl_context_factory=(lambda *_: certificates.follow(lambda now: now.http)) if certificates else None,
            )
        )

    async def start(self, host: str, port: int) -> None:
        """Listen."""
        try:
            family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            listener = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
            # Connections inherit it. Head and body of a response are two packets, and clients delay the acknowledgement
            # of the first by 40 ms.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            raise port_is_taken("--http-port", host, port, str(error)) from None
        self.port = listener.getsockname()[1]
        self._serving = asyncio.create_task(self._server.serve([listener]))
        while not self._server.started:
            await asyncio.sleep(0)
            if self._serving.done():
                self._serving.result()

    async def drain(self, grace_seconds: float) -> None:
        """Accept no further request, and close the port after the accepted ones end. A second call has no effect."""
        if self._serving:
            self._server.config.timeout_graceful_shutdown = grace_seconds  # type: ignore[assignment]
            self._server.should_exit = True
            await self._serving


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # the composition root handles signals
