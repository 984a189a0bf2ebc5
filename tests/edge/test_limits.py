"""Limits for one client, malformed and hostile clients, and listening ports: bytes on sockets."""

import asyncio
import socket
import time
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import grpc
import pytest
from hyperframe.frame import PingFrame

from edge.connections.listener import Listener
from edge.connections.quota import Quota
from edge.errors import UsageError
from edge.grpcio.server import generic_handlers
from edge.rpc.limits import Limits
from tests.support.http2_client import RawClient, Subject, serving

ON_EVERY_TRANSPORT = True  # it tests the protocol


@asynccontextmanager
async def echo(limits, transport):
    if transport == "nghttp2":
        async with serving(Subject(), limits) as port:
            yield port
        return

    server = grpc.aio.server(options=limits.options())
    server.add_generic_rpc_handlers(generic_handlers(Subject().methods()))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(0)


async def test_silent_connection_closes(transport):
    async with echo(Limits(handshake_seconds=0.3), transport) as port:
        started = time.monotonic()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.wait_for(reader.read(), 5)
        writer.close()
        assert 0.2 < time.monotonic() - started < 2


async def test_idle_connection_closes_and_the_client_reconnects(transport):
    async with echo(Limits(idle_seconds=0.3), transport) as port:
        async with RawClient(port) as client:
            await client.greet().end()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            for _ in range(2):
                assert await channel.unary_unary("/test.Test/Echo")(b"x", timeout=5) == b"x"
                await asyncio.sleep(0.6)


async def test_number_of_connections_is_limited(transport):
    async with echo(Limits(max_connections=4), transport) as port, AsyncExitStack() as stack:
        clients = []
        for _ in range(6):
            clients.append((await stack.enter_async_context(RawClient(port))).greet())
            clients[-1].call(1, "Echo")
            clients[-1].call(3, "Wait")  # a client without a call would make room
            await asyncio.sleep(0.2)
        assert [bool(client.frames) for client in clients] == [True] * 4 + [False] * 2


async def pinged(port, count, pause=0.0):
    async with RawClient(port) as client:
        client.greet()
        for number in range(count):
            client.send(PingFrame(0, opaque_data=b"%08d" % number))
            await asyncio.sleep(pause)
        await asyncio.sleep(0.5)
        return client


async def test_flood_of_pings_ends_the_connection(server):
    for count in (100, Limits.max_ping_strikes + 2):
        assert (await pinged(server.grpc_port, count)).closed
    client = await pinged(server.grpc_port, Limits.max_ping_strikes)
    assert (client.closed, client.goaway) == (False, None)


async def test_slow_pings_are_answered(transport):
    async with echo(Limits(min_ping_seconds=0.01, max_ping_strikes=2), transport) as port:
        client = await pinged(port, 6, pause=0.12)
        assert (client.closed, len(client.pongs)) == (False, 6)
    async with echo(Limits(min_ping_seconds=60, max_ping_strikes=2), transport) as port:
        assert (await pinged(port, 12, pause=0.02)).closed


@pytest.mark.parametrize(("size", "fits"), [(7000, True), (8192, False), (2**20, False)])
def test_size_of_headers_is_limited(channel, size, fits, transport):
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


async def test_calls_above_the_limit_fail_alone(transport):
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


async def test_port_survives_a_lack_of_files(monkeypatch):
    """Accepting fails while the process has no file, and goes on afterwards."""
    import resource

    made = []

    def protocol(share):
        made.append(share)
        return asyncio.Protocol()

    listener = Listener("http", Quota(100, 100, 100), 10, protocol)
    port = await listener.open("127.0.0.1", 0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    try:
        with suppress(OSError):
            while True:
                files.append(open("/dev/null"))  # noqa: SIM115 (they are held open)
        files.pop().close()
        _, writer = await asyncio.open_connection("127.0.0.1", port)  # it takes the last file
        await asyncio.sleep(0.2)
        assert not made
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for file in files:
            file.close()
    await asyncio.sleep(0.3)
    assert len(made) == 1
    writer.close()
    await listener.close()


async def test_all_addresses_of_a_host_have_one_port(monkeypatch):
    addresses = ("127.0.0.1", "127.0.0.2", "192.0.2.1")  # the last one is none of this machine

    async def resolve(host, port, **options):
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
    listener = Listener("http", Quota(100, 100, 100), 100, lambda share: asyncio.Protocol())
    port = await listener.open("many", 0)
    assert [each.getsockname() for each in listener._sockets] == [(each, port) for each in addresses[:2]]
    await listener.close()
    addresses = addresses[2:]
    with pytest.raises(UsageError, match=r"^--http-port 0: got .*, expected a free port on many. Give another"):
        await listener.open("many", 0)


async def test_flood_of_connections_takes_turns_with_the_rest_of_the_server():
    class Closing(asyncio.Protocol):
        def connection_made(self, transport):
            transport.close()

    quota = Quota(100, 100, 100)
    listener = Listener("http", quota, 100, lambda share: Closing())
    port = await listener.open("127.0.0.1", 0)
    clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(50)]
    turns, most, before = 0, 0, 0
    while before < len(clients):
        await asyncio.sleep(0)
        turns, now = turns + 1, quota.connections_of_ports().total()
        most, before = max(most, now - before), now
    await asyncio.sleep(0.1)
    await listener.close()
    for client in clients:
        client.close()
    assert most < 5, turns
