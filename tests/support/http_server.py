"""An HTTP server of any application in a thread of the test, and clients that send it bytes."""

import asyncio
import socket
import ssl
import threading
from contextlib import contextmanager
from typing import NamedTuple

from edge.connections.quota import Quota
from edge.http.server import HttpServer
from edge.security.certificates import ServerCertificates


class Running(NamedTuple):
    """The port of a server and its quota, which the thread of the server changes; ``tls`` is a client's context."""

    port: int
    quota: Quota
    tls: ssl.SSLContext | None = None

    def connect(self):
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        return self.tls.wrap_socket(connection, server_hostname="localhost") if self.tls else connection

    @property
    def reasons(self):
        return {refusal.reason for refusal in self.quota.refusals.copy()}

    def send(self, *pieces):
        with self.connect() as connection:
            for piece in pieces:
                connection.sendall(piece)
            return everything(connection)


def everything(connection):
    return b"".join(iter(lambda: connection.recv(65536), b""))


@contextmanager
def http_server(
    application,
    *,
    quota=None,
    max_connections=64,
    host="127.0.0.1",
    port=0,
    new_event_loop=asyncio.new_event_loop,
    authority=None,
):
    """Serve an application while the block runs, as the port of metrics; with an ``authority`` over TLS."""
    quota = quota or Quota(10**8, 10**8)
    loop = new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def run(work):
        return asyncio.run_coroutine_threadsafe(work, loop).result(30)

    async def make():
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
