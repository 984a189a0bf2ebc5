"""Serving overhead: latency of the same requests in process and through a server, in turns."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from edge.bundles.bundle import Bundle
from edge.bundles.preprocess import preprocessor
from edge.client import ONCE, Client
from edge.client.connection import Credentials
from edge.errors import Literally, UsageError
from edge.launch import running_server
from edge.load.inputs import Inputs, golden_inputs, random_inputs, text_inputs
from edge.runner import Runner
from edge.runtimes.build import load_runner

#: Number of series that a measurement consists of.
ROUNDS = 5


class Latency(msgspec.Struct, frozen=True):
    """Percentiles in ms, and the throughput over the elapsed time."""

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
        in_process: of preprocessing and the runner; None without the bundle.
        served: as clients of the server see it.
        overhead_ratio: of the served median to the in-process one; None without the latter. With several clients it
            includes the time that they wait for each other.
    """

    model: str
    platform: str
    rows: int
    concurrency: int
    in_process: Latency | None
    served: Latency
    overhead_ratio: float | None


class _Series(NamedTuple):
    """Durations of single calls, and the elapsed time of all of them."""

    durations_ns: list[int]
    elapsed_ns: int


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
    """Measure a bundle in process and through a server, with golden inputs.

    Args:
        path: the bundle.
        url: a server that serves it; None starts one on a free port.
        requests: total number, after a tenth of them to warm up.
        concurrency: number of clients, each of which waits for its response before the next request.
        rows: batch size of each request.
        target: runtime of the in-process side, and of a server that is started.
        cache: directory of built models.
        credentials: TLS and a token for the server at ``url``.
        advanced: called after each round.

    Raises:
        FewheadsError: the bundle is broken, or the server refuses.
    """
    bundle = Bundle.open(path)
    manifest, inputs = bundle.manifest, golden_inputs(bundle, rows)
    loaded = load_runner(bundle, target, cache)
    try:
        with (
            server_for([bundle], url, target, cache) as address,
            Client(address, retries=ONCE, credentials=credentials) as client,
        ):
            remote = partial(client.infer, manifest.name, version=str(manifest.version))
            calls: dict[Callable[[Inputs], Any], int] = {in_process(bundle, loaded.runner): 1, remote: concurrency}
            one, other = _in_turns(calls, inputs, requests, concurrency, advanced)
    finally:
        loaded.runner.close()
    ratio = other.p50_ms / one.p50_ms
    return BenchReport(manifest.name, loaded.runner.platform, rows, concurrency, one, other, ratio)


def bench_served(
    model: str,
    *,
    url: str,
    requests: int,
    concurrency: int,
    rows: int,
    texts: Sequence[str] = (),
    credentials: Credentials | None = None,
    advanced: Callable[[], None] = lambda: None,
) -> BenchReport:
    """Measure a served model without its bundle.

    Args:
        model: its name.
        url: address of the server.
        requests: as of :func:`bench`, like the next two and the last two.
        concurrency: number of clients.
        rows: batch size.
        texts: lines to send, with a tab between the texts of a pair; empty sends random numbers.
        credentials: TLS and a token.
        advanced: called after each round.

    Raises:
        UsageError: the model does not take random numbers, or the texts or the rows do not fit it.
        ServerError: the server cannot be reached, or refuses.
    """
    with Client(url, retries=ONCE, credentials=credentials) as client:
        specs, _ = client.metadata(model)
        if texts:
            names = [spec.name for spec in specs if spec.datatype == "BYTES"]
            inputs = text_inputs(model, names, rows, texts)
        else:
            inputs = random_inputs(model, specs, rows)
        (served,) = _in_turns({partial(client.infer, model): concurrency}, inputs, requests, concurrency, advanced)
    return BenchReport(model, "", rows, concurrency, None, served, None)


@contextmanager
def server_for(
    bundles: Sequence[Bundle], url: str | None, target: str, cache: Path | None, arguments: Sequence[str] = ()
) -> Iterator[str]:
    """Yield ``url``, or without one the address of a server that runs during the block.

    Args:
        bundles: the bundles to serve.
        url: a server that serves them; None starts one on a free port.
        target: runtime of a server that is started.
        cache: directory of built models.
        arguments: more arguments of ``fewheads serve`` for a server that is started.

    Raises:
        UsageError: there are arguments and a URL.
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


def in_process(bundle: Bundle, runner: Runner) -> Callable[[Inputs], None]:
    """Return a function that preprocesses a request and runs it, without a server."""
    step = preprocessor(bundle)

    def call(inputs: Inputs) -> None:
        runner.infer(step(*(inputs[spec.name] for spec in step.inputs)) if step else inputs)

    return call


def _in_turns(
    calls: dict[Callable[[Inputs], Any], int],
    inputs: list[Inputs],
    requests: int,
    concurrency: int,
    advanced: Callable[[], None],
) -> list[Latency]:
    """Time functions in turns, each from its number of threads, so that other load affects all of them alike."""
    for call, threads in calls.items():
        _series(call, inputs, max(requests // 10, concurrency), threads)
    measured: list[list[_Series]] = [[] for _ in calls]
    for _ in range(ROUNDS):
        for parts, (call, threads) in zip(measured, calls.items(), strict=True):
            parts.append(_series(call, inputs, max(requests // ROUNDS, concurrency), threads))
        advanced()
    return [_latency(parts) for parts in measured]


def _series(call: Callable[[Inputs], Any], inputs: list[Inputs], count: int, concurrency: int) -> _Series:
    """Call ``count`` times from ``concurrency`` threads; the first error in any of them is raised."""
    durations: list[int] = []
    failures: list[BaseException] = []
    share = count // concurrency

    def client(offset: int) -> None:
        try:
            for index in range(offset, offset + share):
                begun = time.perf_counter_ns()
                call(inputs[index % len(inputs)])
                durations.append(time.perf_counter_ns() - begun)
        except BaseException as error:  # raised below
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
    return _Series(durations, time.perf_counter_ns() - begun)


def _latency(parts: list[_Series]) -> Latency:
    durations = np.array([duration for part in parts for duration in part.durations_ns]) / 1e6
    p50, p95, p99 = np.percentile(durations, [50, 95, 99]).tolist()
    return Latency(len(durations), p50, p95, p99, len(durations) / (sum(part.elapsed_ns for part in parts) / 1e9))
