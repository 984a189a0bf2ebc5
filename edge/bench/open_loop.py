"""Open loop against a server: its capacity, requests at fixed times, its memory meanwhile, and the report."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

import msgspec
import numpy as np

from edge.bench.inputs import requests_of
from edge.bench.load_plan import LoadPlan, due_times, limited
from edge.bench.sender import IN_TIME, OUTCOMES, UNSENT, Sender, SentRequest
from edge.bench.timing import Percentiles
from edge.bundles.bundle import Bundle
from edge.client import Client
from edge.client.connection import Credentials
from edge.errors import Raw, ServerError
from edge.scheduling.tier_selection import PINNED

_CAPACITY_CLIENTS = 8
_MEMORY_SECONDS = 1.0
#: The group of all requests.
ALL = "all"
#: Limit of the number of causes, of which further ones are counted together.
_MAX_CAUSES = 1000


class RequestGroup(msgspec.Struct, frozen=True):
    """Requests with something in common; ``latency`` is that of the responses, ``loops`` their mean if looped."""

    requests: int
    outcomes: dict[str, int]
    latency: Percentiles
    loops: float | None

    @classmethod
    def of(cls, requests: Sequence[SentRequest]) -> RequestGroup:
        """Return the group of some requests."""
        loops = [request.loops for request in requests if not math.isnan(request.loops)]
        latency = Percentiles.of([request.latency_seconds for request in requests if request.answered])
        return cls(len(requests), outcomes_of(requests), latency, float(np.mean(loops)) if loops else None)


class Cause(msgspec.Struct, frozen=True):
    """Requests without a response, by cause: the status, and the subject of our server's error, such as ``queue``.

    ``latency`` is until the error, ``retry_after_p50_ms`` the median of the server's hints when to retry.
    """

    outcome: str
    cause: str
    count: int
    latency: Percentiles
    retry_after_p50_ms: float | None


class ServerMemory(msgspec.Struct, frozen=True):
    """The server's resident memory before, after and at most during the run."""

    before_bytes: int
    after_bytes: int
    peak_bytes: int


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """One open-loop run.

    Attributes:
        capacity_per_second: responses to clients in a closed loop before the run; None if not measured.
        seconds: length of the measurement, up to when the last request was due.
        deadline_ms: from when requests were due; None for none.
        groups: requests by name: ``all``, those of each model if there are several, and of each tier that answered.
        warm_up: outcomes of earlier requests, which count for nothing else.
        lag: delay of the generator; ``lag_bound_ms`` is the limit of its p99: a tenth of the deadline, 10 ms without.
        memory: of the server; None if it reports none.
    """

    models: tuple[str, ...]
    pattern: str
    rate_per_second: float
    capacity_per_second: float | None
    seed: int
    seconds: float
    deadline_ms: float | None
    interrupted: bool
    in_time_per_second: float
    warm_up: dict[str, int]
    groups: dict[str, RequestGroup]
    causes: tuple[Cause, ...]
    lag: Percentiles
    lag_bound_ms: float
    doubts: tuple[str, ...]
    memory: ServerMemory | None

    def count(self, outcome: str) -> int:
        """Return the number of requests with an outcome, those of the warm-up included."""
        return self.groups[ALL].outcomes.get(outcome, 0) + self.warm_up.get(outcome, 0)

    @property
    def summary(self) -> str:
        """The load and the goodput on one line."""
        capacity = f", capacity {self.capacity_per_second:.0f}" if self.capacity_per_second else ""
        deadline = f"{self.deadline_ms:g} ms" if self.deadline_ms else "no deadline"
        load = f"{self.pattern}, {self.rate_per_second:.4g} requests/s{capacity}, {deadline}"
        answers = f"in {self.seconds:.4g} s, {self.in_time_per_second:.4g} answers/s in time"
        return f"{load}: {self.groups[ALL].requests} requests {answers}"


def capacity_per_second(url: str, bundles: Sequence[Bundle], plan: LoadPlan, seconds: float) -> float:
    """Return the responses per second of the full tiers to eight clients in a closed loop, without deadlines."""
    # The plan may allow fewer requests at once than there are clients here.
    full = msgspec.structs.replace(plan, deadline_ms=None, policy=PINNED, max_outstanding=2 * _CAPACITY_CLIENTS)
    sender = Sender(url, [requests_of(bundle, full) for bundle in bundles], full)
    elapsed = sender.run(partial(sender.closed_loop, _CAPACITY_CLIENTS, seconds))
    if sender.interrupted:
        raise KeyboardInterrupt
    for request in sender.sent:
        if not request.answered:
            given, fix = Raw(f"{request.cause} for a request"), "Reduce the load on it, or give --rate in numbers."
            raise ServerError(f"server at {url}", given=given, expected="a response to each request", fix=fix)
    return len(sender.sent) / elapsed


