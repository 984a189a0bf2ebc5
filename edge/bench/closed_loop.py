"""Closed loop: clients that wait for each response before the next request; and with it, the overhead of serving."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from edge.bench.inputs import Inputs, golden_inputs
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
RequestFunction = Callable[[Inputs], "Array | None"]


class Round(NamedTuple):
    """Seconds of each of some requests, loops of their rows, and the elapsed seconds of all."""

    seconds: list[float]
    loops: list[Array]
    elapsed_seconds: float


@dataclass
class ClosedLoop:
    """Requests of one kind, and the clients that send them."""

    call: RequestFunction
    inputs: Iterator[Inputs]  # endless; all clients draw from it
    clients: int = 1

    def send(self, count: int, least_seconds: float = 0.0, most_seconds: float = math.inf) -> Round:
        """Send ``count`` requests, more within ``least_seconds``, fewer after ``most_seconds``, but one at least."""
        share, seconds, loops = max(count // self.clients, 1), list[float](), list[Array]()
        begun = time.perf_counter()

        def client(_: int) -> None:
            for sent in itertools.count():
                elapsed = time.perf_counter() - begun
                if sent and (elapsed > most_seconds or (sent >= share and elapsed >= least_seconds)):
                    return
                started = time.perf_counter()
                of_rows = self.call(next(self.inputs))
                seconds.append(time.perf_counter() - started)
                if of_rows is not None:
                    loops.append(of_rows)

        if self.clients == 1:
            client(0)
        else:
            with ThreadPoolExecutor(self.clients) as pool:
                list(pool.map(client, range(self.clients)))
        return Round(seconds, loops, time.perf_counter() - begun)


class ServedLatency(Percentiles, frozen=True):
    """Percentiles in ms, the throughput over the elapsed time, and the mean loops of a row of a looped model."""

    per_second: float = 0.0
    loops: float | None = None

    @classmethod
    def of_rounds(cls, rounds: Sequence[Round]) -> ServedLatency:
        """Return the latency of all requests of some rounds."""
        seconds = [value for sent in rounds for value in sent.seconds]
        loops = [value for sent in rounds for value in sent.loops]
        return cls(
            **msgspec.structs.asdict(Percentiles.of(seconds)),
            per_second=len(seconds) / sum(sent.elapsed_seconds for sent in rounds),
            loops=float(np.concatenate(loops, axis=None).mean()) if loops else None,
        )


class BenchReport(msgspec.Struct, frozen=True):
    """Latency of one model.

    Attributes:
        platform: runtime of the in-process side.
        in_process: of preprocessing and the runner.
        overhead_ratio: of the medians. With several clients it includes the time that they wait for each other.
    """

    model: str
    platform: str
    rows: int
    concurrency: int
    in_process: ServedLatency
    served: ServedLatency
    overhead_ratio: float


def bench(
    path: Path,
    *,
    url: str | None,
    requests: int,
    concurrency: int,
    rows: int,
    max_loops: int | None = None,
    tolerance: float | None = None,
    target: str = "auto",
    cache: Path | None = None,
    credentials: Credentials | None = None,
    advanced: Callable[[], None] = lambda: None,
) -> BenchReport:
    """Measure a bundle, by its golden inputs, in process and through a server in turns.

    Args:
        url: a server; None starts one on a free port.
        requests: total number, after a tenth of them to warm up.
        concurrency: number of clients.
        max_loops: budget of a looped model; None is its default.
        tolerance: of a looped model; None is its default.
        advanced: called after each round.
    """
    bundle = Bundle.open(path)
    name, version, inputs = bundle.manifest.name, str(bundle.manifest.version), golden_inputs(bundle, rows)
    with ExitStack() as stack:
        program = stack.enter_context(closing(load_tier(bundle, target, cache)))
        address = stack.enter_context(server_for([bundle], url, target, cache))
        client = stack.enter_context(Client(address, retries=ONCE, credentials=credentials))
        calls = (
            (in_process(program, program.limits(max_loops, tolerance)), 1),
            (served(client, name, version=version, max_loops=max_loops, tolerance=tolerance), concurrency),
        )
        loops = [ClosedLoop(call, itertools.cycle(inputs), clients) for call, clients in calls]
        for loop in loops:
            loop.send(max(requests // 10, concurrency))
        rounds: list[list[Round]] = []
        for _ in range(ROUNDS):
            rounds.append([loop.send(max(requests // ROUNDS, concurrency)) for loop in loops])
            advanced()
        platform = program.main.runner.platform
    local, remote = map(ServedLatency.of_rounds, zip(*rounds, strict=True))
    return BenchReport(name, platform, rows, concurrency, local, remote, remote.p50_ms / local.p50_ms)


@contextmanager
def server_for(bundles: Sequence[Bundle], url: str | None, target: str, cache: Path | None) -> Iterator[str]:
    """Yield ``url``, or if it is None the address of a server that runs during the block."""
    if url:
        yield url
        return
    with running_server([bundle.path for bundle in bundles], target=target, cache=cache) as ready:
        yield f"127.0.0.1:{ready.grpc_port}"


def in_process(program: TierProgram, limits: LoopLimits | None = None) -> RequestFunction:
    """Return a function that preprocesses and computes a request; ``limits`` are those of a loop."""
    step = preprocessor(program.bundle)

    def call(inputs: Inputs) -> Array | None:
        feeds = step(*(inputs[spec.name] for spec in step.inputs)) if step else inputs
        return program.compute(feeds, limits).facts.get(LOOPS)

    return call


def served(client: Client, name: str, **options: Any) -> RequestFunction:
    """Return a function that sends a request to a model; ``options`` are those of :class:`InferRequest`."""
    return lambda inputs: client.infer(name, inputs, **options).loops
