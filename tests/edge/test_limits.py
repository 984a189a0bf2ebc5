"""Limits for one client: connections, time, pings, headers. Most clients here are sockets without a library."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc
import pytest

from edge.rpc.limits import Limits
from edge.server import Ready
from tests.support.http2_client import OPENING, Subject, serving

ON_EVERY_TRANSPORT = True  # it tests the protocol

PING, GOAWAY = 6, 7


@asynccontextmanager
async def echo(limits: Limits, transport: str) -> AsyncIterator[int]:
    """A server that echoes, with our options."""
    if transport == "nghttp2":
        async with serving(Subject(), limits) as port:
            yield port
        return

    server = grpc.aio.server(options=limits.options())
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Test", Subject().methods()),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(0)


def frames(data: bytes) -> list[tuple[int, bytes]]:
    """Type and payload of each HTTP/2 frame."""
    found = []
    while len(data) >= 9:
        size = int.from_bytes(data[:3], "big")
        found.append((data[3], data[9 : 9 + size]))
        data = data[9 + size :]
    return found


def conversation(
    port: int, say: Callable[[socket.socket], None], seconds: float = 2.0
) -> tuple[list[tuple[int, bytes]], bool]:
    """Return the frames that a server sends to a client, and whether it closed the connection in time."""
    received = b""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.settimeout(seconds)
        try:
            connection.sendall(OPENING)
            say(connection)
            while data := connection.recv(65536):
                received += data
        except TimeoutError:
            return frames(received), False
        except OSError:
            pass  # the server hung up before it had read everything
        return frames(received), True


def pings(count: int, pause: float = 0.0) -> Callable[[socket.socket], None]:
    def say(connection: socket.socket) -> None:
        for number in range(count):
            connection.sendall(b"\0\0\x08\x06\0\0\0\0\0" + struct.pack(">Q", number))
            time.sleep(pause)

    return say


async def test_silent_connection_closes(transport: str) -> None:
    async with echo(Limits(handshake_seconds=0.3), transport) as port:
        started = time.monotonic()
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.settimeout(5)
            while await asyncio.to_thread(connection.recv, 1000):
                pass
        assert 0.2 < time.monotonic() - started < 2


async def test_idle_connection_closes_and_the_client_reconnects(transport: str) -> None:
    async with echo(Limits(idle_seconds=0.3), transport) as port:
        _, closed = await asyncio.to_thread(conversation, port, lambda _: None)
        assert closed
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            for _ in range(2):
                assert await channel.unary_unary("/test.Test/Echo")(b"x", timeout=5) == b"x"
                await asyncio.sleep(0.6)


async def test_number_of_connections_is_limited(transport: str) -> None:
    async with echo(Limits(max_connections=4), transport) as port:
        sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(6)]
        for connection in sockets:
            connection.settimeout(0.5)

        def greets(connection: socket.socket) -> bool:
            try:
                connection.sendall(OPENING)
                return bool(connection.recv(1000))
            except OSError:
                return False

        assert sum([await asyncio.to_thread(greets, connection) for connection in sockets]) == 4
        for connection in sockets:
            connection.close()


def test_flood_of_pings_ends_the_connection(server: Ready) -> None:
    sent, closed = conversation(server.grpc_port, pings(100))
    assert closed
    _, closed = conversation(server.grpc_port, pings(Limits.max_ping_strikes + 2))
    assert closed
    sent, closed = conversation(server.grpc_port, pings(Limits.max_ping_strikes), seconds=0.3)
    assert not closed
    assert not [kind for kind, _ in sent if kind == GOAWAY]


async def test_slow_pings_are_answered(transport: str) -> None:
    async with echo(Limits(min_ping_seconds=0.05, max_ping_strikes=2), transport) as port:
        sent, closed = await asyncio.to_thread(conversation, port, pings(6, pause=0.12), 0.2)
        assert not closed
        assert sum(kind == PING for kind, _ in sent) == 6
        _, closed = await asyncio.to_thread(conversation, port, pings(12, pause=0.02), 0.5)
        assert closed


@pytest.mark.parametrize(("size", "fits"), [(7000, True), (8192, False), (2**20, False)])
def test_size_of_headers_is_limited(channel: grpc.Channel, size: int, fits: bool, transport: str) -> None:
    live = channel.unary_unary("/inference.GRPCInferenceService/ServerLive")
    if fits:
        assert live(b"", metadata=[("x", "y" * size)], timeout=10)
        return
    with pytest.raises(grpc.RpcError) as caught:
        live(b"", metadata=[("x", "y" * size)], timeout=10)
    # nghttp2 does not read on where it is far too much, and ends the connection.
    too_much = transport == "nghttp2" and size > 2**16
    code = grpc.StatusCode.UNAVAILABLE if too_much else grpc.StatusCode.RESOURCE_EXHAUSTED
    assert caught.value.code() is code


async def test_calls_above_the_limit_fail_alone(transport: str) -> None:
    async with (
        echo(Limits(max_concurrent_streams=2), transport) as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        method = channel.unary_unary("/test.Test/Echo")
        calls = (method(b"%d" % i, timeout=10) for i in range(50))
        answers = await asyncio.gather(*calls, return_exceptions=True)
        failed = [answer for answer in answers if isinstance(answer, grpc.aio.AioRpcError)]
        if transport == "grpcio":  # on nghttp2 the client gets to know the bound in time, and lets them wait
            assert 0 < len(failed) < 50
        assert {error.code() for error in failed} <= {grpc.StatusCode.UNAVAILABLE}
        assert all(answer in (b"%d" % i, *failed) for i, answer in enumerate(answers))
        assert await method(b"x", timeout=10) == b"x"
