"""Report of an open loop: outcomes that add up, and percentiles of every group."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import msgspec
import numpy as np

from edge.bench.plan import LoadPlan
from edge.bench.sender import IN_TIME, OUTCOMES, UNSENT, SentRequest
from edge.bench.timing import Percentiles

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
        rate_per_second: the plan's, or the trace's.
        capacity_per_second: responses to clients in a closed loop before the run; None if not measured.
        seconds: length of the measurement, up to when the last request was due.
        deadlines_ms: from when requests were due; 0 is none.
        groups: requests by name, such as ``all`` or ``priority 1``; of models, policies, priorities, limits and tiers,
            if there are several.
        warm_up: outcomes of earlier requests, which count for nothing else.
        lag: delay of the generator; ``lag_bound_ms`` is the limit of its p99.
        memory: of the server; None if it reports none.
    """

    models: tuple[str, ...]
    pattern: str
    rate_per_second: float
    capacity_per_second: float | None
    seed: int
    seconds: float
    deadlines_ms: tuple[float, ...]
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
        deadlines = ", ".join(f"{deadline:g} ms" for deadline in self.deadlines_ms if deadline) or "no deadline"
        load = f"{self.pattern}, {self.rate_per_second:.4g} requests/s{capacity}, {deadlines}"
        answers = f"in {self.seconds:.4g} s, {self.in_time_per_second:.4g} answers/s in time"
        return f"{load}: {self.groups[ALL].requests} requests {answers}"


def report_of(
    plan: LoadPlan,
    requests: Sequence[SentRequest],
    models: Iterable[str],
    *,
    rate: float,
    capacity: float | None,
    warm_up_seconds: float,
    interrupted: bool,
    memory: ServerMemory | None,
) -> LoadReport:
    """Return the report of all requests of a run, of which those due during the warm-up are only counted."""
    measured = [request for request in requests if request.due_seconds >= warm_up_seconds]
    seconds = plan.seconds
    if interrupted or plan.trace is not None or plan.requests is not None:
        seconds = max(measured[-1].due_seconds - warm_up_seconds if measured else 0.0, 1e-3)
    deadlines = tuple(sorted(plan.deadlines_ms)) or (0.0,)
    bound = lag_bound_ms(deadlines)
    bound, lag = lag_bound_ms(deadlines), Percentiles.of([request.lag_seconds for request in measured])
    groups = _groups(measured)
    outcomes = groups[ALL].outcomes
    doubts = []
    if lag.p99_ms > bound:
        late = f"the generator itself was late: {lag.p99_ms:.3g} ms at p99, of {bound:.3g} ms that are allowed."
        doubts.append(f"{late} Lower the rate, or give the generator a processor of its own.")
    if unsent := outcomes.get(UNSENT, 0):
        doubts.append(f"{unsent} requests were not sent, because too many were in flight. Raise --max-outstanding.")

    return LoadReport(
        models=tuple(models),
        pattern="trace" if plan.trace else plan.pattern,
        rate_per_second=rate,
        capacity_per_second=capacity,
        seed=plan.seed,
        seconds=seconds,
        deadlines_ms=deadlines,
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


def _groups(requests: Sequence[SentRequest]) -> dict[str, RequestGroup]:
    groups = {ALL: RequestGroup.of(requests)}

    def add(name: Callable[[SentRequest], str], least: int = 2) -> None:
        by_name: dict[str, list[SentRequest]] = {}
        for request in requests:
            by_name.setdefault(name(request), []).append(request)
        if len(by_name) >= least:
            groups.update((key, RequestGroup.of(by_name[key])) for key in sorted(by_name) if key)

    add(lambda request: request.kind.model)
    add(lambda request: f"policy {request.kind.policy or 'of the server'}")
    add(lambda request: f"priority {request.kind.priority}")
    add(lambda request: request.kind.limits or "the server's limits")
    add(lambda request: f"answered by {request.tier}" if request.tier else "", least=1)
    return groups


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
    found = []
    for (outcome, cause), of_cause in by_cause.items():
        hints = [request.retry_ms for request in of_cause if not math.isnan(request.retry_ms)]
        latency = [it.latency_seconds for it in of_cause if not math.isnan(it.latency_seconds)]
        retry = float(np.median(hints)) if hints else None
        found.append(Cause(outcome, cause, len(of_cause), Percentiles.of(latency), retry))
    return tuple(sorted(found, key=lambda cause: (-cause.count, cause.outcome, cause.cause)))


def lag_bound_ms(deadlines_ms: Iterable[float]) -> float:
    """Return the limit of the generator's delay at p99: a tenth of the shortest deadline, 10 ms without any."""
    return min((deadline / 10 for deadline in deadlines_ms if deadline), default=10.0)
