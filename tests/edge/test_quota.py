"""Limits on what connections make the server hold, and their turns."""

import asyncio
import gc
import gzip
import time
import weakref
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hyperframe.frame import DataFrame, RstStreamFrame, SettingsFrame
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.client.connection import open_stub
from edge.connections import quota as quota_module
from edge.connections.paced import PacedReader
from edge.connections.quota import Quota, Refusal
from edge.http2.connection import Http2Connection
from edge.http2.messages import prefix
from edge.pb import inference_pb2 as pb
from edge.rpc.limits import Limits
from tests.support.http2_client import RawClient, Subject, serving
from tests.support.metrics import reached

SECONDS = 10.0


class Ended(list[str]):
    """The connections that a quota disconnected."""

    def connect(self, quota, name, most=100):
        return quota.connect("grpc", most, lambda: self.append(name))


steps = st.lists(st.tuples(st.integers(0, 4), st.integers(-40, 120)), max_size=60)


@given(steps)
@settings(deadline=None, max_examples=200)
def test_shares_never_exceed_the_quota(steps):
    """The largest share gives way, never a smaller one, and what was refused is not counted."""

    async def run():
        quota, ended = Quota(300, 150), Ended()
        shares = [ended.connect(quota, str(number)) for number in range(5)]
        for number, size in steps:
            share = shares[number]
            before = {str(i): each.held_bytes for i, each in enumerate(shares) if each and not each.closed}
            count = len(ended)
            if size < 0:
                share.release(min(-size, share.held_bytes))
            elif share.hold(size):
                assert share.held_bytes == before[str(number)] + size
            elif not share.closed:
                assert share.held_bytes == before[str(number)]
            for name in ended[count:]:
                assert before[name] == max(before.values()) > before[str(number)]
                del before[name]
            assert quota.held_bytes == sum(each.held_bytes for each in shares if each) <= 300
            assert all(each.held_bytes <= 150 for each in shares if each)
        for share in shares:
            if share:
                share.close()
        assert (quota.held_bytes, quota.connections_of_ports()) == (0, {})

    asyncio.run(run())


async def test_a_new_connection_takes_the_place_of_the_oldest_that_was_never_answered():
    quota, ended = Quota(100, 100), Ended()
    first, *_ = (ended.connect(quota, name, 3) for name in "abc")
    first.proven = True
    assert ended.connect(quota, "d", 3)
    assert ended == ["b"]
    assert quota.connect("metrics", 3, lambda: None)  # another port has its own limit
    quota.max_connections = 4  # of all ports together, on any of which one makes room
    assert quota.connect("http", 3, lambda: None)
    assert (ended, quota.connections_of_ports()) == (["b", "c"], {"grpc": 2, "metrics": 1, "http": 1})
    for share in list(quota._shares):
        share.proven = True
    assert ended.connect(quota, "e", 3) is None
    assert quota.refusals == {Refusal("grpc", "connections"): 3}


async def test_idle_client_makes_room_and_hears_that_it_has_to_connect_again():
    async with serving(Subject(), Limits(max_connections=2)) as port, RawClient(port) as busy:
        busy.greet().call(1, "Echo")
        busy.call(3, "Wait")
        await busy.answer(1)
        async with RawClient(port) as idle:
            idle.greet().call(1, "Echo")
            await idle.answer(1)
            async with RawClient(port) as new:
                new.greet().call(1, "Echo")
                assert (await new.answer(1)).status == 0
                assert await idle.end() == 0
        await busy.settle()


async def test_call_that_needs_no_token_proves_nothing_where_others_need_one():
    async with serving(Subject(), Limits(max_connections=1), by_path=False) as port, RawClient(port) as stranger:
        stranger.greet().call(1, "Echo")
        await stranger.answer(1)
        stranger.call(3, "Wait")
        await stranger.settle()
        async with RawClient(port) as new:
            new.greet().call(1, "Echo")
            assert (await new.answer(1)).status == 0


