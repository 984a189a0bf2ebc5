"""HTTP/2 as it may be spoken and as it must not be, frame by frame, and a healthy neighbour that notices nothing."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

import grpc
import pytest
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    PriorityFrame,
    PushPromiseFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge.http2.messages import prefix
from edge.rpc.limits import Limits
from tests.edge.http2_client import LARGE, PREFACE, RawClient, Subject, serving

PROTOCOL, FLOW_CONTROL, STREAM_CLOSED, FRAME_SIZE, CANCEL, COMPRESSION, CALM = 1, 3, 5, 6, 8, 9, 11
OK, CANCELLED, DEADLINE, EXHAUSTED, UNIMPLEMENTED, INTERNAL, ABORTED = 0, 1, 4, 8, 12, 13, 10
TABLE_SIZE, ENABLE_PUSH, WINDOW, MAX_FRAME = 1, 2, 4, 5


@pytest.fixture(params=[False, True], ids=["task", "at once"])
def subject(request: pytest.FixtureRequest) -> Subject:
    return Subject(at_once=request.param)


@pytest.fixture
async def port(subject: Subject) -> AsyncIterator[int]:
    """A server whose other client is served before and after whatever a test does to it."""
    async with serving(subject) as port, grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        echo = channel.unary_unary("/test.Test/Echo")
        assert await echo(b"before", timeout=10) == b"before"
        yield port
        assert await echo(b"after", timeout=10) == b"after"
        while subject.running:
            await asyncio.sleep(0.01)


# Ways to say the same.


def plain(client: RawClient) -> None:
    client.call(1, "Echo")


def padded(client: RawClient) -> None:
    head = client.head(1, "Echo", "PADDED")
    head.pad_length = 200
    body = client.body(1, b"x", "PADDED")
    body.pad_length = 255
    client.send(head, body)


def continued(client: RawClient) -> None:
    head = client.head(1, "Echo")
    parts = [head.data[at : at + 20] for at in range(0, len(head.data), 20)]
    client.send(
        HeadersFrame(1, parts[0]),
        *(ContinuationFrame(1, part) for part in parts[1:-1]),
        ContinuationFrame(1, parts[-1], flags=["END_HEADERS"]),
        client.body(1, b"x"),
    )


def prioritised(client: RawClient) -> None:
    head = client.head(1, "Echo", "PRIORITY")
    head.stream_weight, head.depends_on = 20, 0
    client.send(PriorityFrame(5, depends_on=3, stream_weight=1), head, client.body(1, b"x"))


def unknown(client: RawClient) -> None:
    strange = b"\0\0\x03\xee\xff\0\0\0\1abc"
    client.send(client.head(1, "Echo"))
    client.writer.write(strange)
    client.send(client.body(1, b"x"))
    client.writer.write(strange)


def in_pieces(client: RawClient) -> None:
    data = prefix(b"x") + b"x"
    client.send(client.head(1, "Echo"), *(DataFrame(1, data[at : at + 1]) for at in range(len(data))))
    client.send(DataFrame(1, b""), DataFrame(1, b"", flags=["END_STREAM"]))


def with_trailers(client: RawClient) -> None:
    block = client.encoder.encode([("x-checksum", "1")])
    client.send(client.head(1, "Echo"), DataFrame(1, prefix(b"x") + b"x"))
    client.send(HeadersFrame(1, block, flags=["END_HEADERS", "END_STREAM"]))


def gzipped(client: RawClient) -> None:
    data = gzip.compress(b"x")
    client.send(client.head(1, "Echo", grpc_encoding="gzip"))
    client.send(DataFrame(1, b"\1" + len(data).to_bytes(4, "big") + data, flags=["END_STREAM"]))


def deflated(client: RawClient) -> None:
    data = zlib.compress(b"x")
    client.send(client.head(1, "Echo", grpc_encoding="deflate"))
    client.send(DataFrame(1, b"\1" + len(data).to_bytes(4, "big") + data, flags=["END_STREAM"]))


def with_a_subtype(client: RawClient) -> None:
    client.call(1, "Echo", content_type="application/grpc+proto")


def in_time(client: RawClient) -> None:
    client.call(1, "Echo", grpc_timeout="99999999n")


def with_other_settings(client: RawClient) -> None:
    client.send(SettingsFrame(0, settings={TABLE_SIZE: 0, MAX_FRAME: 2**24 - 1, WINDOW: 2**31 - 1, 0xFF: 1}))
    client.call(1, "Echo")


WAYS = [
    plain,
    padded,
    continued,
    prioritised,
    unknown,
    in_pieces,
    with_trailers,
    gzipped,
    deflated,
    with_a_subtype,
    in_time,
    with_other_settings,
]


@pytest.mark.parametrize("say", WAYS)
async def test_one_call_said_in_many_ways(port: int, say: Callable[[RawClient], None]) -> None:
    async with RawClient(port) as client:
        say(client.greet())
        answer = await client.answer()
        assert (answer.status, answer.messages) == (OK, [b"x"])
        assert answer.fields[":status"] == "200"
        assert answer.fields["content-type"] == "application/grpc"


async def test_split_at_every_byte(port: int) -> None:
    async with RawClient(port, acknowledges=False) as client:
        head, body = client.head(1, "Echo").serialize(), client.body(1, b"x").serialize()
        data = PREFACE + SettingsFrame(0, settings={WINDOW: 100}).serialize() + head + body
        for at in range(len(data)):
            client.writer.write(data[at : at + 1])
            await client.writer.drain()
            await asyncio.sleep(0)
        assert (await client.answer()).messages == [b"x"]


# What ends the connection.


class Breach(NamedTuple):
    name: str
    frames: Callable[[RawClient], list[Frame] | bytes]
    code: int


def raw(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream_id.to_bytes(4, "big") + payload


BREACHES = [
    Breach("a frame that is too large", lambda _: raw(0, 0, 1, bytes(2**14 + 1)), FRAME_SIZE),
    Breach("data of no stream", lambda _: raw(0, 0, 0, b"x"), PROTOCOL),
    Breach("data of a stream that never was", lambda _: [DataFrame(1, b"x")], PROTOCOL),
    Breach("a stream of the server", lambda c: [c.head(2, "Echo")], PROTOCOL),
    Breach("head of no stream", lambda c: raw(1, 4, 0, c.head(1, "Echo").data), PROTOCOL),
    Breach("padding that is all", lambda c: c.head(1, "Wait").serialize() + raw(0, 8, 1, b"\x05"), PROTOCOL),
    Breach("settings of a stream", lambda _: raw(4, 0, 1, b""), PROTOCOL),
    Breach("settings of a strange size", lambda _: raw(4, 0, 0, b"12345"), FRAME_SIZE),
    Breach("an acknowledgement with contents", lambda _: raw(4, 1, 0, bytes(6)), FRAME_SIZE),
    Breach("push that is neither on nor off", lambda _: [SettingsFrame(0, settings={ENABLE_PUSH: 2})], PROTOCOL),
    Breach("a window that is too large", lambda _: [SettingsFrame(0, settings={WINDOW: 2**31})], FLOW_CONTROL),
    Breach("frames that are too small", lambda _: [SettingsFrame(0, settings={MAX_FRAME: 100})], PROTOCOL),
    Breach("a window that does not grow", lambda _: raw(8, 0, 0, bytes(4)), PROTOCOL),
    Breach("a window that overflows", lambda _: [WindowUpdateFrame(0, 2**31 - 1)], FLOW_CONTROL),
    Breach("a window of a strange size", lambda _: raw(8, 0, 0, bytes(3)), FRAME_SIZE),
    Breach("a ping of a strange size", lambda _: raw(6, 0, 0, b"1234567"), FRAME_SIZE),
    Breach("a ping of a stream", lambda _: raw(6, 0, 1, bytes(8)), PROTOCOL),
    Breach("reset of a stream that never was", lambda _: [RstStreamFrame(1, error_code=CANCEL)], PROTOCOL),
    Breach("reset of a strange size", lambda _: raw(3, 0, 1, b"1"), FRAME_SIZE),
    Breach("continuation of nothing", lambda _: [ContinuationFrame(1, b"")], PROTOCOL),
    Breach("something in a head", lambda c: [HeadersFrame(1, c.head(1, "Echo").data[:9]), PingFrame(0)], PROTOCOL),
    Breach("a head in a head", lambda c: [HeadersFrame(1, b""), c.head(3, "Echo")], PROTOCOL),
    Breach("a head that is no HPACK", lambda _: raw(1, 5, 1, b"\xff\xff\xff\xff\xff\xff"), COMPRESSION),
    Breach("a push", lambda c: [c.head(1, "Wait"), PushPromiseFrame(1, 2, b"", flags=["END_HEADERS"])], PROTOCOL),
    Breach("a farewell of a stream", lambda _: raw(7, 0, 1, bytes(8)), PROTOCOL),
    Breach("a half of a farewell", lambda _: raw(7, 0, 0, bytes(4)), FRAME_SIZE),
]


@pytest.mark.parametrize("breach", BREACHES, ids=lambda breach: breach.name)
async def test_a_breach_ends_the_connection(port: int, breach: Breach) -> None:
    async with RawClient(port) as client:
        client.greet()
        frames = breach.frames(client)
        client.writer.write(frames if isinstance(frames, bytes) else b"".join(frame.serialize() for frame in frames))
        assert await client.end() == breach.code


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: test\r\n\r\n",
        b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03" + bytes(512),
        PREFACE[:-2] + b"xx",
        PREFACE + raw(0, 0, 0, b""),
        bytes(4096),
    ],
    ids=["HTTP/1.1", "TLS", "a wrong preface", "no settings", "zeros"],
)
async def test_another_protocol(port: int, data: bytes) -> None:
    async with RawClient(port) as client:
        client.writer.write(data)
        await client.end()


async def test_more_data_than_the_window_takes(port: int) -> None:
    async with RawClient(port) as client:
        await client.greet().agreed()
        client.send(client.head(1, "Zz"), *(DataFrame(1, bytes(2**14)) for _ in range(20)))
        assert await client.end() == FLOW_CONTROL


async def test_a_stream_below_the_last_is_ignored(port: int) -> None:
    """RFC 9113, 5.1.1 would end the connection; nghttp2 takes it for a stream that has ended."""
    async with RawClient(port) as client:
        client.greet().call(5, "Echo")
        await client.answer(5)
        client.call(3, "Echo")
        client.call(7, "Echo")
        assert (await client.answer(7)).messages == [b"x"]
        assert not client.answers.get(3)


# What ends the stream.


@pytest.mark.parametrize(
    "fields",
    [
        [(":method", "POST"), (":scheme", "http")],
        [(":method", "POST"), (":scheme", "http"), (":path", "/test.Test/Echo"), ("UPPER", "x")],
        [(":method", "POST"), (":scheme", "http"), (":path", "/test.Test/Echo"), ("connection", "close")],
        [(":method", "POST"), (":scheme", "http"), (":path", "/test.Test/Echo"), (":status", "200")],
        [(":method", "POST"), (":method", "POST"), (":scheme", "http"), (":path", "/test.Test/Echo")],
        [("te", "trailers"), (":method", "POST"), (":scheme", "http"), (":path", "/test.Test/Echo")],
    ],
    ids=["no path", "upper case", "a field of the connection", "a status", "a method twice", "the path too late"],
)
async def test_a_malformed_head_ends_its_stream(port: int, fields: list[tuple[str, str]]) -> None:
    async with RawClient(port) as client:
        client.greet().send(HeadersFrame(1, client.encoder.encode(fields), flags=["END_HEADERS", "END_STREAM"]))
        assert (await client.answer()).reset == PROTOCOL
        client.call(3, "Echo")
        assert (await client.answer(3)).messages == [b"x"]


class Wrong(NamedTuple):
    name: str
    say: Callable[[RawClient], None]
    status: int
    text: str = ""


def sends(data: bytes, **changed: str) -> Callable[[RawClient], None]:
    return lambda client: client.send(client.head(1, "Echo", **changed), DataFrame(1, data, flags=["END_STREAM"]))


BOMB = zlib.compress(bytes(2**27), 9)
WRONGS = [
    Wrong("no such method", lambda c: c.call(1, "Zz"), UNIMPLEMENTED, "no such method"),
    Wrong("no such service", lambda c: c.call(1, "Echo", _path="/"), UNIMPLEMENTED),
    Wrong("no message", sends(b""), INTERNAL, "one message"),
    Wrong("two messages", sends(2 * (prefix(b"x") + b"x")), INTERNAL, "one message"),
    Wrong("half a prefix", sends(b"\0\0\0"), INTERNAL, "middle of a message"),
    Wrong("half a message", sends(prefix(b"xx") + b"x"), INTERNAL, "middle of a message"),
    Wrong("a strange flag", sends(b"\7" + prefix(b"x")[1:] + b"x"), INTERNAL, "flag 7"),
    Wrong("1 GB announced", sends(b"\0\x40\0\0\0x"), EXHAUSTED, "1073741824"),
    Wrong("compressed in no way", sends(b"\1" + prefix(b"x")[1:] + b"x"), INTERNAL, "does not say how"),
    Wrong("not compressed at all", sends(b"\1" + prefix(b"x")[1:] + b"x", grpc_encoding="gzip"), INTERNAL, "not gzip"),
    Wrong("cut", sends(b"\1\0\0\0\5" + gzip.compress(b"xyz")[:5], grpc_encoding="gzip"), INTERNAL, "not gzip"),
    Wrong(
        "a bomb",
        lambda c: c.send(
            c.head(1, "Echo", grpc_encoding="deflate"),
            *(DataFrame(1, part) for part in pieces(b"\1" + prefix(BOMB)[1:] + BOMB)),
            DataFrame(1, b"", flags=["END_STREAM"]),
        ),
        EXHAUSTED,
        "more",
    ),
    Wrong("an unknown compression", sends(prefix(b"x") + b"x", grpc_encoding="zz"), UNIMPLEMENTED, "identity, deflate"),
    Wrong("no number of a timeout", sends(prefix(b"x") + b"x", grpc_timeout="xS"), INTERNAL, "grpc-timeout"),
    Wrong("no unit of a timeout", sends(prefix(b"x") + b"x", grpc_timeout="1"), INTERNAL, "grpc-timeout"),
    Wrong("no time", sends(prefix(b"x") + b"x", grpc_timeout="0n"), DEADLINE),
    Wrong("too late", lambda c: c.call(1, "Wait", grpc_timeout="20m"), DEADLINE, "deadline"),
    Wrong("an exception", lambda c: c.call(1, "Fail", b"secret"), INTERNAL, ""),
]


def pieces(data: bytes) -> list[bytes]:
    return [data[at : at + 2**14] for at in range(0, len(data), 2**14)]


@pytest.mark.parametrize("wrong", WRONGS, ids=lambda wrong: wrong.name)
async def test_the_status_of_what_is_wrong(port: int, wrong: Wrong) -> None:
    async with RawClient(port) as client:
        await client.greet().agreed()
        wrong.say(client)
        answer = await client.answer()
        assert answer.status == wrong.status
        assert wrong.text in answer.fields.get("grpc-message", "")
        assert "secret" not in answer.fields.get("grpc-message", "")
        client.call(3, "Echo")
        assert (await client.answer(3)).messages == [b"x"]


@pytest.mark.parametrize(
    ("changed", "status"), [({"_method": "GET"}, "405"), ({"content_type": "text/plain"}, "415")], ids=["GET", "text"]
)
async def test_what_is_not_grpc_gets_the_status_of_http(port: int, changed: dict[str, str], status: str) -> None:
    async with RawClient(port) as client:
        client.greet().call(1, "Echo", **changed)
        assert (await client.answer()).fields == {":status": status}


async def test_how_a_handler_ends_a_call(port: int) -> None:
    text = "100 % of ×\n"
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/test.Test/Abort")(text.encode(), timeout=10)
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.ABORTED, text)
    assert dict(caught.value.trailing_metadata() or ()) == {"key": "value", "key-bin": b"\0\xff"}


async def test_metadata(port: int) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        sent = (("a", "1"), ("b-bin", b"\0\xff\x10"))
        seen = await channel.unary_unary("/test.Test/Metadata")(b"", metadata=sent, timeout=10)
    fields: dict[str, Any] = eval(seen)  # what our own method has just written
    assert (fields["a"], fields["b-bin"]) == ("1", b"\0\xff\x10")
    assert fields["user-agent"].startswith("grpc-python-asyncio")
    assert not {"te", "content-type", "grpc-timeout", ":path"} & set(fields)


# Flow control.


async def test_a_window_of_one_byte(port: int) -> None:
    async with RawClient(port) as client:
        client.greet({WINDOW: 1}).call(1, "Echo", b"twelve bytes")
        await client.until(lambda: 1 in client.answers)
        while not client.answers[1].ended:
            had = len(client.answers[1].data)
            client.send(WindowUpdateFrame(1, 1))
            await client.until(lambda had=had: len(client.answers[1].data) > had or client.answers[1].ended)  # type: ignore[misc]
        assert client.answers[1].messages == [b"twelve bytes"]


async def test_settings_that_change_in_the_middle_of_an_answer(port: int) -> None:
    async with RawClient(port) as client:
        client.greet({WINDOW: 1000}).call(1, "Blow")
        await client.until(lambda: 1 in client.answers and len(client.answers[1].data) == 1000)
        client.send(SettingsFrame(0, settings={WINDOW: 0}))  # now 1000 bytes are owed
        client.send(SettingsFrame(0, settings={WINDOW: 500, TABLE_SIZE: 0, MAX_FRAME: 2**15}))
        client.send(WindowUpdateFrame(1, 600))
        await client.until(lambda: len(client.answers[1].data) == 1100)
        client.send(WindowUpdateFrame(0, 2 * LARGE), SettingsFrame(0, settings={WINDOW: 2 * LARGE}))
        answer = await client.answer()
        assert answer.messages == [bytes(LARGE)]
        assert answer.status == OK


async def test_a_client_that_does_not_read_stops_no_other_stream(port: int) -> None:
    async with RawClient(port) as client:
        await client.greet({WINDOW: 0}).agreed()
        client.send(client.head(1, "Chat"))
        client.send(*(DataFrame(1, prefix(bytes(2**14 - 5)) + bytes(2**14 - 5)) for _ in range(15)))
        client.call(3, "Echo")
        client.send(WindowUpdateFrame(3, 100))
        assert (await client.answer(3)).messages == [b"x"]
        client.send(RstStreamFrame(1, error_code=CANCEL))


async def test_what_is_sent_to_refused_calls_does_not_close_the_window(port: int) -> None:
    async with RawClient(port) as client:
        await client.greet().agreed()
        for number in range(400):  # of 240 kB each, which is more than the window of the connection takes
            stream_id = 2 * number + 1
            client.send(client.head(stream_id, "Zz"), *(DataFrame(stream_id, bytes(2**14)) for _ in range(15)))
            client.send(RstStreamFrame(stream_id, error_code=CANCEL))
            await client.writer.drain()
        client.call(1001, "Echo")
        assert (await client.answer(1001)).messages == [b"x"]


@pytest.mark.parametrize("size", [0, 5, 2**14 - 5, 2**14, 2**18 + 1, 4 * 2**20])
async def test_messages_of_every_size(port: int, size: int) -> None:
    async with grpc.aio.insecure_channel(
        f"127.0.0.1:{port}", options=[("grpc.max_receive_message_length", -1)]
    ) as channel:
        message = bytes(range(256)) * (size // 256 + 1)
        message = message[:size]
        assert await channel.unary_unary("/test.Test/Echo")(message, timeout=20) == message
        chat = channel.stream_stream("/test.Test/Chat")
        assert [answer async for answer in chat(iter([message] * 3), timeout=20)] == [message] * 3


async def test_a_hundred_streams_at_once(port: int) -> None:
    async with RawClient(port) as client:
        client.greet()
        streams = range(1, 201, 2)
        client.send(*(client.head(stream_id, "Echo") for stream_id in streams))
        data = {stream_id: prefix(b"%d" % stream_id) + b"%d" % stream_id for stream_id in streams}
        for at in range(9):
            client.send(*(DataFrame(stream_id, data[stream_id][at : at + 1]) for stream_id in reversed(streams)))
        client.send(*(DataFrame(stream_id, b"", flags=["END_STREAM"]) for stream_id in streams))
        for stream_id in streams:
            assert (await client.answer(stream_id)).messages == [b"%d" % stream_id]


async def test_an_answer_of_many_messages(port: int) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        count = channel.unary_stream("/test.Test/Count")
        assert [answer async for answer in count(b"1000", timeout=20)] == [b"%d" % number for number in range(1000)]


# Giving up, and floods.


async def test_a_reset_cancels_the_handler(port: int, subject: Subject) -> None:
    async with RawClient(port) as client:
        client.greet().call(1, "Wait")
        client.send(client.head(3, "Wait"))
        client.send(client.head(5, "Chat"), DataFrame(5, prefix(b"x")[:3]))
        while not subject.running:
            await asyncio.sleep(0.01)
        client.send(*(RstStreamFrame(stream_id, error_code=CANCEL) for stream_id in (1, 3, 5)))
        while subject.running:
            await asyncio.sleep(0.01)
        client.call(7, "Echo")
        assert (await client.answer(7)).messages == [b"x"]
    assert subject.cancelled == 1


async def test_who_hangs_up_gives_up(port: int, subject: Subject) -> None:
    async with RawClient(port) as client:
        client.greet().call(1, "Wait")
        while not subject.running:
            await asyncio.sleep(0.01)
    while subject.running:
        await asyncio.sleep(0.01)
    assert subject.cancelled == 1


async def test_rapid_resets_end_the_connection(port: int) -> None:
    async with RawClient(port) as client:
        client.greet()
        for number in range(5000):
            stream_id = 2 * number + 1
            client.call(stream_id, "Wait")
            client.send(RstStreamFrame(stream_id, error_code=CANCEL))
        await client.end()


@pytest.mark.parametrize("count", [100, 10_000])
async def test_a_flood_of_pings_ends_the_connection(port: int, count: int) -> None:
    async with RawClient(port) as client:
        client.greet().send(*(PingFrame(0, opaque_data=b"%08d" % number) for number in range(count)))
        # So many at once that nghttp2 does not even say farewell.
        assert await client.end() == (CALM if count == 100 else None)


async def test_a_head_without_an_end(port: int) -> None:
    async with RawClient(port) as client:
        client.greet().send(HeadersFrame(1, client.head(1, "Echo").data))
        client.send(*(ContinuationFrame(1, b"") for _ in range(10_000)))
        await client.end()


async def test_a_head_that_grows(port: int) -> None:
    """A field of 4000 bytes is said once and referred to 4000 times."""
    async with RawClient(port) as client:
        client.greet()
        block = client.head(1, "Echo").data + client.encoder.encode([("x", "y" * 4000)])
        client.send(HeadersFrame(1, block + b"\xbe" * 4000, flags=["END_HEADERS", "END_STREAM"]))
        await client.end()


async def test_a_farewell_ends_when_its_last_call_is_answered(port: int) -> None:
    async with RawClient(port) as client:
        client.greet().call(1, "Echo")
        client.send(GoAwayFrame(0, last_stream_id=0, error_code=0))
        assert (await client.answer()).messages == [b"x"]
        await client.end()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=40),
            st.builds(
                raw,
                st.integers(0, 12),
                st.integers(0, 255),
                st.sampled_from([0, 1, 2, 3, 5, 2**31 - 1]),
                st.binary(max_size=40),
            ),
            st.just(b"call"),
        ),
        max_size=12,
    )
)
def test_garbage(said: list[bytes]) -> None:
    async def converse() -> None:
        async with serving(Subject()) as port:
            async with RawClient(port) as client:
                client.greet()
                for number, data in enumerate(said):
                    if data == b"call":
                        client.call(2 * number + 7, "Echo")
                    else:
                        client.writer.write(data)
                client.writer.write_eof()
                await asyncio.wait_for(asyncio.wait([client._reading]), 10)
            async with RawClient(port) as client:
                client.greet().call(1, "Echo")
                assert (await client.answer()).messages == [b"x"]

    asyncio.run(converse())


# Going down.


async def test_calls_on_their_way_are_answered_before_the_end(subject: Subject) -> None:
    async with serving(subject, drain_seconds=5) as port:
        client = await RawClient(port).__aenter__()
        client.greet().send(client.head(1, "Chat"), DataFrame(1, prefix(b"1") + b"1"))
        await client.until(lambda: 1 in client.answers and bool(client.answers[1].data))
        asyncio.get_running_loop().call_later(0.3, client.send, client.body(1, b"2"))
    answer = client.answers[1]
    assert (answer.messages, answer.status, client.goaway) == ([b"1", b"2"], OK, 0)
    assert await client.end() == 0
    await client.__aexit__(None, None, None)


async def test_what_does_not_end_in_time_is_cancelled(subject: Subject) -> None:
    async with serving(subject, drain_seconds=0.2) as port:
        client = await RawClient(port).__aenter__()
        client.greet().call(1, "Wait")
        while not subject.running:
            await asyncio.sleep(0.01)
    assert (subject.running, subject.cancelled) == (0, 1)
    assert client.answers[1].status == 14
    await client.end()
    await client.__aexit__(None, None, None)


async def test_limits_are_those_of_the_other_transport(subject: Subject) -> None:
    async with (
        serving(subject, Limits(max_message_bytes=1000)) as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        echo = channel.unary_unary("/test.Test/Echo")
        assert await echo(bytes(1000), timeout=10) == bytes(1000)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await echo(bytes(1001), timeout=10)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "--max-message-bytes" in (caught.value.details() or "")
