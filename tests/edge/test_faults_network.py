"""Malformed and hostile clients, and clients that are killed: bytes on sockets, to the whole server."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import psutil
import pytest
from hyperframe.frame import ContinuationFrame, DataFrame, HeadersFrame, RstStreamFrame

from edge.pb import inference_pb2 as pb
from edge.pb import inference_pb2_grpc
from edge.server import Ready
from tests.support.busy_model import busy, failures
from tests.support.http2_client import OPENING, RawClient, raw
from tests.support.metrics import gauges, is_at_rest, wait_until

#: These tests concern the protocol, which every transport carries.
ON_EVERY_TRANSPORT = True

Stub = inference_pb2_grpc.GRPCInferenceServiceStub
INFER = "/inference.GRPCInferenceService/ModelInfer"
CANCEL = 8
#: Memory of a connection and its buffers; far below the sizes announced or sent.
ALLOWED_GROWTH_BYTES = 16 * 2**20


class Watched:
    """Memory and open files of a server since the start of a test."""

    def __init__(self, server: Ready) -> None:
        self._process = psutil.Process(server.process_id)
        self._files, self._bytes = self._process.num_fds(), self._process.memory_info().rss

    def grown(self) -> int:
        return int(self._process.memory_info().rss - self._bytes)

    def has_closed_files(self) -> bool:
        return wait_until(lambda: self._process.num_fds() <= self._files)


@pytest.fixture
def watched(server: Ready, stub: Stub) -> Watched:
    stub.ServerLive(pb.ServerLiveRequest())  # so that the connection of this client is open
    return Watched(server)


def is_served(stub: Stub) -> bool:
    return bool(stub.ModelInfer(busy(3), timeout=10).raw_output_contents[0] == np.int64(3).tobytes())


async def test_unfinished_messages_take_little_memory(server: Ready, stub: Stub, watched: Watched) -> None:
    """A hundred messages of 32 MiB are announced, and one byte of each is sent."""
    async with RawClient(server.grpc_port) as client:
        await client.greet().agreed()
        for number in range(100):
            stream = 2 * number + 1
            client.send(client.head(stream, "ModelInfer", _path=INFER), DataFrame(stream, b"\0\2\0\0\0x"))
        await client.writer.drain()
        assert all(is_served(stub) for _ in range(5))
        assert watched.grown() < ALLOWED_GROWTH_BYTES
    assert watched.has_closed_files()
    assert gauges(server, "queue_depth", "queue_bytes") == [0, 0]


async def test_endless_headers_take_no_memory(server: Ready, stub: Stub, watched: Watched, transport: str) -> None:
    """The CONTINUATION flood: 20 MB of headers, none of them the last."""
    async with RawClient(server.grpc_port) as client:
        await client.greet().agreed()
        client.send(HeadersFrame(1, client.head(1, "ModelInfer", _path=INFER).data))
        field = client.encoder.encode([("x", "y" * 1000)])
        for _ in range(200):
            client.send(*(ContinuationFrame(1, field * 10) for _ in range(10)))
        await (client.end() if transport == "nghttp2" else client.answer())
    assert is_served(stub)
    assert watched.grown() < ALLOWED_GROWTH_BYTES
    assert watched.has_closed_files()


async def reset_at_once(server: Ready, stub: Stub) -> None:
    async with RawClient(server.grpc_port) as client:
        await client.greet().agreed()
        message = busy(1).SerializeToString()
        for stream in range(1, 1500, 2):
            client.send(client.head(stream, "ModelInfer", _path=INFER), client.body(stream, message))
            client.send(RstStreamFrame(stream, error_code=CANCEL))
        assert is_served(stub)
    assert wait_until(lambda: gauges(server, "queue_depth", "queue_bytes") == [0, 0])


async def test_rapid_resets_leave_nothing(server: Ready, stub: Stub, watched: Watched) -> None:
    await reset_at_once(server, stub)
    warm = Watched(server)  # the pools of the allocator have grown
    await reset_at_once(server, stub)
    assert warm.grown() < ALLOWED_GROWTH_BYTES
    assert watched.has_closed_files()


def noise(source: random.Random) -> bytes:
    return source.randbytes(source.randrange(200))


def frame(source: random.Random) -> bytes:
    """Return a frame with the right length and random contents."""
    stream_id = source.choice([0, 1, 2, 3, 2**31 - 1])
    return raw(source.randrange(12), source.randrange(256), stream_id, noise(source))


@pytest.mark.parametrize(
    "garbage",
    [
        noise,
        lambda source: OPENING + noise(source),
        lambda source: OPENING + b"".join(frame(source) for _ in range(6)),
        lambda source: OPENING[: source.randrange(len(OPENING))],
        lambda source: b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" + noise(source),
        lambda source: b"\x16\x03\x01" + noise(source),
    ],
    ids=["noise", "noise after the preface", "frames", "half a preface", "HTTP/1.1", "TLS"],
)
def test_garbage_harms_nobody(
    server: Ready, stub: Stub, watched: Watched, garbage: Callable[[random.Random], bytes]
) -> None:
    source = random.Random(0)
    for _ in range(30):
        with socket.create_connection(("127.0.0.1", server.grpc_port)) as connection:
            connection.sendall(garbage(source))
    assert is_served(stub)
    assert watched.has_closed_files()
    assert watched.grown() < ALLOWED_GROWTH_BYTES


def test_killed_client_leaves_no_request(stub: Stub, server: Ready, url: str) -> None:
    code = (
        "import grpc, time\n"
        f"call = grpc.insecure_channel({url!r}).unary_unary({INFER!r})\n"
        f"calls = [call.future({busy(500).SerializeToString()!r}) for _ in range(20)]\n"
        "time.sleep(60)\n"
    )
    before = failures(stub)
    with subprocess.Popen([sys.executable, "-c", code]) as client:
        try:
            assert wait_until(lambda: gauges(server, "queue_depth")[0] >= 15)
        finally:
            client.kill()
    assert wait_until(lambda: is_at_rest(server), 5)
    assert gauges(server, "queue_bytes") == [0]
    assert failures(stub) - before >= 15
    assert is_served(stub)


def test_http_client_that_never_reads_stops_no_other(server: Ready, stub: Stub, watched: Watched) -> None:
    connections = [socket.create_connection(("127.0.0.1", server.metrics_port or 0)) for _ in range(20)]
    for connection in connections:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n")
    assert all(is_served(stub) for _ in range(5))
    for connection in connections:
        connection.close()
    assert watched.has_closed_files()
