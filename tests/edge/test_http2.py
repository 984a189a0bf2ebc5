"""gRPC over HTTP/2: framing, fields, statuses, flow control, deadlines, hostile clients, and the shutdown."""

import ast
import asyncio
import gzip
import zlib
from collections.abc import Callable
from typing import NamedTuple

import grpc
import pytest
from hyperframe.frame import DataFrame, GoAwayFrame, HeadersFrame, RstStreamFrame, WindowUpdateFrame

from edge.http2.messages import prefix
from tests.support.http2_client import LARGE, RawClient, Subject, serving, shared
from tests.support.metrics import reached

CANCEL = 8
OK, DEADLINE, EXHAUSTED, UNIMPLEMENTED, INTERNAL, UNAVAILABLE = 0, 4, 8, 12, 13, 14
WINDOW = 4

Say = Callable[[RawClient], None]
MESSAGE = prefix(b"x") + b"x"


@pytest.fixture(params=[False, True], ids=["coroutine", "direct"])
def subject(request):
    return Subject(direct=request.param)


@pytest.fixture
async def port(subject):
    async with shared(subject) as port:
        yield port


def sends(data, **changed):
    return lambda client: client.send(client.head(1, "Echo", **changed), DataFrame(1, data, flags=["END_STREAM"]))


def packed(data):
    return b"\1" + prefix(data)[1:] + data


VALID = {
    "plain": sends(MESSAGE),
    "without te": sends(MESSAGE, te=None),
    "application/grpc+proto": sends(MESSAGE, content_type="application/grpc+proto"),
    "application/grpc;charset=utf-8": sends(MESSAGE, content_type="application/grpc;charset=utf-8"),
    "gzip": sends(packed(gzip.compress(b"x")), grpc_encoding="gzip"),
    "deflate": sends(packed(zlib.compress(b"x")), grpc_encoding="deflate"),
    "an encoding that the message does not use": sends(MESSAGE, grpc_encoding="gzip"),
    "identity": sends(MESSAGE, grpc_encoding="identity"),
    **{f"timeout {value}": sends(MESSAGE, grpc_timeout=value) for value in ("99999999n", "9S", "1M", "99999999H")},
}


@pytest.mark.parametrize("say", VALID.values(), ids=VALID)
async def test_valid_forms_of_one_call(port, say):
    async with RawClient(port) as client:
        say(client.greet())
        answer = await client.answer()
        assert (answer.status, answer.messages) == (OK, [b"x"])
        assert answer.fields[":status"] == "200"
        assert answer.fields["content-type"] == "application/grpc"


async def test_message_split_at_each_byte(port):
    """Two messages, one of them compressed, in two DATA frames with the boundary at each byte in turn."""
    data = MESSAGE + packed(gzip.compress(b"second"))
    async with RawClient(port) as client:
        client.greet()
        for at in range(len(data) + 1):
            stream_id = 2 * at + 1
            client.send(client.head(stream_id, "Chat", grpc_encoding="gzip"), DataFrame(stream_id, data[:at]))
            client.send(DataFrame(stream_id, data[at:], flags=["END_STREAM"]))
        for at in range(len(data) + 1):
            answer = await client.answer(2 * at + 1)
            assert (answer.status, answer.messages) == (OK, [b"x", b"second"])


class Wrong(NamedTuple):
    name: str
    say: Say
    status: int
    text: str = ""


def bomb(client):
    data = packed(zlib.compress(bytes(2**27), 9))
    pieces = (DataFrame(1, data[at : at + 2**14]) for at in range(0, len(data), 2**14))
    client.send(client.head(1, "Echo", grpc_encoding="deflate"), *pieces, DataFrame(1, flags=["END_STREAM"]))


