"""Concurrent calls: a cancelled one or a failed reply costs no other its answer, its count or its use."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge.pb import inference_pb2 as pb
from edge.programs.program import Computed
from tests.support.inference_service import Running, running_service
from tests.support.jobs import WAIT, occupied
from tests.support.sample_requests import good

CALLS, CANCELLED = 6, 2
NINE = np.float32(9).tobytes()


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Running]:
    async with running_service(tmp_path, target="simulated:20", device_bound=True) as running:
        yield running


async def queued(running: Running) -> list[asyncio.Task[pb.ModelInferResponse]]:
    """Queue calls, which will share a run."""
    calls = [asyncio.create_task(running.infer(good())) for _ in range(CALLS)]
    while len(running.scheduler.queue) < CALLS:
        await asyncio.sleep(0.001)
    return calls


async def while_queued(running: Running) -> list[asyncio.Task[pb.ModelInferResponse]]:
    with occupied(running.scheduler):
        calls = await queued(running)
        calls[CANCELLED].cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(running.scheduler.queue) == CALLS - 1
    return calls


async def while_running(running: Running) -> list[asyncio.Task[pb.ModelInferResponse]]:
    program = running.model().executors["full"].program
    started, go = threading.Event(), threading.Event()

    def held(*arguments: Any) -> Computed:
        started.set()
        assert go.wait(WAIT)
        return program.compute(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "start", lambda *arguments: partial(held, *arguments))
        with occupied(running.scheduler):
            calls = await queued(running)
        assert await asyncio.to_thread(started.wait, WAIT)
        calls[CANCELLED].cancel()
        await asyncio.wait({calls[CANCELLED]})
        go.set()
    return calls


def while_delivered(*, first: bool) -> Callable[[Running], Any]:
    """Cancel in the turn of the event loop in which the answers are delivered, before or after them."""

    async def cancel(running: Running) -> list[asyncio.Task[pb.ModelInferResponse]]:
        loop = asyncio.get_running_loop()
        schedule = loop.call_soon_threadsafe

        def with_cancel(deliver: Callable[[], None], *arguments: Any, **options: Any) -> asyncio.Handle:
            def turn() -> None:
                if first:
                    calls[CANCELLED].cancel()
                deliver(*arguments)
                if not first:
                    calls[CANCELLED].cancel()

            ours = getattr(deliver, "__self__", None) is running.service
            return schedule(turn, **options) if ours else schedule(deliver, *arguments, **options)

        with pytest.MonkeyPatch.context() as patch:
            with occupied(running.scheduler):
                calls = await queued(running)
                patch.setattr(loop, "call_soon_threadsafe", with_cancel)
            await asyncio.wait(calls, timeout=10)
        return calls

    return cancel


STAGES = {
    "queued": while_queued,
    "running": while_running,
    "just before delivery": while_delivered(first=True),
    "just after delivery": while_delivered(first=False),
}


@pytest.mark.parametrize("stage", STAGES)
async def test_cancelled_call_harms_no_other(running: Running, stage: str) -> None:
    calls = await STAGES[stage](running)
    _, pending = await asyncio.wait(calls, timeout=10)
    assert not pending
    others = [call for index, call in enumerate(calls) if index != CANCELLED]
    assert [call.result().raw_output_contents[0] for call in others] == [NINE] * len(others)
    assert calls[CANCELLED].cancelled()
    assert await running.at_rest()
    now = running.counted()
    assert now.success + sum(now.failures.values()) == CALLS
    if stage in ("queued", "running"):
        assert now.drops == {("Cancelled", stage): 1}
    assert now.execution_count == 1


async def test_failed_reply_harms_no_other_call(running: Running, caplog: pytest.LogCaptureFixture) -> None:
    answered: list[int] = []

    def reply(index: int, outcome: pb.ModelInferResponse | Exception) -> None:
        if index == CANCELLED:
            raise ZeroDivisionError("a transport's own")
        assert isinstance(outcome, pb.ModelInferResponse)
        answered.append(index)

    with occupied(running.scheduler):
        for index in range(CALLS):
            running.service.start(good(), None, lambda outcome, index=index: reply(index, outcome))
    assert await running.at_rest()
    assert answered == [index for index in range(CALLS) if index != CANCELLED]
    assert "a transport's own" in caplog.text
    assert (await running.infer(good())).raw_output_contents[0] == NINE
