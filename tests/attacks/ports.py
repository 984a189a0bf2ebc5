"""Attacks with connections and heads, on both ports of HTTP and over TLS."""

import selectors
import socket
import time
from contextlib import ExitStack, closing, suppress

from tests.attacks.measure import attack
from tests.attacks.target import FILES, Setup
from tests.attacks.wire import SECONDS, connect, http_request, stay, until
from tests.attacks.witness import HOST

#: One server of HTTP has both ports.
_HTTP = {"transports": ("nghttp2",)}
_START = b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n"
_TLS = Setup(tls=True)


def _connections(port, count, stack):
    """Return as many connections as the server takes at once."""
    made = [stack.enter_context(closing(socket.socket())) for _ in range(count)]
    for one in made:
        one.setblocking(False)
        one.connect_ex((HOST, port))
    opened = []
    with selectors.DefaultSelector() as waiting:
        for one in made:
            waiting.register(one, selectors.EVENT_WRITE)
        for _ in until(1.2):  # a full backlog is tried again after a second
            for key, _ in waiting.select(0.1):
                one = key.fileobj
                waiting.unregister(one)
                if not one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    one.settimeout(SECONDS)
                    opened.append(one)
            if not waiting.get_map():
                break
    return opened


def _send_all(connections, *parts):
    for one in connections:
        with suppress(OSError):
            for part in parts:
                one.sendall(part)


@attack(**_HTTP)
def large_heads(target):
    """64 connections to the port of the metrics, of 64 headers of 60 KB each, without their end."""
    headers = [b"X-%d: " % number + b"y" * 60_000 + b"\r\n" for number in range(64)]
    with ExitStack() as stack:
        _send_all(_connections(target.metrics_port, 64, stack), _START, *headers)


@attack(**_HTTP)
def pipelined_requests(target):
    """5 MB of requests in one write."""
    with suppress(OSError), closing(connect(target.http_port)) as connection:
        connection.sendall(http_request("GET /v2/health/live") * 100_000)
        stay(connection, 0.5)


@attack(**_HTTP)
def many_dripping_heads(target):
    """600 connections to the HTTP port, each with a head of which a line comes at a time, and no end."""
    with ExitStack() as stack:
        opened = _connections(target.http_port, 600, stack)
        _send_all(opened, _START)
        for _ in until(0.5):
            _send_all(opened, b"X: y\r\n")
            time.sleep(0.1)


@attack(spares=("http",))
def exhausted_files(target):
    """More idle connections to the HTTP port than the process may open files; the other ports answer."""
    with ExitStack() as stack:
        _connections(target.http_port, FILES + 100, stack)
        for _ in until(1.5):  # a connection that the server closed leaves a file
            _connections(target.http_port, 20, stack)


@attack(doors=("grpc_port", "http_port"), setup=_TLS)
def stalled_handshakes(target, door):
    """600 connections that begin TLS and do not go on."""
    first = target.readings[-1].files
    with ExitStack() as stack:
        opened = _connections(getattr(target, door), 600, stack)
        _send_all(opened, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
        time.sleep(0.5)
        held = target.readings[-1].files - first
    return f"{held} handshakes held" if held > 520 else None
