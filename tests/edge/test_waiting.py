"""Requests that wait for models: their limits and deadlines, who may cause a load, and how they count."""

import asyncio

import pytest

from edge.errors import Overloaded
from tests.support.on_demand_models import ask, serving, until


async def test_waiting_requests_count_in_the_limits_of_the_queue(tmp_path, loads):
    loads.held = "a"
    async with serving(tmp_path, 1) as running:
        running.scheduler.queue.max_jobs = 3
        waiting = [asyncio.create_task(ask(running, "a")) for _ in range(3)]
        await until(lambda: loads["a"])
        with pytest.raises(Overloaded, match="queue: got 3 waiting requests, expected fewer than 3"):
            await ask(running, "a")
        running.scheduler.queue.max_jobs, running.scheduler.queue.max_bytes = 9, running.service.threads._bytes + 20
        with pytest.raises(Overloaded, match=r"queue: got \d+ bytes with this request, expected at most \d+"):
            await ask(running, "a")
        loads.goes_on.set()
        await asyncio.gather(*waiting)
        assert running.counted("a").drops == {("Overloaded", "requests"): 1, ("Overloaded", "bytes"): 1}
