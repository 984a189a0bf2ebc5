"""An HTTP server of any application in a thread of the test, and clients that send it bytes."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from edge.connections.quota import Quota
from edge.http.asgi import Application
from edge.http.server import HttpServer


class Running(NamedTuple):
    """The port of a server and its quota, which the thread of the server changes."""

    port: int
    quota: Quota

    @property
    def reasons(self) -> set[str]:
        """The reasons of all refusals so far."""
        return {refusal.reason for refusal in self.quota.refusals.copy()}

    def send(self, *pieces: bytes) -> bytes:
        """Send bytes, and return all of the answer."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=30) as connection:
            for piece in pieces:
                connection.sendall(piece)
            return everything(connection)


def everything(connection: socket.socket) -> bytes:
    """Return what a server sends until it closes the connection."""
    answer = b""
    while data := connection.recv(65536):
        answer += data
    return answer


@contextmanager
def http_server(
    application: Application,
    *,
    quota: Quota | None = None,
    max_connections: int = 64,
    host: str = "127.0.0.1",
    port: int = 0,
    **options: Any,
) -> Iterator[Running]:
    """Serve an application while the block runs, as the port of metrics."""
    quota = quota or Quota(10**8, 10**8)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def run(work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(30)

    async def make() -> HttpServer:
        return HttpServer("metrics", application, quota, max_connections, **options)

    try:
        server = run(make())
        run(server.start(host, port))
        try:
            yield Running(server.port, quota)
        finally:
            run(server.drain(1))
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
