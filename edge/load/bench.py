"""Serving overhead: latency of the same requests in process and through a server, in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from edge.bench.inputs import Inputs, golden_inputs, random_inputs, text_inputs
from edge.bench.timing import Percentiles
from edge.bundles.bundle import Bundle
from edge.bundles.preprocess import preprocessor
from edge.client import ONCE, Client
from edge.client.connection import Credentials
from edge.datatypes import Array
from edge.launch import running_server
from edge.programs.program import LoopLimits
from edge.programs.tier_program import TierProgram, load_tier
from edge.protocol import LOOPS

#: Number of series that a measurement consists of.
ROUNDS = 5


#: Sends or computes a request, and returns the loops of its rows; None if the model is not looped.
Call = Callable[[Inputs], "Array | None"]


class Latency(Percentiles, frozen=True):
    """Percentiles in ms, the throughput over the elapsed time, and the mean loops of a row of a looped model."""

    per_second: float = 0.0
    loops: float | None = None


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
    max_loops: int | None = None,
    tolerance: float | None = None,
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
        max_loops: budget of a looped model; None is its default.
        tolerance: of a looped model; None is its default.
        advanced: called after each round.
    """
    with ExitStack() as stack:
        bundle = Bundle.open(model) if isinstance(model, Path) else None
        calls: dict[Call, int] = {}
        platform = ""
        if bundle:
            name, version, inputs = bundle.manifest.name, str(bundle.manifest.version), golden_inputs(bundle, rows)
            program = load_tier(bundle, target, cache)
            stack.callback(program.close)
            calls[in_process(program, program.limits(max_loops, tolerance))] = 1
            platform = program.main.runner.platform
        else:
            name, version, inputs = str(model), "", []
        address = stack.enter_context(server_for([bundle] if bundle else [], url, target, cache))
        client = stack.enter_context(Client(address, retries=ONCE, credentials=credentials))
        calls[served(client, name, version=version, max_loops=max_loops, tolerance=tolerance)] = concurrency
        if not bundle:
            specs, _ = client.metadata(name)
            names = [spec.name for spec in specs if spec.datatype == "BYTES"]
            inputs = text_inputs(name, names, rows, texts) if texts else random_inputs(name, specs, rows)
        *local, remote = _in_turns(calls, inputs, requests, concurrency, advanced)
    alone = local[0] if local else None
    ratio = remote.p50_ms / alone.p50_ms if alone else None
    return BenchReport(name, platform, rows, concurrency, alone, remote, ratio)


@contextmanager
def server_for(bundles: Sequence[Bundle], url: str | None, target: str, cache: Path | None) -> Iterator[str]:
    """Yield ``url``, or if it is None the address of a server that runs during the block."""
    if url:
        yield url
        return
    with running_server([bundle.path for bundle in bundles], target=target, cache=cache) as ready:
        yield f"127.0.0.1:{ready.grpc_port}"


def in_process(program: TierProgram, limits: LoopLimits | None = None) -> Call:
    """Return a function that preprocesses and computes a request; ``limits`` are those of a loop."""
    step = preprocessor(program.bundle)

    def call(inputs: Inputs) -> Array | None:
        feeds = step(*(inputs[spec.name] for spec in step.inputs)) if step else inputs
        return program.compute(feeds, limits).facts.get(LOOPS)

    return call


def served(client: Client, name: str, **options: Any) -> Call:
    """Return a function that sends a request to a model; ``options`` are those of :class:`InferRequest`."""
    return lambda inputs: client.infer(name, inputs, **options).loops


def _in_turns(
    calls: dict[Call, int],
    inputs: list[Inputs],
    requests: int,
    concurrency: int,
    advanced: Callable[[], None],
) -> list[Latency]:
    """Time functions in turns, each from its number of threads, so that other load affects all of them alike."""
    for call, threads in calls.items():
        _series(call, inputs, max(requests // 10, concurrency), threads)
    timed: list[list[_Timed]] = [[] for _ in calls]
    elapsed = [0.0] * len(calls)
    for _ in range(ROUNDS):
        for index, (call, threads) in enumerate(calls.items()):
            begun = time.perf_counter()
            timed[index] += _series(call, inputs, max(requests // ROUNDS, concurrency), threads)
            elapsed[index] += time.perf_counter() - begun
        advanced()
    return [_latency(series, seconds) for series, seconds in zip(timed, elapsed, strict=True)]


class _Timed(NamedTuple):
    seconds: float
    loops: Array | None


def _series(call: Call, inputs: list[Inputs], count: int, threads: int) -> list[_Timed]:
    share = count // threads

    def client(number: int) -> list[_Timed]:
        timed = []
        for index in range(number * share, (number + 1) * share):
            begun = time.perf_counter()
            loops = call(inputs[index % len(inputs)])
            timed.append(_Timed(time.perf_counter() - begun, loops))
        return timed

    if threads == 1:
        return client(0)
    with ThreadPoolExecutor(threads) as pool:
        return [one for timed in pool.map(client, range(threads)) for one in timed]


def _latency(series: Sequence[_Timed], elapsed_seconds: float) -> Latency:
    percentiles = Percentiles.of(np.array([one.seconds for one in series]))
    return Latency(
        **msgspec.structs.asdict(percentiles),
        per_second=len(series) / elapsed_seconds,
        loops=mean_loops([one.loops for one in series]),
    )


def mean_loops(loops: Iterable[Array | None]) -> float | None:
    """Return the mean over all rows of requests; None if no model is looped."""
    found = [each for each in loops if each is not None]
    return float(np.concatenate(found, axis=None).mean()) if found else None
