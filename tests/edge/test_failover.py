"""Clients of real servers that are overloaded, killed and restarted: no request is lost, no deadline missed."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from edge.client import AsyncClient, Client, InferResult, Retries, text
from edge.errors import ServerError
from edge.launch import running_server
from edge.server import Ready
from tests.support.metrics import wait_until
from tests.support.models import ORACLE

MANY = Retries(attempts=50, budget=10_000)


@pytest.mark.slow
async def test_full_server_answers_all_requests_in_the_end(url: str) -> None:
    """There are three times as many requests at once as its queue holds; each is repeated when the server says."""
    async with AsyncClient(url, 60.0, retries=MANY) as client:
        calls = (client.infer("busy", {"steps": np.array([1 + number % 9])}) for number in range(96))
        results = await asyncio.gather(*calls)
    assert [int(result.outputs["done"][0]) for result in results] == [1 + number % 9 for number in range(96)]
    assert max(result.call.attempts for result in results) > 1


async def test_full_server_keeps_the_deadline(url: str) -> None:
    async with AsyncClient(url, retries=MANY) as client:

        async def infer() -> tuple[float, str]:
            begun, code = time.monotonic(), ""
            try:
                await client.infer("busy", {"steps": np.array([50])}, timeout_seconds=0.3)
            except ServerError as error:
                code = error.code
            return time.monotonic() - begun, code

        ended = await asyncio.gather(*(infer() for _ in range(96)))
    codes = {code for _, code in ended} - {""}
    assert codes
    assert codes <= {"RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"}
    assert max(seconds for seconds, _ in ended) < 0.3 + 0.4  # the event loop itself is late on a busy machine


@contextmanager
def mortal_server(bundles: list[Path]) -> Iterator[Ready]:
    """Run a server that the block kills."""
    with pytest.raises(ServerError, match="exit code -9"), running_server(bundles) as ready:
        yield ready


@pytest.mark.slow
def test_no_request_is_lost_when_a_server_is_killed_and_restarted(bundles: list[Path]) -> None:
    """Eight threads use two servers, of which one is killed, and later started again at its address."""
    only = [bundle for bundle in bundles if bundle.name == "oracle"]
    results: list[InferResult] = []
    failures: list[BaseException] = []
    stop = threading.Event()

    def infer(client: Client) -> None:
        number = 0
        try:
            while not stop.is_set():
                result = client.infer(ORACLE, {"expression": text([f"{number % 100} + 1"])})
                assert result.outputs["value"][0, 0] == number % 100 + 1
                results.append(result)
                number += 1
        except BaseException as error:
            failures.append(error)

    def recent(seconds: float) -> Counter[str]:
        """Return how many of the next requests each server answers."""
        before = len(results)
        time.sleep(seconds)
        return Counter(result.call.server for result in results[before + 50 :])

    with running_server(only) as stays:
        with mortal_server(only) as goes:
            urls = [f"127.0.0.1:{ready.grpc_port}" for ready in (stays, goes)]
            client = Client(urls)
            threads = [threading.Thread(target=infer, args=(client,)) for _ in range(8)]
            for thread in threads:
                thread.start()
            shared = recent(1.0)
            assert min(shared[url] for url in urls) > 0.45 * shared.total()
            os.kill(goes.process_id, signal.SIGKILL)
            assert set(recent(1.0)) == {urls[0]}
        with running_server(only, arguments=[f"--grpc-port={goes.grpc_port}"]), client:
            assert wait_until(lambda: set(recent(0.2)) == set(urls), 10)
            stop.set()
            for thread in threads:
                thread.join()
    assert not failures
    assert 1 <= sum(result.call.attempts > 1 for result in results) <= 100
