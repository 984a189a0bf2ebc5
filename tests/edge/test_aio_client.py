"""The asyncio client: the same answers, errors and attempts, awaited; and calls that are cancelled."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing

import grpc
import numpy as np
import pytest

from edge.client import InferFailure, InferRequest, InferResult, Retries, text
from edge.client.aio import AsyncClient
from edge.errors import ServerError, UsageError
from edge.pb import inference_pb2 as pb
from edge.server import Ready
from tests.support.metrics import is_at_rest
from tests.support.models import ORACLE
from tests.support.scripted_servers import doubled, peer, refusing, x

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


def asked(number: int, model: str = ORACLE) -> InferRequest:
    return InferRequest(model=model, inputs={"expression": text([f"{number} - 1"])}, request_id=str(number))


async def until(reached: object, seconds: float = 10) -> bool:
    """As gauges.wait_until, while the event loop goes on."""
    assert callable(reached)
    limit = time.monotonic() + seconds
    while not await asyncio.to_thread(reached) and time.monotonic() < limit:
        await asyncio.sleep(0.02)
    return bool(await asyncio.to_thread(reached))


async def test_many_questions_at_once(url: str) -> None:
    async with AsyncClient(url) as client:
        calls = [client.infer(ORACLE, {"expression": text([f"{number} + 1"])}, timings=True) for number in range(30)]
        results = await asyncio.gather(*calls)
    assert [float(result.outputs["value"][0, 0]) for result in results] == [number + 1 for number in range(30)]
    assert all(result.call.server == url and result.timings_ns for result in results)


async def test_the_rest_of_the_protocol(url: str) -> None:
    async with AsyncClient(url) as client:
        inputs, _ = await client.metadata(ORACLE)
        assert {spec.name for spec in inputs} == {"expression", "x"}
        assert any(model["name"] == ORACLE for model in await client.index())
        assert (await client.ready(ORACLE), await client.ready("zz"), await client.ready()) == (True, False, False)
        assert (await client.telemetry()).time_ms > 0
        async with aclosing(client.watch(100)) as readings:  # type: ignore[type-var]
            times = [(await anext(readings)).time_ms for _ in range(3)]
        assert times[2] - times[0] >= 150
        with pytest.raises(ServerError, match="UNIMPLEMENTED"):
            await client.load(ORACLE)
        with pytest.raises(ServerError, match="UNIMPLEMENTED"):
            await client.unload(ORACLE)
        with pytest.raises(ServerError, match="NOT_FOUND"):
            await client.infer("zz", x())


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_a_stream(url: str, server: Ready, asynchronous: bool) -> None:
    requests = [asked(1), asked(2, "zz"), asked(3)]

    async def slowly() -> AsyncIterator[InferRequest]:
        for request in requests:
            await asyncio.sleep(0)
            yield request

    async with AsyncClient(url) as client:
        answers = [each async for each in client.infer_stream(slowly() if asynchronous else requests)]
        assert [each.request_id for each in answers] == ["1", "2", "3"]
        assert [type(each) for each in answers] == [InferResult, InferFailure, InferResult]
        async with aclosing(client.infer_stream(asked(number) for number in range(10_000))) as endless:  # type: ignore[type-var]
            assert (await anext(endless)).request_id == "0"
        assert await until(lambda: is_at_rest(server))


async def test_what_the_questions_raise(url: str) -> None:
    async def requests() -> AsyncIterator[InferRequest]:
        yield asked(1)
        raise LookupError("the disk is full")

    async with AsyncClient(url) as client:
        answers = client.infer_stream(requests())
        assert (await anext(answers)).request_id == "1"
        with pytest.raises(LookupError, match="the disk is full"):
            await anext(answers)


async def test_cancelling_a_call_cancels_it_at_the_server() -> None:
    def wait(request: pb.ModelInferRequest, context: grpc.ServicerContext) -> pb.ModelInferResponse:
        one.gone.wait(10)
        return doubled(request, context)

    with peer(wait) as one:
        async with AsyncClient(one.url) as client:
            call = asyncio.create_task(client.infer("m", x()))
            assert await until(lambda: one.asked)
            assert not one.gone.is_set()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert await until(one.gone.is_set, 2)
            assert len(one.asked) == 1


async def test_cancelling_a_call_that_pauses() -> None:
    with peer(refusing(grpc.StatusCode.RESOURCE_EXHAUSTED, after_ms=5000)) as one:
        async with AsyncClient(one.url) as client:
            call = asyncio.create_task(client.infer("m", x()))
            assert await until(lambda: one.asked)
            await asyncio.sleep(0.05)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert len(one.asked) == 1


async def test_a_server_that_goes_and_comes_back() -> None:
    with peer() as stays:
        with peer() as goes:
            client = AsyncClient([stays.url, goes.url])
            assert {(await client.infer("m", x())).call.server for _ in range(2)} == {stays.url, goes.url}
        async with client:
            results = await asyncio.gather(*(client.infer("m", x(number)) for number in range(40)))
            assert [float(result.outputs["y"][0]) for result in results] == [2 * number for number in range(40)]
            assert (await client.infer("m", x())).call.attempts == 1
            with peer(port=int(goes.url.split(":")[1])):
                for _ in range(200):
                    if (await client.infer("m", x())).call.server == goes.url:
                        break
                    await asyncio.sleep(0.02)
                assert {(await client.infer("m", x())).call.server for _ in range(2)} == {stays.url, goes.url}


async def test_attempts_and_deadlines() -> None:
    retries = Retries(attempts=100, first_seconds=0.001, longest_seconds=0.01, budget=100)
    with peer(refusing(UNAVAILABLE, times=2)) as one:
        async with AsyncClient(one.url, retries=retries) as client:
            assert (await client.infer("m", x())).call.attempts == 3
            one.behave = refusing(UNAVAILABLE)
            begun = time.monotonic()
            with pytest.raises(ServerError) as caught:
                await client.infer("m", x(), timeout_seconds=0.6)
            assert time.monotonic() - begun < 1.2
            assert caught.value.attempts > 2


async def test_bad_input_is_sent_once() -> None:
    with peer(refusing(grpc.StatusCode.INVALID_ARGUMENT)) as one:
        async with AsyncClient(one.url) as client:
            with pytest.raises(ServerError, match="INVALID_ARGUMENT"):
                await client.infer("m", x())
            with pytest.raises(UsageError, match="complex"):
                await client.infer("m", {"x": np.zeros(1, np.complex64)})
        assert len(one.asked) == 1


async def test_after_close(url: str) -> None:
    client = AsyncClient(url)
    assert (await client.infer(ORACLE, {"expression": text(["1"])})).outputs["value"] == 1
    await client.close()
    with pytest.raises(UsageError, match="a call after close"):
        await client.infer(ORACLE, {"expression": text(["1"])})


async def test_close_ends_what_is_on_its_way() -> None:
    def wait(request: pb.ModelInferRequest, context: grpc.ServicerContext) -> pb.ModelInferResponse:
        one.gone.wait(10)
        return doubled(request, context)

    with peer(wait) as one:
        client = AsyncClient(one.url)
        call = asyncio.create_task(client.infer("m", x()))
        assert await until(lambda: one.asked)
        await client.close()
        with pytest.raises((ServerError, asyncio.CancelledError)) as caught:
            await call
        assert caught.type is asyncio.CancelledError or "CANCELLED" in str(caught.value)
