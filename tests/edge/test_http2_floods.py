"""HTTP/2 clients that cancel, flood or send garbage, and the shutdown with open calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from hyperframe.frame import ContinuationFrame, DataFrame, GoAwayFrame, HeadersFrame, PingFrame, RstStreamFrame
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge.http2.messages import prefix
from tests.support.http2_client import RawClient, Subject, raw, reached, serving, shared

CANCEL, CALM = 8, 11
OK, UNAVAILABLE = 0, 14


@pytest.fixture(params=[False, True], ids=["coroutine", "direct"])
def subject(request: pytest.FixtureRequest) -> Subject:
    return Subject(direct=request.param)


@pytest.fixture
async def port(subject: Subject) -> AsyncIterator[int]:
    async with shared(subject) as port:
        yield port


async def test_rst_stream_cancels_the_handler(port: int, subject: Subject) -> None:
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


async def test_closed_connection_cancels_the_handler(port: int, subject: Subject) -> None:
    async with RawClient(port) as client:
        client.greet().call(1, "Wait")
        await reached(lambda: subject.running == 1)
    await reached(lambda: not subject.running)
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
async def test_flood_of_pings_ends_the_connection(port: int, count: int) -> None:
    async with RawClient(port) as client:
        client.greet().send(*(PingFrame(0, opaque_data=b"%08d" % number) for number in range(count)))
        # nghttp2 closes without GOAWAY once more than a thousand acknowledgements are queued.
        assert await client.end() == (CALM if count == 100 else None)


async def test_headers_without_an_end(port: int) -> None:
    async with RawClient(port) as client:
        client.greet().send(HeadersFrame(1, client.head(1, "Echo").data))
        client.send(*(ContinuationFrame(1, b"") for _ in range(10_000)))
        await client.end()


async def test_headers_that_grow_when_they_are_decoded(port: int) -> None:
    """A field of 4000 bytes is sent once and referred to 4000 times."""
    async with RawClient(port) as client:
        client.greet()
        block = client.head(1, "Echo").data + client.encoder.encode([("x", "y" * 4000)])
        client.send(HeadersFrame(1, block + b"\xbe" * 4000, flags=["END_HEADERS", "END_STREAM"]))
        await client.end()


FRAMES = st.builds(
    raw, st.integers(0, 12), st.integers(0, 255), st.sampled_from([0, 1, 2, 3, 5, 2**31 - 1]), st.binary(max_size=40)
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.binary(max_size=40) | FRAMES | st.just(b"call"), max_size=12))
def test_garbage(said: list[bytes]) -> None:
    async def converse() -> None:
        async with serving(Subject()) as port:
            async with RawClient(port) as client:
                await client.greet().agreed()
                for number, data in enumerate(said):
                    if data == b"call":
                        client.call(2 * number + 7, "Echo")
                    else:
                        client.writer.write(data)
                client.writer.write_eof()
                await client.end()
            async with RawClient(port) as client:
                client.greet().call(1, "Echo")
                assert (await client.answer()).messages == [b"x"]

    asyncio.run(converse())


# Shutdown.


async def test_after_goaway_of_the_client_open_calls_are_answered(port: int) -> None:
    async with RawClient(port) as client:
        client.greet().send(client.head(1, "Chat"), GoAwayFrame(0), DataFrame(1, prefix(b"1") + b"1"))
        await client.until(lambda: 1 in client.answers and bool(client.answers[1].data))
        client.send(client.body(1, b"2"))
        answer = await client.answer()
        assert (answer.status, answer.messages) == (OK, [b"1", b"2"])
        assert await client.end() is None


async def test_drain_answers_open_calls_and_ignores_new_ones(subject: Subject) -> None:
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


async def test_drain_cancels_calls_after_the_grace(subject: Subject) -> None:
    server = serving(subject, drain_seconds=0.2)
    async with RawClient(await server.__aenter__()) as client:
        client.greet().call(1, "Wait")
        await reached(lambda: subject.running == 1)
        await server.__aexit__(None, None, None)
        assert (subject.running, subject.cancelled) == (0, 1)
        await client.end()
        assert client.answers[1].status == UNAVAILABLE
