"""The policy ``deadline`` for loops: as many loops as fit, and the prediction so far in time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from edge.errors import DeadlineExceeded, Overloaded
from edge.pb import inference_pb2 as pb
from edge.programs.program import LoopLimits
from edge.scheduling.tier_executor import ServingOptions
from tests.support.inference_service import Running, running_service
from tests.support.loop_model import ENDLESS, MOST_LOOPS, NAME, array_of, loop_request, write_halving_bundle

ENDLESS_REQUEST = {"max_loops": MOST_LOOPS}


@pytest_asyncio.fixture
async def running(tmp_path: Path) -> AsyncIterator[Running]:
    async with running_service(tmp_path, lambda place: write_halving_bundle(place / NAME)) as running:
        yield running


def end_of(response: pb.ModelInferResponse) -> tuple[list[int], str]:
    return array_of(response, "loops").tolist(), response.parameters["stopped"].string_param


async def test_a_request_gets_as_many_loops_as_fit_and_says_so(running: Running) -> None:
    begun = time.monotonic()
    request = loop_request(1, ENDLESS, policy="deadline", **ENDLESS_REQUEST)
    response = await running.infer(request, begun + 1)
    (settled, cut), stopped = end_of(response)
    assert (settled, stopped) == (4, "deadline")
    assert 4 < cut < MOST_LOOPS
    assert array_of(response, "prediction").tolist() == [15 / 16, 3]
    assert await running.at_rest(NAME)
    assert running.repository.find(NAME, "").statistics.runs()["full"].requests == 1
    # With enough time it stops for the usual reasons.
    request = loop_request(1, policy="deadline", max_loops=3)
    assert end_of(await running.infer(request, time.monotonic() + 60)) == ([3], "budget")
    assert end_of(await running.infer(request)) == ([3], "budget")
    # Without the policy, it is too late.
    with pytest.raises(DeadlineExceeded):
        await running.infer(loop_request(ENDLESS, **ENDLESS_REQUEST), time.monotonic() + 0.2)
    assert running.counted(NAME).failures == {"DeadlineExceeded": 1}


async def test_requests_beside_it_go_on(running: Running) -> None:
    long = asyncio.create_task(running.infer(loop_request(ENDLESS, max_loops=20_000)))
    await asyncio.sleep(0.01)
    cut = await running.infer(loop_request(ENDLESS, policy="deadline", **ENDLESS_REQUEST), time.monotonic() + 0.3)
    assert end_of(cut)[1] == "deadline"
    assert end_of(await long) == ([20_000], "budget")


async def test_the_policy_of_the_server_counts(tmp_path: Path) -> None:
    options = ServingOptions(policy="deadline")
    async with running_service(tmp_path, lambda place: write_halving_bundle(place / NAME), serving=options) as running:
        response = await running.infer(loop_request(ENDLESS, **ENDLESS_REQUEST), time.monotonic() + 0.3)
        assert end_of(response)[1] == "deadline"
        request = loop_request(ENDLESS, policy="pinned", **ENDLESS_REQUEST)
        with pytest.raises(DeadlineExceeded):
            await running.infer(request, time.monotonic() + 0.1)


async def test_admission_counts_the_loops_of_each_request(running: Running) -> None:
    executor = running.model(NAME).executors["full"]
    finest = {"tolerance": 1e-9}
    executor.loops.observe(LoopLimits(MOST_LOOPS, 1e-9), MOST_LOOPS)  # ten seconds and more
    beside = asyncio.create_task(running.infer(loop_request(ENDLESS, **ENDLESS_REQUEST)))  # the next ones are queued
    await asyncio.sleep(0.05)
    endless = loop_request(ENDLESS, **finest, **ENDLESS_REQUEST)
    with pytest.raises(Overloaded) as caught:
        await running.infer(endless, time.monotonic() + 0.5)
    assert caught.value.cause == "deadline"
    few = loop_request(ENDLESS, max_loops=2, **finest)
    assert end_of(await running.infer(few, time.monotonic() + 5)) == ([2], "budget")
    endless.parameters["policy"].string_param = "deadline"
    assert end_of(await running.infer(endless, time.monotonic() + 0.5))[1] == "deadline"
    for _ in range(20):  # on a busy machine, the deadline may pass before the admission
        with pytest.raises((Overloaded, DeadlineExceeded)) as caught:  # not even a step fits
            await running.infer(endless, time.monotonic() + 0.0009)
        if caught.type is Overloaded:
            break
    assert caught.type is Overloaded
    beside.cancel()
    assert await running.at_rest(NAME)