WRONG_TIMEOUTS = ("xS", "1", "S", "123456789S", "-1S", "+1S", "1.5S", "1s", "1 S")
WRONG = [
    Wrong("no such method", lambda c: c.call(1, "Zz"), UNIMPLEMENTED, "no such method"),
    Wrong("no such service", lambda c: c.call(1, "Echo", _path="/"), UNIMPLEMENTED),
    Wrong("no DATA", lambda c: c.send(c.head(1, "Echo", "END_STREAM")), INTERNAL, "got 0 messages, expected 1. Send"),
    Wrong("empty DATA", sends(b""), INTERNAL, "got 0 messages, expected 1. Send"),
    Wrong("two messages", sends(2 * MESSAGE), INTERNAL, "got 2 messages, expected 1. Send"),
    Wrong("half a prefix", sends(b"\0\0\0"), INTERNAL, "middle of a message"),
    Wrong("half a message", sends(prefix(b"xx") + b"x"), INTERNAL, "middle of a message"),
    Wrong("flag 7", sends(b"\7" + MESSAGE[1:]), INTERNAL, "compressed flag: got 7, expected 0 or 1"),
    Wrong("1 GiB announced", sends(b"\0\x40\0\0\0x"), EXHAUSTED, "got 1073741824 bytes"),
    Wrong("compressed without grpc-encoding", sends(b"\1" + MESSAGE[1:]), INTERNAL, "got 1 without grpc-encoding"),
    Wrong("not compressed", sends(packed(b"x"), grpc_encoding="gzip"), INTERNAL, "exactly one gzip stream"),
    Wrong("cut", sends(packed(gzip.compress(b"xyz")[:5]), grpc_encoding="gzip"), INTERNAL, "exactly one gzip stream"),
    Wrong("two gzips", sends(packed(2 * gzip.compress(b"x")), grpc_encoding="gzip"), INTERNAL, "exactly one gzip"),
    Wrong("a bomb", bomb, EXHAUSTED, "more, uncompressed"),
    Wrong("unknown encoding", sends(MESSAGE, grpc_encoding="zz"), UNIMPLEMENTED, "expected one of identity, deflate"),
    *(
        Wrong(f"timeout {it!r}", sends(MESSAGE, grpc_timeout=it), INTERNAL, "m, u, n. Send 500m, for example")
        for it in WRONG_TIMEOUTS
    ),
    Wrong("timeout of 0", sends(MESSAGE, grpc_timeout="0n"), DEADLINE, "deadline"),
    Wrong("too slow", lambda c: c.call(1, "Wait", grpc_timeout="20m"), DEADLINE, "deadline"),
    Wrong("an exception", lambda c: c.call(1, "Fail", b"secret"), INTERNAL),
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.name)
async def test_status_of_an_invalid_call(port, wrong):
    async with RawClient(port) as client:
        await client.greet().agreed()
        wrong.say(client)
        answer = await client.answer()
        assert answer.status == wrong.status
        assert wrong.text in answer.fields.get("grpc-message", "")
        assert "secret" not in answer.fields.get("grpc-message", "")
        assert answer.frames == 1
        client.call(3, "Echo")
        assert (await client.answer(3)).messages == [b"x"]


@pytest.mark.parametrize("content_type", [None, "", "text/plain", "application/grpcx", "application/grpc-web"])
async def test_another_content_type_gets_an_http_status(port, content_type):
    async with RawClient(port) as client:
        client.greet().call(1, "Echo", content_type=content_type)
        assert (await client.answer()).fields == {":status": "415"}


async def test_status_and_metadata(port):
    text = "100 % of ×\n"
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/test.Test/Abort")(text.encode(), timeout=10)
        assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.ABORTED, text)
        assert dict(caught.value.trailing_metadata() or ()) == {"key": "value", "key-bin": b"\0\xff"}
        sent = (("a", "1"), ("b-bin", b"\0\xff\x10"))
        seen = await channel.unary_unary("/test.Test/Metadata")(b"", metadata=sent, timeout=10)
    fields = ast.literal_eval(seen.decode())
    assert (fields["a"], fields["b-bin"]) == ("1", b"\0\xff\x10")
    assert fields["user-agent"].startswith("grpc-python-asyncio")
    assert not {"te", "content-type", "grpc-timeout", ":path"} & set(fields)


async def test_client_that_does_not_read_blocks_no_other_stream(port):
    async with RawClient(port) as client:
        await client.greet({WINDOW: 0}).agreed()
        client.send(client.head(1, "Chat"))
        client.send(*(DataFrame(1, prefix(bytes(2**14 - 5)) + bytes(2**14 - 5)) for _ in range(15)))
        client.call(3, "Echo")
        client.send(WindowUpdateFrame(3, 100))
        assert (await client.answer(3)).messages == [b"x"]
        client.send(RstStreamFrame(1, error_code=CANCEL))


async def test_refused_calls_free_the_window(port):
    async with RawClient(port) as client:
        await client.greet().agreed()
        for number in range(400):  # 240 kB each: in total more than the connection's window
            stream_id = 2 * number + 1
            client.send(client.head(stream_id, "Zz"), *(DataFrame(stream_id, bytes(2**14)) for _ in range(15)))
            client.send(RstStreamFrame(stream_id, error_code=CANCEL))
            await client.writer.drain()
        client.call(1001, "Echo")
        assert (await client.answer(1001)).messages == [b"x"]


