"""The policy ``deadline`` for loops: as many loops as fit, and the prediction so far in time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from edge.errors import DeadlineExceeded, Overloaded
from edge.instruments.metrics import ModelNow
from edge.instruments.snapshot import LoopEnd
from edge.instruments.statistics import ModelStatistics
from edge.pb import inference_pb2 as pb
from edge.programs.program import LoopLimits
from edge.scheduling.tier_executor import ServingOptions
from edge.telemetry.metrics import families
from edge.telemetry.telemetry import request_metrics
from tests.support.in_process import Running, running_service
from tests.support.loop_model import ENDLESS, MOST_LOOPS, NAME, array_of, loop_request, write_halving_bundle
from tests.support.metrics import CountedRequest, rendered

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


def page_of(statistics: ModelStatistics) -> list[str]:
    page = rendered(families([ModelNow("m", "1", statistics.snapshot())]))
    lines = [line.replace('model="m",', "").replace(',version="1"', "") for line in page.splitlines()]
    return [line for line in lines if "loop" in line or "residual" in line if not line.startswith("#")]


async def test_requests_are_counted_by_loops_residual_and_end(tmp_path: Path) -> None:
    async with running_service(tmp_path, lambda place: write_halving_bundle(place / NAME)) as running:
        for message in (
            loop_request(1, 2, tolerance=0.5),  # 1 loop, 0.5
            loop_request(1, tolerance=0.06, max_loops=3),  # 3 loops, 0.125
            loop_request(1, tolerance=0.3),  # 2 loops, 0.25
        ):
            await running.infer(message)
        cut = loop_request(ENDLESS, policy="deadline", max_loops=MOST_LOOPS)
        await running.infer(cut, time.monotonic() + 0.3)
        lines = page_of(running.repository.find(NAME, "").statistics)
        assert 'fewheads_request_loops_bucket{le="1",tier="full"} 1.0' in lines
        assert 'fewheads_request_loops_bucket{le="2",tier="full"} 2.0' in lines
        assert 'fewheads_request_loops_bucket{le="3",tier="full"} 3.0' in lines
        assert 'fewheads_residual_ratio_bucket{le="0.1",tier="full"} 0.0' in lines
        assert 'fewheads_residual_ratio_bucket{le="0.2",tier="full"} 1.0' in lines
        assert 'fewheads_residual_ratio_bucket{le="0.5",tier="full"} 3.0' in lines
        ends = [line for line in lines if line.startswith("fewheads_loop_ends_total")]
        counts = {'"tolerance"': 2, '"budget"': 1, '"deadline"': 1}
        expected = [f'fewheads_loop_ends_total{{stopped={end},tier="full"}} {count}.0' for end, count in counts.items()]
        assert ends == expected
        telemetry = {metric.name for metric in request_metrics(running.counted(NAME))}
        assert {"fewheads_request_loops_sum", "fewheads_residual_ratio_count", "fewheads_loop_ends_total"} <= telemetry


def test_diverged_loop_does_not_spoil_the_sum_and_others_have_no_such_metrics() -> None:
    statistics = ModelStatistics()
    statistics.succeeded(CountedRequest())
    assert page_of(statistics) == []
    for residual in (float("nan"), float("inf"), 5e8):
        statistics.succeeded(CountedRequest(end=LoopEnd("full", 7, residual, "budget")))
    assert 'fewheads_residual_ratio_sum{tier="full"} 3000.0' in page_of(statistics)
    assert 'fewheads_residual_ratio_bucket{le="1",tier="full"} 0.0' in page_of(statistics)
