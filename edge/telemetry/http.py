"""The metrics port: a thread for each connection, one request on each, and limits on both."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import unquote

from edge.errors import INTERNAL, Literally, UsageError

if TYPE_CHECKING:
    from email.message import Message

    from edge.security.credentials import ServerCertificates

log = logging.getLogger(__name__)

#: A connection without traffic for this time is closed.
_IDLE_SECONDS: Final = 10.0
#: Further connections are closed at once, which limits the number of threads.
_MAX_CONNECTIONS: Final = 64
_MAX_LINE_BYTES: Final = 64 * 1024
#: A client may lose the answer to a request that was not read, so this much of a body is read.
_MAX_BODY_BYTES: Final = 64 * 1024


class Response(NamedTuple):
    """A response; ``Content-Length`` and ``Connection`` are added to its headers."""

    status: int
    headers: Mapping[str, str]
    body: bytes


#: Answers a request by its method, its path without the query, and its headers. HEAD is answered as GET is.
Answer = Callable[[str, str, "Message[str, str]"], Response]


class HttpServer(ThreadingMixIn, TCPServer):
    """Serves HTTP/1.1 on threads of its own until it is closed, whatever the server's event loop does meanwhile."""

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = _MAX_CONNECTIONS

    def __init__(self, answer: Answer, host: str, port: int, certificates: ServerCertificates | None = None) -> None:
        self.answer = answer
        self._certificates = certificates
        self._free = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        try:
            family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            self.address_family = family
            super().__init__((str(address[0]), port), _Connection)
        except OSError as error:
            subject, fix = f"--metrics-port {port}", "Give another --metrics-port, or 0 for any free one."
            raise UsageError(subject, given=Literally(error), expected="a free port", fix=fix) from None
        self.port: int = self.server_address[1]
        self._thread = threading.Thread(target=self.serve_forever, name="http", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving and free the port."""
        self.shutdown()
        self.server_close()
        self._thread.join()

    def get_request(self) -> tuple[Any, Any]:
        """Accept a connection."""
        connection, address = super().get_request()
        if self._certificates is None:
            return connection, address
        # The handshake comes with the first read, in the connection's own thread and within its time limit.
        context = self._certificates.value.http
        return context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False), address

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start the thread of a connection, or close the connection where there are too many."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log the end of a broken connection."""
        log.debug("an HTTP connection broke", exc_info=True)


class _Connection(BaseHTTPRequestHandler):
    server: HttpServer
    protocol_version = "HTTP/1.1"
    default_request_version = "HTTP/1.1"  # so that a request without a version gets an error with a status line
    timeout = _IDLE_SECONDS

    def handle(self) -> None:
        self.raw_requestline = self.rfile.readline(_MAX_LINE_BYTES + 1)
        if len(self.raw_requestline) > _MAX_LINE_BYTES:
            self.requestline, self.request_version, self.command = "", "", ""
            self.send_error(414)
        elif self.raw_requestline and self.parse_request():
            length = self.headers.get("Content-Length", "")
            is_number = length.isascii() and length.isdecimal() and len(length) < 20
            self.rfile.read(min(int(length), _MAX_BODY_BYTES) if is_number else 0)
            self._answer()

    def _answer(self) -> None:
        try:
            path = unquote(self.path.partition("?")[0])
            response = self.server.answer(self.command, path, self.headers)
        except Exception:
            log.exception("an HTTP request failed")
            response = Response(500, {"Content-Type": "text/plain"}, f"{INTERNAL}\n".encode())
        self.send_response(response.status)
        for header in response.headers.items():
            self.send_header(*header)
        self.send_header("Content-Length", str(len(response.body)))
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(response.body)

    def version_string(self) -> str:
        return "fewheads"

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)
