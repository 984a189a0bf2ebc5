"""Limits for one client: connections, time, pings, headers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import grpc
import pytest
from hyperframe.frame import PingFrame

from edge.rpc.limits import Limits
from edge.server import Ready
from tests.support.http2_client import RawClient, Subject, serving

ON_EVERY_TRANSPORT = True  # it tests the protocol


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


async def test_silent_connection_closes(transport: str) -> None:
    async with echo(Limits(handshake_seconds=0.3), transport) as port:
        started = time.monotonic()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.wait_for(reader.read(), 5)
        writer.close()
        assert 0.2 < time.monotonic() - started < 2


async def test_idle_connection_closes_and_the_client_reconnects(transport: str) -> None:
    async with echo(Limits(idle_seconds=0.3), transport) as port:
        async with RawClient(port) as client:
            await client.greet().end()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            for _ in range(2):
                assert await channel.unary_unary("/test.Test/Echo")(b"x", timeout=5) == b"x"
                await asyncio.sleep(0.6)


async def test_number_of_connections_is_limited(transport: str) -> None:
    async with echo(Limits(max_connections=4), transport) as port, AsyncExitStack() as stack:
        clients = [(await stack.enter_async_context(RawClient(port))).greet() for _ in range(6)]
        await asyncio.sleep(0.5)
        assert sum(bool(client.frames) for client in clients) == 4


async def pinged(port: int, count: int, pause: float = 0.0) -> RawClient:
    """Send pings, and return the client after the server's answers."""
    async with RawClient(port) as client:
        client.greet()
        for number in range(count):
            client.send(PingFrame(0, opaque_data=b"%08d" % number))
            await asyncio.sleep(pause)
        await asyncio.sleep(0.5)
        return client


async def test_flood_of_pings_ends_the_connection(server: Ready) -> None:
    for count in (100, Limits.max_ping_strikes + 2):
        assert (await pinged(server.grpc_port, count)).closed
    client = await pinged(server.grpc_port, Limits.max_ping_strikes)
    assert (client.closed, client.goaway) == (False, None)


async def test_slow_pings_are_answered(transport: str) -> None:
    async with echo(Limits(min_ping_seconds=0.05, max_ping_strikes=2), transport) as port:
        client = await pinged(port, 6, pause=0.12)
        assert (client.closed, len(client.pongs)) == (False, 6)
        assert (await pinged(port, 12, pause=0.02)).closed


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
        # Calls wait in a client that knows the bound in time.
        failed = [answer for answer in answers if isinstance(answer, grpc.aio.AioRpcError)]
        assert {error.code() for error in failed} <= {grpc.StatusCode.UNAVAILABLE}
        assert all(answer in (b"%d" % i, *failed) for i, answer in enumerate(answers))
        assert await method(b"x", timeout=10) == b"x"
