"""Load run against a running server: capacity, requests, and the server's memory meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import msgspec
import numpy as np

from edge.bundles.bundle import Bundle
from edge.client import Client
from edge.client.connection import Credentials
from edge.errors import Literally, ServerError
from edge.load.arrivals import due_times, limited
from edge.load.plan import Plan
from edge.load.record import Record
from edge.load.report import LoadReport, Memory, report_of
from edge.load.sender import Sender, run
from edge.load.workload import Workload
from edge.scheduling.tier_selection import PINNED

_CAPACITY_CLIENTS = 8
_ALONE_REQUESTS = 10
_MEMORY_SECONDS = 1.0


class Capacity(NamedTuple):
    """Performance in a closed loop: responses per second to eight clients, and the median in ms of one alone."""

    per_second: float
    alone_ms: float


def capacity(url: str, bundles: Mapping[Bundle, float], plan: Plan, seconds: float) -> Capacity:
    """Measure the capacity for a plan's requests by full tiers, without deadlines.

    Raises:
        ServerError: a request got no response.
        KeyboardInterrupt: the measurement was interrupted.
    """
    unlimited = 10_000  # the plan may allow fewer requests at once than there are clients here
    full = msgspec.structs.replace(plan, deadlines_ms={}, policies={PINNED: 1.0}, max_outstanding=unlimited)
    workload, alone, busy = Workload(bundles, full), Record(), Record()
    first = Sender(url, workload, alone, msgspec.structs.replace(full, channels=1))
    second = Sender(url, workload, busy, full)

    async def send() -> float:
        async with first:
            await first.closed_loop(1, 0.0, _ALONE_REQUESTS)
        async with second:
            return await second.closed_loop(_CAPACITY_CLIENTS, seconds, 2)

    def interrupt() -> None:
        first.interrupt()
        second.interrupt()

    elapsed = run(send, interrupt)
    if first.interrupted:
        raise KeyboardInterrupt
    for columns in (alone.columns(), busy.columns()):
        if not columns.answered.all():
            given = Literally(f"{columns.where(~columns.answered).cause[0]} for a request")
            fix = "Reduce the load on it, or give --rate in requests per second."
            raise ServerError(
                f"capacity of the server at {url}", given=given, expected="a response to each request", fix=fix
            )
    return Capacity(len(busy) / elapsed, float(np.median(alone.columns().latency)) * 1e3)


def measure(
    url: str, bundles: Mapping[Bundle, float], plan: Plan, *, advanced: Callable[[float], None] = lambda share: None
) -> LoadReport:
    """Send a plan's requests for bundles, by the part of each, and report their outcomes.

    ``advanced`` receives the elapsed share of the run, 0 to 1.

    Raises:
        UsageError: the plan does not fit a bundle.
        ServerError: the server cannot be reached at the start. Later errors are outcomes of requests.
        KeyboardInterrupt: the run was interrupted before its first request; later, the report covers what was sent.
    """
    workload = Workload(bundles, plan)
    measured_capacity: float | None = None
    with Client(url, credentials=plan.credentials) as client:
        for bundle in bundles:
            client.metadata(bundle.manifest.name, str(bundle.manifest.version))
        if plan.rate and plan.rate.of_capacity:
            measured_capacity = capacity(url, bundles, plan, min(max(plan.seconds / 3, 0.3), 5.0)).per_second
    rate, times, warm_up = _schedule(plan, measured_capacity)
    record = Record()
    sender = Sender(url, workload, record, plan)
    last = warm_up + (plan.requests / rate if plan.requests else plan.seconds)

    async def send() -> None:
        async with sender:
            await sender.open_loop(times, lambda now: advanced(min(now / last, 1.0)))

    with _MemoryWatch(url, plan.credentials) as watch:
        run(send, sender.interrupt)
    advanced(1.0)
    return report_of(
        plan,
        workload.kinds,
        record.columns(),
        rate=rate,
        capacity=measured_capacity,
        warm_up_seconds=warm_up,
        interrupted=sender.interrupted,
        memory=watch.memory,
    )


def _schedule(plan: Plan, measured_capacity: float | None) -> tuple[float, Iterator[float], float]:
    """Return the rate, all times, and the seconds of the warm-up at their start."""
    if plan.trace:
        last = min(plan.trace[-1], plan.seconds)
        return len(plan.trace) / max(last, 1e-9), limited(plan.trace, plan.seconds, plan.requests), 0.0
    assert plan.rate is not None
    rate = plan.rate.value * (measured_capacity or 1.0)

    def times() -> Iterator[float]:
        return due_times(plan.pattern, rate, plan.seed, plan.burst_period_seconds, plan.burst_share)

    warm_up, requests = plan.warm_up_seconds, plan.requests
    if requests is not None:
        requests += sum(1 for _ in limited(times(), warm_up))
    return rate, limited(times(), warm_up + plan.seconds, requests), warm_up


class _MemoryWatch:
    """Reads the resident memory of a server at the start, every second, and at the end, on a thread of its own."""

    def __init__(self, url: str, credentials: Credentials | None) -> None:
        # The timeout keeps a frozen server from delaying the report.
        self._client = Client(url, _MEMORY_SECONDS, credentials=credentials)
        self._samples: list[tuple[float, int]] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> _MemoryWatch:
        self._begun = time.perf_counter()
        self._read()
        if self._samples:  # otherwise the server has no Telemetry
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        if self._thread.ident:
            self._thread.join()
            self._read()
        self._client.close()

    @property
    def memory(self) -> Memory | None:
        sizes = [size for _, size in self._samples]
        return Memory(sizes[0], sizes[-1], max(sizes), tuple(self._samples)) if sizes else None

    def _watch(self) -> None:
        while not self._done.wait(_MEMORY_SECONDS):
            self._read()

    def _read(self) -> None:
        try:
            reading = self._client.telemetry()
        except ServerError:
            return  # the outcomes of the requests show why
        now = time.perf_counter() - self._begun
        self._samples += [(now, memory.size_bytes) for memory in reading.memory if memory.kind == "process_rss"]