@pytest.mark.parametrize("size", [0, 5, 2**14 - 5, 2**14, 2**18 + 1, 4 * 2**20])
async def test_messages_of_every_size(port, size):
    options = [("grpc.max_receive_message_length", -1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        message = (bytes(range(256)) * (size // 256 + 1))[:size]
        assert await channel.unary_unary("/test.Test/Echo")(message, timeout=20) == message
        chat = channel.stream_stream("/test.Test/Chat")
        assert [answer async for answer in chat(iter([message] * 3), timeout=20)] == [message] * 3


async def test_calls_of_a_connection_end_in_the_order_of_their_deadlines(port, subject):
    """One ends before the timer that an earlier call has set, one after it, and one has no deadline."""
    async with RawClient(port) as client:
        client.greet().call(1, "Echo", grpc_timeout="600m")  # ends before its deadline
        client.call(3, "Wait", grpc_timeout="1200m")
        client.call(5, "Wait", grpc_timeout="300m")
        client.call(7, "Wait")
        client.call(9, "Wait", grpc_timeout="9S")
        assert [(await client.answer(stream_id)).status for stream_id in (1, 5, 3)] == [OK, DEADLINE, DEADLINE]
        assert list(client.answers) == [1, 5, 3]
        assert subject.running == 2


async def test_deadline_of_a_stream_that_waits_for_its_client(port):
    """The status follows the messages sent before the deadline, as soon as the client reads them."""
    async with RawClient(port) as client:
        client.greet({WINDOW: 100}).call(1, "Count", b"1000000", grpc_timeout="100m")
        client.send(client.head(3, "Chat", grpc_timeout="100m"), DataFrame(3, MESSAGE))
        assert (await client.answer(3)).status == DEADLINE
        assert client.answers[3].messages == [b"x"]
        await client.settle()
        assert len(client.answers[1].data) == 100
        client.send(WindowUpdateFrame(0, LARGE), WindowUpdateFrame(1, LARGE))
        answer = await client.answer()
        assert answer.status == DEADLINE
        assert answer.messages == [b"%d" % number for number in range(len(answer.messages))]
        assert len(answer.messages) < 100_000


async def test_rst_stream_cancels_the_handler(port, subject):
    async with RawClient(port) as client:
        client.greet().call(1, "Wait")
        client.send(client.head(3, "Wait"))  # its handler never starts
        client.send(client.head(5, "Chat"), DataFrame(5, prefix(b"x")[:3]))
        await reached(lambda: subject.running == 1)
        client.send(*(RstStreamFrame(stream_id, error_code=CANCEL) for stream_id in (1, 3, 5)))
        await reached(lambda: not subject.running)
        client.call(7, "Echo")
        assert (await client.answer(7)).messages == [b"x"]
    assert subject.cancelled == 1


async def test_headers_that_grow_when_they_are_decoded(port):
    """A field of 4000 bytes is sent once and referred to 4000 times."""
    async with RawClient(port) as client:
        client.greet()
        block = client.head(1, "Echo").data + client.encoder.encode([("x", "y" * 4000)])
        client.send(HeadersFrame(1, block + b"\xbe" * 4000, flags=["END_HEADERS", "END_STREAM"]))
        await client.end()


async def test_drain_answers_open_calls_and_ignores_new_ones(subject):
    streams = range(1, 41, 2)
    server = serving(subject, drain_seconds=30)
    async with RawClient(await server.__aenter__()) as client:
        client.greet()
        for stream_id in streams:
            client.send(client.head(stream_id, "Chat"), DataFrame(stream_id, prefix(b"1") + b"1"))
        await client.until(lambda: len(client.answers) == len(streams))
        drained = asyncio.create_task(server.__aexit__(None, None, None))
        # The first GOAWAY only announces the second.
        await client.until(lambda: sum(isinstance(frame, GoAwayFrame) for frame in client.frames) == 2)
        client.call(41, "Echo")
        client.send(*(client.body(stream_id, b"2") for stream_id in streams))
        await drained
        assert await client.end() == 0
        assert list(client.answers) == list(streams)
        assert all((answer.status, answer.messages) == (OK, [b"1", b"2"]) for answer in client.answers.values())


async def test_drain_cancels_calls_after_the_grace(subject):
    server = serving(subject, drain_seconds=0.2)
    async with RawClient(await server.__aenter__()) as client:
        client.greet().call(1, "Wait")
        await reached(lambda: subject.running == 1)
        await server.__aexit__(None, None, None)
        assert (subject.running, subject.cancelled) == (0, 1)
        await client.end()
        assert client.answers[1].status == UNAVAILABLE
