"""Listening ports: a lack of files, floods of connections, and several addresses."""

import asyncio
import socket
from contextlib import suppress

import pytest

from edge.connections.listener import Listener
from edge.connections.quota import Quota
from edge.errors import UsageError


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
        turns, now = turns + 1, quota.connections
        most, before = max(most, now - before), now
    await asyncio.sleep(0.1)
    await listener.close()
    for client in clients:
        client.close()
    assert most < 5, turns


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