def measure(
    url: str, bundles: Sequence[Bundle], plan: LoadPlan, *, advanced: Callable[[float], None] = lambda share: None
) -> LoadReport:
    """Send a plan's requests for bundles, an equal part to each, and report their outcomes.

    ``advanced`` receives the elapsed share of the run, 0 to 1. Errors before the first request, also an interrupt, are
    raised; later ones are outcomes of requests.
    """
    sender = Sender(url, [requests_of(bundle, plan) for bundle in bundles], plan)
    with Client(url, credentials=plan.credentials) as client:
        for bundle in bundles:
            client.metadata(bundle.manifest.name, str(bundle.manifest.version))
    rate, capacity, warm_up, requests = plan.rate.value, None, plan.warm_up_seconds, plan.requests
    if plan.rate.of_capacity:
        capacity = capacity_per_second(url, bundles, plan, min(max(plan.seconds / 3, 0.3), 5.0))
        rate *= capacity
    if requests is not None:
        requests += sum(1 for _ in limited(due_times(plan.pattern, rate, plan.seed), warm_up))
    times = limited(due_times(plan.pattern, rate, plan.seed), warm_up + plan.seconds, requests)
    last = warm_up + (plan.requests / rate if plan.requests else plan.seconds)
    with _memory(url, plan.credentials) as sizes:
        sender.run(partial(sender.open_loop, times, lambda now: advanced(min(now / last, 1.0))))
    advanced(1.0)
    return report_of(
        plan,
        sender.sent,
        [bundle.manifest.name for bundle in bundles],
        rate=rate,
        capacity=capacity,
        interrupted=sender.interrupted,
        memory=ServerMemory(sizes[0], sizes[-1], max(sizes)) if sizes else None,
    )


@contextmanager
def _memory(url: str, credentials: Credentials | None) -> Iterator[list[int]]:
    """Yield a list of a server's resident memory in bytes, read at the start, every second, and at the end."""
    sizes, done = list[int](), threading.Event()
    # The timeout keeps a frozen server from delaying the report.
    with Client(url, _MEMORY_SECONDS, credentials=credentials) as client:

        def read() -> None:
            with suppress(ServerError):  # the outcomes of the requests show why
                sizes.extend(
                    reading.size_bytes for reading in client.telemetry().memory if reading.kind == "process_rss"
                )

        def watch() -> None:
            while not done.wait(_MEMORY_SECONDS):
                read()

        read()
        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield sizes
        finally:
            done.set()
            thread.join()
            read()


def report_of(
    plan: LoadPlan,
    requests: Sequence[SentRequest],
    models: Sequence[str],
    *,
    rate: float,
    capacity: float | None,
    interrupted: bool,
    memory: ServerMemory | None,
) -> LoadReport:
    """Return the report of all requests of a run, of which those due during the warm-up are only counted."""
    measured = [request for request in requests if request.due_seconds >= plan.warm_up_seconds]
    seconds = plan.seconds
    if interrupted or plan.requests is not None:
        seconds = max(measured[-1].due_seconds - plan.warm_up_seconds if measured else 0.0, 1e-3)
    groups = {ALL: RequestGroup.of(measured)}
    for model in models if len(models) > 1 else ():
        groups[model] = RequestGroup.of([request for request in measured if request.model == model])
    for tier in sorted({request.tier for request in measured if request.tier}):
        groups[f"answered by {tier}"] = RequestGroup.of([request for request in measured if request.tier == tier])
    bound = plan.deadline_ms / 10 if plan.deadline_ms else 10.0
    lag, outcomes, doubts = Percentiles.of([request.lag_seconds for request in measured]), groups[ALL].outcomes, []
    if lag.p99_ms > bound:
        late = f"the generator itself was late: {lag.p99_ms:.3g} ms at p99, of {bound:.3g} ms that are allowed."
        doubts.append(f"{late} Lower the rate, or give the generator a processor of its own.")
    if unsent := outcomes.get(UNSENT, 0):
        doubts.append(f"{unsent} requests were not sent, because too many were in flight. Raise --max-outstanding.")
    return LoadReport(
        models=tuple(models),
        pattern=plan.pattern,
        rate_per_second=rate,
        capacity_per_second=capacity,
        seed=plan.seed,
        seconds=seconds,
        deadline_ms=plan.deadline_ms,
        interrupted=interrupted,
        in_time_per_second=outcomes.get(IN_TIME, 0) / seconds,
        warm_up=outcomes_of(requests[: len(requests) - len(measured)]),
        groups=groups,
        causes=causes(measured),
        lag=lag,
        lag_bound_ms=bound,
        doubts=tuple(doubts),
        memory=memory,
    )


def outcomes_of(requests: Iterable[SentRequest]) -> dict[str, int]:
    """Return the number of requests with each outcome that occurred."""
    counts = Counter(request.outcome for request in requests)
    return {outcome: counts[outcome] for outcome in OUTCOMES if outcome in counts}


def causes(requests: Iterable[SentRequest]) -> tuple[Cause, ...]:
    """Return the causes of requests without a response, the most frequent first."""
    by_cause: dict[tuple[str, str], list[SentRequest]] = {}
    for request in requests:
        if not request.answered:
            key = (request.outcome, request.cause)
            key = key if key in by_cause or len(by_cause) < _MAX_CAUSES else (request.outcome, "other")
            by_cause.setdefault(key, []).append(request)
    rows = []
    for (outcome, cause), of_cause in by_cause.items():
        hints = [request.retry_ms for request in of_cause if not math.isnan(request.retry_ms)]
        latency = [it.latency_seconds for it in of_cause if not math.isnan(it.latency_seconds)]
        retry = float(np.median(hints)) if hints else None
        rows.append(Cause(outcome, cause, len(of_cause), Percentiles.of(latency), retry))
    return tuple(sorted(rows, key=lambda cause: (-cause.count, cause.outcome, cause.cause)))
