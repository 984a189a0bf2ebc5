"""The HTTP endpoint: a WSGI application on a port, a thread for each connection, and one request on each."""

from __future__ import annotations

import logging
import socket
import threading
from socketserver import TCPServer, ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.headers import Headers
from wsgiref.simple_server import ServerHandler, WSGIRequestHandler, WSGIServer

from edge.errors import INTERNAL, Literally, UsageError

if TYPE_CHECKING:
    from _typeshed.wsgi import WSGIApplication

    from edge.security.credentials import ServerCertificates

log = logging.getLogger(__name__)

#: A connection without traffic for so long is closed.
_IDLE_SECONDS = 10.0
#: Further connections are closed at once, which bounds the threads.
_MAX_CONNECTIONS = 64
_MAX_LINE_BYTES = 64 * 1024
#: A refusal is lost on a client whose request was not read, so as much of a body is.
_MAX_BODY_BYTES = 64 * 1024


class HttpServer:
    """Serves an application over HTTP/1.1, closing each connection after its answer.

    Args:
        application: what answers; it has to give Content-Length.
        host: the address to listen on.
        port: 0 lets the system choose.
        certificates: for TLS; None serves without it.

    Attributes:
        port: where it listens.

    Raises:
        UsageError: the port cannot be taken.
    """

    def __init__(
        self, application: WSGIApplication, host: str, port: int, certificates: ServerCertificates | None = None
    ) -> None:
        try:
            self._server = _Server(host, port, certificates)
        except OSError as error:
            fix = "Give another --metrics-port, or 0 for any free one."
            raise UsageError(
                f"--metrics-port {port}", given=Literally(error), expected="a free port", fix=fix
            ) from None
        self._server.set_app(application)
        self.port: int = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, name="http", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = _MAX_CONNECTIONS

    def __init__(self, host: str, port: int, certificates: ServerCertificates | None) -> None:
        self._certificates = certificates
        self._free = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        self.address_family = family
        super().__init__((str(address[0]), port), _Connection)

    def server_bind(self) -> None:
        # Not the parent's, which asks DNS for the name of this host and may wait for the answer.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

    def get_request(self) -> tuple[Any, Any]:
        connection, address = super().get_request()
        if self._certificates is None:
            return connection, address
        # The handshake comes with the first read, in the connection's own thread and within its time.
        context = self._certificates.now.http
        return context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False), address

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("an HTTP connection broke", exc_info=True)


class _Connection(WSGIRequestHandler):
    server: _Server
    timeout = _IDLE_SECONDS

    def handle(self) -> None:
        self.raw_requestline = self.rfile.readline(_MAX_LINE_BYTES + 1)
        if len(self.raw_requestline) > _MAX_LINE_BYTES:
            self.requestline, self.request_version, self.command = "", "", ""
            self.send_error(414)
        elif self.raw_requestline and self.parse_request():
            self.rfile.read(min(_body_bytes(self.headers.get("Content-Length", "")), _MAX_BODY_BYTES))
            exchange = _Exchange(self.rfile, self.wfile, self.get_stderr(), self.get_environ())  # type: ignore[arg-type]
            exchange.request_handler = self
            application = self.server.get_app()
            assert application is not None
            exchange.run(application)

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)


class _Exchange(ServerHandler):
    http_version = "1.1"
    server_software = "fewheads"
    error_body = f"{INTERNAL}\n".encode()

    headers: Headers
    request_handler: WSGIRequestHandler

    def cleanup_headers(self) -> None:
        super().cleanup_headers()
        self.headers["Connection"] = "close"

    def log_exception(self, exc_info: Any) -> None:
        log.error("an HTTP request failed", exc_info=exc_info)


def _body_bytes(length: str) -> int:
    return int(length) if length.isascii() and length.isdecimal() and len(length) < 20 else 0
