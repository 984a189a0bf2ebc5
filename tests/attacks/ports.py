"""Attacks with connections and heads, on both ports of HTTP and over TLS."""

import selectors
import socket
import time
from contextlib import ExitStack, closing, suppress

from tests.attacks.measure import attack
from tests.attacks.target import FILES, SPECIAL, Setup
from tests.attacks.wire import SECONDS, connect, http_request, stay, until
from tests.attacks.witness import HOST

#: Of each port of HTTP: how its door is named, a path that answers, and the scope of the token for it.
_PORTS = {"http": ("/v2", "infer"), "metrics": ("/telemetry.json", "metrics")}
_EACH = {"doors": _PORTS, "transports": ("nghttp2",)}
_TLS = Setup(tls=True)


def _port(target, door):
    return {"grpc": target.grpc_port, "http": target.http_port, "metrics": target.metrics_port}[door]


def _bearer(target, door):
    return f"Authorization: Bearer {target.home.tokens[_PORTS[door][1]]}"


def _connections(target, door, count, stack):
    """Return as many connections as the server takes at once."""
    made = [stack.enter_context(closing(socket.socket())) for _ in range(count)]
    for one in made:
        one.setblocking(False)
        one.connect_ex((HOST, _port(target, door)))
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


def _start(door):
    return f"GET {_PORTS[door][0]} HTTP/1.1\r\nHost: localhost\r\n".encode()


def _drip(target, door, count, seconds):
    """Send a head on each of many connections, a line at a time, and never end it."""
    with ExitStack() as stack:
        opened = _connections(target, door, count, stack)
        _send_all(opened, _start(door))
        for _ in until(seconds):
            _send_all(opened, b"X: y\r\n")
            time.sleep(0.1)


@attack(**_EACH)
def dripping_heads(target, door):
    _drip(target, door, 64, 1.0)


@attack(**_EACH)
def large_heads(target, door):
    """64 connections of 64 headers of 60 KB each, without their end."""
    headers = [b"X-%d: " % number + b"y" * 60_000 + b"\r\n" for number in range(64)]
    with ExitStack() as stack:
        _send_all(_connections(target, door, 64, stack), _start(door), *headers)


@attack(**_EACH)
def large_head_at_once(target, door):
    """A head of 100 KB in one write."""
    headers = [_bearer(target, door), *(f"X-{number}: {'y' * 1000}" for number in range(100))]
    return _accepted(target, door, http_request(f"GET {_PORTS[door][0]}", headers), "a head of 100 KB")


@attack(**_EACH, setup=Setup(tokens=False))  # a web page sends no token of the server
def foreign_host(target, door):
    """A web page whose own name points to this host."""
    request = http_request(f"GET {_PORTS[door][0]}", [_bearer(target, door)]).replace(b"localhost", b"evil.example")
    return _accepted(target, door, request, "evil.example")


def _accepted(target, door, request, what):
    with suppress(OSError), closing(connect(_port(target, door))) as connection:
        connection.sendall(request)
        if stay(connection, 0.3).startswith(b"HTTP/1.1 200"):
            return f"status 200 for {what}"
    return None


@attack(**_EACH)
def smuggled_requests(target, door):
    """A request inside the body of another one, whose length is said twice."""
    path, hidden = _PORTS[door][0], http_request("GET /hidden")
    lengths = (
        ["Content-Length: 0", f"Content-Length: {len(hidden)}"],
        ["Transfer-Encoding: chunked", f"Content-Length: {len(hidden)}"],
        [f"Content-Length: {len(hidden)}", "Transfer-Encoding: x, identity"],
        [f"Content-Length: +{len(hidden)}"],
    )
    for each in lengths:
        with suppress(OSError), closing(connect(_port(target, door))) as connection:
            connection.sendall(http_request(f"POST {path}", each, hidden))
            if (statuses := stay(connection, 0.1).count(b"HTTP/1.1 ")) > 1:
                return f"{statuses} answers to {each}"
    return None


@attack(**_EACH)
def pipelined_requests(target, door):
    """5 MB of requests in one write."""
    with suppress(OSError), closing(connect(_port(target, door))) as connection:
        connection.sendall(http_request("GET /v2/health/live") * 100_000)
        stay(connection, 0.5)


@attack(**_EACH, setup=SPECIAL)
def secrets_in_paths(target, door):
    """Escapes for a terminal, and a token, in a path that is logged."""
    before = target.log.stat().st_size
    for path in ("/v2/%1b%5b31mred", "/v2/\x1b[31mred", "/v2?token=my-secret"):
        _accepted(target, door, http_request(f"GET {path}"), path)
    log = target.log.read_bytes()[before:]
    return next((f"{each!r} in the log" for each in (b"\x1b[31mred", b"my-secret") if each in log), None)


@attack(transports=("nghttp2",))
def many_dripping_heads(target):
    """600 connections to the HTTP port, each with a head that does not end."""
    _drip(target, "http", 600, 0.5)


@attack(spares=("http",))
def exhausted_files(target):
    """More idle connections to the HTTP port than the process may open files; the other ports answer."""
    with ExitStack() as stack:
        _connections(target, "http", FILES + 100, stack)
        for _ in until(1.5):  # a connection that the server closed leaves a file
            _connections(target, "http", 20, stack)


@attack(doors=("grpc",), setup=_TLS)
@attack(**_EACH, setup=_TLS)
def stalled_handshakes(target, door):
    """600 connections that begin TLS and do not go on."""
    first = target.readings[-1].files
    with ExitStack() as stack:
        _send_all(_connections(target, door, 600, stack), b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
        time.sleep(0.5)
        held = target.readings[-1].files - first
    return f"{held} handshakes held" if held > 520 else None
