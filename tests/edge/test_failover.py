"""Clients of real servers that are overloaded, killed and started again: no request is lost, no deadline missed."""

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

from edge.client import Client, InferResult, Retries, text
from edge.client.aio import AsyncClient
from edge.errors import ServerError
from edge.launch import running_server
from edge.server import Ready
from tests.support.models import ORACLE

MANY = Retries(attempts=50, budget=10_000)


@pytest.mark.slow
async def test_a_full_server_answers_all_in_the_end(url: str) -> None:
    """Three times as many at once as its queue holds; each that is refused comes back when it was told to."""
    async with AsyncClient(url, 60.0, retries=MANY) as client:
        calls = (client.infer("busy", {"steps": np.array([1 + number % 9])}) for number in range(96))
        results = await asyncio.gather(*calls)
    assert [int(result.outputs["done"][0]) for result in results] == [1 + number % 9 for number in range(96)]
    assert max(result.call.attempts for result in results) > 1


async def test_a_deadline_holds_at_a_full_server(url: str) -> None:
    async with AsyncClient(url, retries=MANY) as client:

        async def ask() -> tuple[float, InferResult | ServerError]:
            begun = time.monotonic()
            try:
                result: InferResult | ServerError = await client.infer(
                    "busy", {"steps": np.array([50])}, timeout_seconds=0.3
                )
            except ServerError as error:
                result = error
            return time.monotonic() - begun, result

        ended = await asyncio.gather(*(ask() for _ in range(96)))
    codes = Counter(error.code for _, error in ended if isinstance(error, ServerError))
    assert set(codes) <= {"RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"}
    assert codes
    assert max(seconds for seconds, _ in ended) < 0.3 + 0.4  # the event loop itself is late on a busy machine


@contextmanager
def mortal_server(bundles: list[Path]) -> Iterator[Ready]:
    """A server that the block kills."""
    with pytest.raises(ServerError, match="exit code -9"), running_server(bundles) as ready:
        yield ready


@pytest.mark.slow
def test_no_request_is_lost_when_a_server_is_killed(bundles: list[Path]) -> None:
    """Eight threads ask two servers; one is killed in the middle, and all of it is answered."""
    only = [bundle for bundle in bundles if bundle.name == "oracle"]
    results: list[InferResult] = []
    failures: list[BaseException] = []
    stop = threading.Event()

    def ask(client: Client) -> None:
        number = 0
        try:
            while not stop.is_set():
                result = client.infer(ORACLE, {"expression": text([f"{number % 100} + 1"])})
                assert result.outputs["value"][0, 0] == number % 100 + 1
                results.append(result)
                number += 1
        except BaseException as error:
            failures.append(error)

    with running_server(only) as stays, mortal_server(only) as goes:
        urls = [f"127.0.0.1:{ready.grpc_port}" for ready in (stays, goes)]
        with Client(urls) as client:
            threads = [threading.Thread(target=ask, args=(client,)) for _ in range(8)]
            for thread in threads:
                thread.start()
            time.sleep(1.0)
            before = len(results)
            os.kill(goes.process_id, signal.SIGKILL)
            time.sleep(1.5)
            stop.set()
            for thread in threads:
                thread.join()
    assert not failures
    first, second = results[:before], results[before + 50 :]
    counts = Counter(result.call.server for result in first)
    assert min(counts[url] for url in urls) > 0.45 * len(first)
    assert {result.call.server for result in second} == {urls[0]}
    moved = [result for result in results if result.call.attempts > 1]
    assert 1 <= len(moved) <= 100
    print(f"{len(results)} answers, {len(moved)} of them moved, none lost")


@pytest.mark.slow
def test_a_server_that_restarts_is_asked_again(bundles: list[Path]) -> None:
    only = [bundle for bundle in bundles if bundle.name == "oracle"]
    question = {"expression": text(["1 + 1"])}
    with running_server(only) as stays:
        with running_server(only) as first:
            pass
        urls = [f"127.0.0.1:{ready.grpc_port}" for ready in (stays, first)]
        with Client(urls) as client:
            assert {client.infer(ORACLE, question).call.server for _ in range(20)} == {urls[0]}
            with running_server(only, arguments=[f"--grpc-port={first.grpc_port}"]):
                begun = time.monotonic()
                while client.infer(ORACLE, question).call.server != urls[1]:
                    assert time.monotonic() - begun < 10
                    time.sleep(0.01)
                print(f"asked again after {time.monotonic() - begun:.2f} s")
                assert {client.infer(ORACLE, question).call.server for _ in range(2)} == set(urls)
