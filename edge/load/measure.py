"""Load run against a running server: capacity, requests, and the server's memory meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import NamedTuple

import msgspec
import numpy as np

from edge.bench.plan import Plan, due_times, limited
from edge.bench.report import LoadReport, Memory, report_of
from edge.bench.sender import Sender, run
from edge.bench.workload import Workload
from edge.bundles.bundle import Bundle
from edge.client import Client
from edge.client.connection import Credentials
from edge.errors import Raw, ServerError
from edge.scheduling.tier_selection import PINNED

_CAPACITY_CLIENTS = 8
_ALONE_REQUESTS = 10
_MEMORY_SECONDS = 1.0


class Capacity(NamedTuple):
    """Performance in a closed loop: responses per second to eight clients, and the median in ms of one alone."""

    per_second: float
    alone_ms: float


def capacity(url: str, bundles: Mapping[Bundle, float], plan: Plan, seconds: float) -> Capacity:
    """Measure the capacity for a plan's requests by full tiers, without deadlines."""
    unlimited = 10_000  # the plan may allow fewer requests at once than there are clients here
    full = msgspec.structs.replace(plan, deadlines_ms={}, policies={PINNED: 1.0}, max_outstanding=unlimited)
    workload = Workload(bundles, full)
    first = Sender(url, workload, msgspec.structs.replace(full, channels=1))
    second = Sender(url, workload, full)

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
    alone, busy = first.record.columns(), second.record.columns()
    for columns in (alone, busy):
        if not columns.answered.all():
            subject, given = f"server at {url}", Raw(f"{columns.where(~columns.answered).cause[0]} for a request")
            fix = "Reduce the load on it, or give --rate in requests per second."
            raise ServerError(subject, given=given, expected="a response to each request", fix=fix)
    return Capacity(len(busy) / elapsed, float(np.median(alone.latency)) * 1e3)


def measure(
    url: str, bundles: Mapping[Bundle, float], plan: Plan, *, advanced: Callable[[float], None] = lambda share: None
) -> LoadReport:
    """Send a plan's requests for bundles, by the part of each, and report their outcomes.

    ``advanced`` receives the elapsed share of the run, 0 to 1. Errors before the first request, also an interrupt, are
    raised; later ones are outcomes of requests.
    """
    workload = Workload(bundles, plan)
    measured_capacity: float | None = None
    with Client(url, credentials=plan.credentials) as client:
        for bundle in bundles:
            client.metadata(bundle.manifest.name, str(bundle.manifest.version))
        if plan.rate and plan.rate.of_capacity:
            measured_capacity = capacity(url, bundles, plan, min(max(plan.seconds / 3, 0.3), 5.0)).per_second
    rate, times, warm_up = _schedule(plan, measured_capacity)
    sender = Sender(url, workload, plan)
    last = warm_up + (plan.requests / rate if plan.requests else plan.seconds)

    async def send() -> None:
        async with sender:
            await sender.open_loop(times, lambda now: advanced(min(now / last, 1.0)))

    with _memory(url, plan.credentials) as samples:
        run(send, sender.interrupt)
    advanced(1.0)
    return report_of(
        plan,
        workload.kinds,
        sender.record.columns(),
        rate=rate,
        capacity=measured_capacity,
        warm_up_seconds=warm_up,
        interrupted=sender.interrupted,
        memory=Memory.of(samples) if samples else None,
    )


def _schedule(plan: Plan, measured_capacity: float | None) -> tuple[float, Iterator[float], float]:
    """Return the rate, all times, and the seconds of the warm-up at their start."""
    if plan.trace:
        last = min(plan.trace[-1], plan.seconds)
        return len(plan.trace) / max(last, 1e-9), limited(plan.trace, plan.seconds, plan.requests), 0.0
    assert plan.rate is not None
    rate = plan.rate.value * (measured_capacity or 1.0)

    warm_up, requests = plan.warm_up_seconds, plan.requests
    if requests is not None:
        requests += sum(1 for _ in limited(due_times(plan.pattern, rate, plan.seed), warm_up))
    return rate, limited(due_times(plan.pattern, rate, plan.seed), warm_up + plan.seconds, requests), warm_up


@contextmanager
def _memory(url: str, credentials: Credentials | None) -> Iterator[list[tuple[float, int]]]:
    """Yield a list of seconds and a server's resident memory, read at the start, every second, and at the end."""
    samples: list[tuple[float, int]] = []
    begun, done = time.perf_counter(), threading.Event()
    # The timeout keeps a frozen server from delaying the report.
    with Client(url, _MEMORY_SECONDS, credentials=credentials) as client:

        def read() -> None:
            with suppress(ServerError):  # the outcomes of the requests show why
                sizes = [one.size_bytes for one in client.telemetry().memory if one.kind == "process_rss"]
                samples.extend((time.perf_counter() - begun, size) for size in sizes)

        def watch() -> None:
            while not done.wait(_MEMORY_SECONDS):
                read()
            read()

        read()
        thread = threading.Thread(target=watch, daemon=True)
        if samples:  # otherwise the server has no Telemetry
            thread.start()
        try:
            yield samples
        finally:
            done.set()
            if thread.ident:
                thread.join()
