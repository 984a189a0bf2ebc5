"""An HTTP server of any application in a thread of the test, and clients that send it bytes."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from edge.connections.quota import Quota
from edge.http.messages import Application
from edge.http.server import HttpServer
from edge.security.certificates import ServerCertificates
from tests.support.secured_servers import Authority


class Running(NamedTuple):
    """The port of a server and its quota, which the thread of the server changes; ``tls`` is a client's context."""

    port: int
    quota: Quota
    tls: ssl.SSLContext | None = None

    def connect(self) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        return self.tls.wrap_socket(connection, server_hostname="localhost") if self.tls else connection

    @property
    def reasons(self) -> set[str]:
        return {refusal.reason for refusal in self.quota.refusals.copy()}

    def send(self, *pieces: bytes) -> bytes:
        with self.connect() as connection:
            for piece in pieces:
                connection.sendall(piece)
            return everything(connection)


def everything(connection: socket.socket) -> bytes:
    """Return what a server sends until it closes the connection."""
    return b"".join(iter(lambda: connection.recv(65536), b""))


@contextmanager
def http_server(
    application: Application,
    *,
    quota: Quota | None = None,
    max_connections: int = 64,
    host: str = "127.0.0.1",
    port: int = 0,
    new_event_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
    authority: Authority | None = None,
) -> Iterator[Running]:
    """Serve an application while the block runs, as the port of metrics; with an ``authority`` over TLS."""
    quota = quota or Quota(10**8, 10**8)
    loop = new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def run(work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(30)

    async def make() -> HttpServer:
        certificates = ServerCertificates(*authority.issue(), client_ca=None) if authority else None
        return HttpServer("metrics", application, quota, max_connections, certificates)

    try:
        server = run(make())
        run(server.start(host, port))
        try:
            tls = ssl.create_default_context(cafile=str(authority.file)) if authority else None
            yield Running(server.port, quota, tls)
        finally:
            run(server.drain(1))
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
