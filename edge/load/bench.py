"""Serving overhead: the same requests through the runner alone and through the server, in turns, in one run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from edge.bundles.bundle import Bundle
from edge.bundles.preprocess import preprocessor
from edge.client import ONCE, Client
from edge.client.connection import Credentials
from edge.datatypes import Array
from edge.errors import Literally, UsageError
from edge.launch import running_server
from edge.runner import Runner
from edge.runtimes.build import load_runner

#: A measurement is divided into so many series.
ROUNDS = 5


class Latency(msgspec.Struct, frozen=True):
    """Percentiles of one series, in ms, and its throughput over the wall time that it took."""

    count: int
    p50_ms: float
    p95_ms: float
    p99_ms: float
    per_second: float


class BenchReport(msgspec.Struct, frozen=True):
    """Latency of one model.

    Attributes:
        model: its name.
        platform: runtime of the in-process side; empty without one.
        rows: batch size of each request.
        concurrency: number of clients.
        in_process: preprocessing and the runner, called directly; None without the bundle.
        served: as clients of the server see it.
        overhead_ratio: the served median over the in-process one; None without the latter. With several clients it
            includes the time that they wait for each other.
    """

    model: str
    platform: str
    rows: int
    concurrency: int
    in_process: Latency | None
    served: Latency
    overhead_ratio: float | None


class Series(NamedTuple):
    """Durations of single calls, and the wall time of all of them."""

    durations_ns: list[int]
    wall_ns: int


def bench(
    path: Path,
    *,
    url: str | None,
    requests: int,
    concurrency: int,
    rows: int,
    target: str = "auto",
    cache: Path | None = None,
    credentials: Credentials | None = None,
    advanced: Callable[[], None] = lambda: None,
) -> BenchReport:
    """Measure one bundle.

    Args:
        path: the bundle; its golden inputs are the requests.
        url: a server that serves it; None starts one, on a free port, for the time of the run.
        requests: how many to send in all, after as many tenths to warm up.
        concurrency: how many clients send at once, each waiting for its answer before the next request.
        rows: batch size of each request.
        target: the runtime for the in-process side and for a server that is started.
        cache: directory of built models.
        credentials: to reach the server at ``url`` with.
        advanced: called after each of the rounds.

    Raises:
        FewheadsError: the bundle is broken, or the server refuses.
    """
    bundle = Bundle.open(path)
    loaded = load_runner(bundle, target, cache)
    direct = direct_inputs(bundle, rows)
    local = in_process(bundle, loaded.runner)
    per_round = max(requests // ROUNDS, concurrency)
    alone, served = [], []
    try:
        with (
            server_for([bundle], url, target, cache) as address,
            Client(address, retries=ONCE, credentials=credentials) as client,
        ):

            def remote(inputs: dict[str, Array]) -> None:
                client.infer(bundle.manifest.name, inputs, version=str(bundle.manifest.version))

            for call in (local, remote):
                series(call, direct, max(requests // 10, concurrency), concurrency if call is remote else 1)
            for _ in range(ROUNDS):  # in turns, so that a noisy neighbour disturbs both alike
                alone.append(series(local, direct, per_round, 1))
                served.append(series(remote, direct, per_round, concurrency))
                advanced()
    finally:
        loaded.runner.close()
    one, other = latency(alone), latency(served)
    ratio = other.p50_ms / one.p50_ms
    return BenchReport(bundle.manifest.name, loaded.runner.platform, rows, concurrency, one, other, ratio)


@contextmanager
def server_for(
    bundles: Sequence[Bundle], url: str | None, target: str, cache: Path | None, arguments: Sequence[str] = ()
) -> Iterator[str]:
    """Yield the address of the server at ``url``, or of one that serves the bundles for the time of the block.

    Args:
        bundles: the bundles to serve.
        url: a server that does so already; None starts one, on a free port.
        target: the runtime of one that is started.
        cache: directory of built models.
        arguments: more arguments of ``fewheads serve`` for one that is started.

    Raises:
        UsageError: arguments are given for a server that is there already.
        ServerError: as :func:`edge.launch.running_server`.
    """
    if url:
        if arguments:
            given = Literally(f"{' '.join(arguments)} with a server that runs already")
            fix = "Leave out --url or the options of the server."
            raise UsageError("--server-option", given=given, expected="a server to start", fix=fix)
        yield url
        return
    with running_server([bundle.path for bundle in bundles], target=target, cache=cache, arguments=arguments) as ready:
        yield f"127.0.0.1:{ready.grpc_port}"


def direct_inputs(bundle: Bundle, rows: int) -> list[dict[str, Array]]:
    """Return requests made of golden rows: text where the model takes text, tensors otherwise.

    A model without a batch has one request, its golden inputs.

    Raises:
        UsageError: there is no batch to hold ``rows``.
    """
    arrays = bundle.golden.raw or bundle.golden.inputs
    if not bundle.manifest.max_batch_size:
        if rows > 1:
            expected = f"1, since {bundle.manifest.name} has no batch"
            raise UsageError("--rows", given=rows, expected=expected, fix="Leave it out.")
        return [{name: _plain(array) for name, array in arrays.items()}]
    picks = [np.arange(start, start + rows) % bundle.golden.rows for start in range(bundle.golden.rows)]
    return [{name: _plain(array[pick]) for name, array in arrays.items()} for pick in picks]


def _plain(array: Array) -> Array:
    return array.astype(np.object_) if array.dtype.kind == "S" else array


def in_process(bundle: Bundle, runner: Runner) -> Callable[[dict[str, Array]], None]:
    """Return a function that preprocesses a request and runs it, without a server."""
    step = preprocessor(bundle)

    def call(inputs: dict[str, Array]) -> None:
        runner.infer(step(*(inputs[spec.name] for spec in step.inputs)) if step else inputs)

    return call


def series(
    call: Callable[[dict[str, Array]], None], inputs: list[dict[str, Array]], count: int, concurrency: int
) -> Series:
    """Call ``count`` times from ``concurrency`` threads; the first error of any of them is raised."""
    durations: list[int] = []
    failures: list[BaseException] = []
    share = count // concurrency

    def client(offset: int) -> None:
        try:
            for index in range(offset, offset + share):
                begun = time.perf_counter_ns()
                call(inputs[index % len(inputs)])
                durations.append(time.perf_counter_ns() - begun)
        except BaseException as error:  # handed to the caller below
            failures.append(error)

    begun = time.perf_counter_ns()
    if concurrency == 1:
        client(0)
    else:
        threads = [threading.Thread(target=client, args=(index * share,)) for index in range(concurrency)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]
    return Series(durations, time.perf_counter_ns() - begun)


def latency(parts: list[Series]) -> Latency:
    """Return the percentiles of several series together."""
    durations = np.array([duration for part in parts for duration in part.durations_ns]) / 1e6
    p50, p95, p99 = (float(value) for value in np.percentile(durations, [50, 95, 99]))
    return Latency(len(durations), p50, p95, p99, len(durations) / (sum(part.wall_ns for part in parts) / 1e9))