async def test_bytes_keep_their_order_while_others_take_turns():
    """A client whose bytes take long to parse delays neither itself nor others."""
    parsed = bytearray()
    seconds = 0.001

    class Slow(asyncio.Protocol):
        def connection_made(self, transport):
            self.transport = transport
            self.reader = PacedReader(transport, self.parse)

        def data_received(self, data):
            if data == b"?":
                self.transport.write(b"%d" % len(parsed))
            else:
                self.reader.data_received(data)

        def parse(self, data):
            end = time.perf_counter() + seconds
            while time.perf_counter() < end:
                pass
            parsed.extend(data)

        def connection_lost(self, error):
            self.reader.close()

    server = await asyncio.get_running_loop().create_server(Slow, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    sent = bytes(range(256)) * 1024
    _, busy = await asyncio.open_connection("127.0.0.1", port)
    reader, other = await asyncio.open_connection("127.0.0.1", port)
    busy.write(sent)
    seen = set()
    while len(parsed) < len(sent):
        other.write(b"?")
        seen.add(await asyncio.wait_for(reader.read(100), SECONDS))
    assert parsed == sent
    assert len(seen) > 3  # the other client was answered in between
    for writer in (busy, other):
        writer.close()
    server.close()


@asynccontextmanager
async def limited(max_bytes=2**27):
    quota = Quota(max_bytes, max_bytes)
    async with serving(Subject(), quota=quota) as port:
        yield quota, port


async def test_calls_and_their_headers_count_until_they_end():
    async with limited(2**20) as (quota, port), RawClient(port) as client:
        await client.greet().agreed()
        for number in range(200):
            client.send(client.head(2 * number + 1, "Echo", x=f"{number}" * 1000))
        assert (await client.answer(399)).status == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
        assert 0 < quota.held_bytes <= 2**20
        assert quota.refusals[Refusal("grpc", "memory")] > 50
        client.send(*(DataFrame(2 * number + 1, b"\0\0\0\0\0", flags=["END_STREAM"]) for number in range(20)))
        assert (await client.answer(1)).status == 0
        async with RawClient(port) as other:
            other.greet().call(1, "Echo")
            assert (await other.answer()).status == 0
    assert quota.held_bytes == 0


async def test_announced_message_counts_before_it_arrives():
    async with limited(2**20) as (quota, port), RawClient(port) as client:
        await client.greet().agreed()
        announced = (900_000).to_bytes(4, "big")
        for stream_id in (1, 3):
            client.send(client.head(stream_id, "Echo"), DataFrame(stream_id, b"\0" + announced))
        answer = await client.answer(3)
        assert answer.status == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
        assert "message: got 900000 bytes beside those that the server holds" in answer.fields["grpc-message"]
        assert quota.held_bytes > 900_000
        client.send(client.head(5, "Echo"), DataFrame(5, b"\0\0\0\0\0", flags=["END_STREAM"]))
        assert (await client.answer(5)).status == 0


async def test_inflated_message_counts():
    async with limited(10 * 2**20) as (quota, port), RawClient(port) as client:
        await client.greet().agreed()
        for stream_id, size, status in ((1, 2**20, 0), (3, 2**24, grpc.StatusCode.RESOURCE_EXHAUSTED.value[0])):
            packed = gzip.compress(bytes(size))
            head = client.head(stream_id, "Metadata", grpc_encoding="gzip")
            data = b"\1" + prefix(packed)[1:] + packed
            pieces = [DataFrame(stream_id, data[at : at + 2**14]) for at in range(0, len(data), 2**14)]
            client.send(head, *pieces, DataFrame(stream_id, flags=["END_STREAM"]))
            assert (await client.answer(stream_id)).status == status
        assert quota.held_bytes < 2**20


async def test_unread_answers_are_refused_and_their_client_disconnected(monkeypatch):
    """A client that opens no window gets an answer or two of a million bytes, then refusals, and then is closed."""
    monkeypatch.setattr(quota_module, "_SWEEP_SECONDS", 0.05)
    monkeypatch.setattr(quota_module, "_READING_SECONDS", 2.0)
    async with limited(2_500_000) as (quota, port), RawClient(port) as client:
        client.greet().send(SettingsFrame(0, settings={SettingsFrame.INITIAL_WINDOW_SIZE: 0}))
        await client.agreed()
        for number in range(5):
            client.call(2 * number + 1, "Blow")
        answer = await client.answer(9)
        assert answer.status == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
        assert "Read responses as they come." in answer.fields["grpc-message"]
        assert quota.held_bytes >= 2_000_000
        await asyncio.wait_for(client.end(), SECONDS)
        assert client.closed
        assert quota.refusals[Refusal("grpc", "answer")] == 1
        assert quota.held_bytes == 0


async def test_request_that_does_not_arrive_ends(monkeypatch):
    monkeypatch.setattr(quota_module, "_SWEEP_SECONDS", 0.05)
    monkeypatch.setattr(quota_module, "_PATIENCE_SECONDS", 0.2)
    async with limited() as (quota, port), RawClient(port) as client:
        await client.greet().agreed()
        client.send(client.head(1, "Echo"), DataFrame(1, b"\0\0\0"))
        client.call(3, "Wait")  # its handler takes its time, which is another matter
        client.send(client.head(5, "Chat"))  # a stream may wait for its first request
        answer = await client.answer(1)
        assert answer.status == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
        assert "did not arrive in time" in answer.fields["grpc-message"]
        await asyncio.sleep(0.3)
        client.send(DataFrame(5, b"\0\0\0\0\1x", flags=["END_STREAM"]))
        assert (await client.answer(5)).messages == [b"x"]
        assert quota.refusals == {Refusal("grpc", "slow request"): 1}


async def test_bytes_of_a_call_are_released_once():
    """A stream that ends while its message is inflated releases what it holds, and nothing a second time."""
    async with limited() as (quota, port), RawClient(port) as client:
        await client.greet().agreed()
        packed = gzip.compress(bytes(60 * 2**20))
        client.send(client.head(1, "Chat", grpc_encoding="gzip"))
        data = b"\1" + prefix(packed)[1:] + packed
        client.send(*(DataFrame(1, data[at : at + 2**14]) for at in range(0, len(data), 2**14)))
        await reached(lambda: quota.held_bytes > 2**22)
        client.send(RstStreamFrame(1))
        await client.settle()
        await asyncio.sleep(0.1)  # until its handler has ended
        assert quota.held_bytes == 0


async def test_cancelled_answers_do_not_count_as_unread(monkeypatch):
    monkeypatch.setattr(quota_module, "_SWEEP_SECONDS", 0.05)
    monkeypatch.setattr(quota_module, "_READING_SECONDS", 0.2)
    async with limited() as (quota, port), RawClient(port) as client:
        client.greet().send(SettingsFrame(0, settings={SettingsFrame.INITIAL_WINDOW_SIZE: 0}))
        await client.agreed()
        client.call(1, "Blow")
        await reached(lambda: quota.held_bytes > 1_000_000)
        client.send(RstStreamFrame(1))
        await asyncio.sleep(0.5)
        assert quota.held_bytes == 0
        await client.settle()
        assert not client.closed
        assert not quota.refusals


async def test_closed_connection_is_freed_at_once(monkeypatch):
    """Without the garbage collector, which may not run for minutes; it would keep unread answers."""
    made = []
    original = Http2Connection.__init__

    def init(self, *arguments):
        original(self, *arguments)
        made.append(weakref.ref(self))

    monkeypatch.setattr(Http2Connection, "__init__", init)
    async with limited() as (_, port):
        gc.collect()
        gc.disable()
        try:
            async with RawClient(port) as client:
                await client.greet().agreed()
                client.call(1, "Echo")
                await client.answer(1)
                client.send(client.head(3, "Chat"))
                for stream_id, method in ((5, "Wait"), (7, "Blow")):
                    client.call(stream_id, method)
                await client.until(lambda: 7 in client.answers)
            for _ in range(50):
                await asyncio.sleep(0.02)
                if made[0]() is None:
                    break
            assert [each() for each in made] == [None]
        finally:
            gc.enable()


ON_EVERY_TRANSPORT = True


@pytest.mark.parametrize(
    "compression", [grpc.Compression.NoCompression, grpc.Compression.Gzip, grpc.Compression.Deflate]
)
def test_size_of_a_request_is_limited_by_its_method(channel, compression):
    health, inference = health_pb2_grpc.HealthStub(channel), open_stub(channel)
    options = {"compression": compression, "timeout": SECONDS}
    checks = {
        4096: (health.Check, health_pb2.HealthCheckRequest),
        64 * 1024: (inference.ModelReady, pb.ModelReadyRequest),
    }
    for limit, (method, message) in checks.items():
        field = message.DESCRIPTOR.fields[0].name
        try:
            method(message(**{field: "x" * (limit - 10)}), **options)
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.NOT_FOUND  # noqa: PT017 (only one of the two raises)
        with pytest.raises(grpc.RpcError, match=f"expected at most {limit} bytes. Split it") as caught:
            method(message(**{field: "x" * limit}), **options)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_compression_that_is_not_announced_is_no_message(channel, transport):
    """Otherwise it would be inflated beside the quota. Only gRPC's core says nothing of it to the server."""
    call = channel.unary_unary("/inference.GRPCInferenceService/ServerMetadata")
    if transport == "grpcio":
        assert call(gzip.compress(b""), timeout=SECONDS)
        return
    with pytest.raises(grpc.RpcError, match="got bytes that do not parse"):
        call(gzip.compress(b""), timeout=SECONDS)
