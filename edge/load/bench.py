"""Serving overhead: latency of the same requests in process and through a server, in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from edge.bundles.bundle import Bundle
from edge.bundles.preprocess import preprocessor
from edge.client import ONCE, Client
from edge.client.connection import Credentials
from edge.launch import running_server
from edge.load.inputs import Inputs, golden_inputs, random_inputs, text_inputs
from edge.load.percentiles import Percentiles
from edge.runner import Runner
from edge.runtimes.build import load_runner

#: Number of series that a measurement consists of.
ROUNDS = 5


class Latency(Percentiles, frozen=True):
    """Percentiles in ms, and the throughput over the elapsed time."""

    per_second: float = 0.0


class BenchReport(msgspec.Struct, frozen=True):
    """Latency of one model.

    Attributes:
        platform: runtime of the in-process side; empty without one.
        in_process: of preprocessing and the runner; None without the bundle.
        overhead_ratio: of the medians. With several clients it includes the time that they wait for each other.
    """

    model: str
    platform: str
    rows: int
    concurrency: int
    in_process: Latency | None
    served: Latency
    overhead_ratio: float | None


def bench(
    model: Path | str,
    *,
    url: str | None,
    requests: int,
    concurrency: int,
    rows: int,
    texts: Sequence[str] = (),
    target: str = "auto",
    cache: Path | None = None,
    credentials: Credentials | None = None,
    advanced: Callable[[], None] = lambda: None,
) -> BenchReport:
    """Measure a bundle in process and through a server, or a served model without its bundle.

    Args:
        model: a bundle, whose golden inputs are sent; or the name of a model at ``url``.
        url: a server; None starts one on a free port.
        requests: total number, after a tenth of them to warm up.
        concurrency: number of clients, each of which waits for its response before the next request.
        texts: lines to send to a named model, with a tab between the texts of a pair; empty sends random numbers.
        advanced: called after each round.
    """
    with ExitStack() as stack:
        bundle = Bundle.open(model) if isinstance(model, Path) else None
        calls: dict[Callable[[Inputs], Any], int] = {}
        platform = ""
        if bundle:
            name, version, inputs = bundle.manifest.name, str(bundle.manifest.version), golden_inputs(bundle, rows)
            runner = load_runner(bundle, target, cache).runner
            stack.callback(runner.close)
            calls[in_process(bundle, runner)] = 1
            platform = runner.platform
        else:
            name, version, inputs = str(model), "", []
        address = stack.enter_context(server_for([bundle] if bundle else [], url, target, cache))
        client = stack.enter_context(Client(address, retries=ONCE, credentials=credentials))
        calls[partial(client.infer, name, version=version)] = concurrency
        if not bundle:
            specs, _ = client.metadata(name)
            names = [spec.name for spec in specs if spec.datatype == "BYTES"]
            inputs = text_inputs(name, names, rows, texts) if texts else random_inputs(name, specs, rows)
        *local, served = _in_turns(calls, inputs, requests, concurrency, advanced)
    alone = local[0] if local else None
    ratio = served.p50_ms / alone.p50_ms if alone else None
    return BenchReport(name, platform, rows, concurrency, alone, served, ratio)


@contextmanager
def server_for(bundles: Sequence[Bundle], url: str | None, target: str, cache: Path | None) -> Iterator[str]:
    """Yield ``url``, or if it is None the address of a server that runs during the block."""
    if url:
        yield url
        return
    with running_server([bundle.path for bundle in bundles], target=target, cache=cache) as ready:
        yield f"127.0.0.1:{ready.grpc_port}"


def in_process(bundle: Bundle, runner: Runner) -> Callable[[Inputs], object]:
    """Return a function that preprocesses and runs a request."""
    step = preprocessor(bundle)
    return lambda inputs: runner.infer(step(*(inputs[spec.name] for spec in step.inputs)) if step else inputs)


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
    durations: list[list[float]] = [[] for _ in calls]
    elapsed = [0.0] * len(calls)
    for _ in range(ROUNDS):
        for index, (call, threads) in enumerate(calls.items()):
            begun = time.perf_counter()
            durations[index] += _series(call, inputs, max(requests // ROUNDS, concurrency), threads)
            elapsed[index] += time.perf_counter() - begun
        advanced()
    percentiles = [Percentiles.of(np.array(each)) for each in durations]
    return [
        Latency(**msgspec.structs.asdict(one), per_second=one.count / seconds)
        for one, seconds in zip(percentiles, elapsed, strict=True)
    ]


def _series(call: Callable[[Inputs], Any], inputs: list[Inputs], count: int, threads: int) -> list[float]:
    share = count // threads

    def client(number: int) -> list[float]:
        durations = []
        for index in range(number * share, (number + 1) * share):
            begun = time.perf_counter()
            call(inputs[index % len(inputs)])
            durations.append(time.perf_counter() - begun)
        return durations

    if threads == 1:
        return client(0)
    with ThreadPoolExecutor(threads) as pool:
        return [duration for durations in pool.map(client, range(threads)) for duration in durations]
