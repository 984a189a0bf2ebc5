"""One load run from the plan to the report, against a server that is there."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import msgspec
import numpy as np

from edge.bundles.bundle import Bundle
from edge.client import Client
from edge.client.connection import Credentials
from edge.errors import Literally, ServerError, UsageError
from edge.load import report
from edge.load.arrivals import POISSON, Arrivals, limited
from edge.load.record import Columns, Record
from edge.load.report import Group, LoadReport, Memory, Percentiles
from edge.load.sender import Sender, run
from edge.load.watch import MemoryWatch
from edge.load.workload import UNSAID, Shares, Workload
from edge.scheduling.tier_selection import PINNED

_CAPACITY_CLIENTS = 8
_ALONE_REQUESTS = 10


class Rate(NamedTuple):
    """Requests per second, or times what the server can do."""

    value: float
    of_capacity: bool

    @classmethod
    def parse(cls, text: str) -> Rate:
        """Read ``200`` or ``3x``.

        Raises:
            UsageError: it is neither.
        """
        try:
            value = float(text.removesuffix("x"))
        except ValueError:
            value = 0.0
        if not 0 < value < float("inf"):
            fix = "Write requests per second, such as 200, or times the measured capacity, such as 3x."
            raise UsageError("--rate", given=text, expected="a number above 0", fix=fix)
        return cls(value, text.endswith("x"))


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to send, when, and how.

    Attributes:
        rate: of the arrivals; None with a trace.
        pattern: of the arrivals; see :class:`edge.load.arrivals.Arrivals`.
        burst_period_seconds: of bursts.
        burst_share: of a burst's period in which requests come.
        trace: recorded arrivals in place of a pattern.
        seed: of arrivals and requests.
        seconds: that are measured.
        requests: at most so many of them; None is as many as come.
        warm_up_seconds: before, at the same rate; a trace has none.
        rows: of each request.
        choices: policies or tiers that are asked for, in which shares.
        priorities: likewise.
        deadlines_ms: likewise.
        enforcer: who says when a deadline has passed; see :data:`edge.load.sender.ENFORCERS`.
        texts: to ask in place of the golden inputs.
        channels: connections.
        patience_seconds: after which an answer that nobody promised by a deadline counts as lost.
        max_outstanding: requests on their way at once.
        max_lag_ms: how late the generator may be at p99; None is a tenth of the shortest deadline, or 10.
        credentials: to reach the server with.
    """

    rate: Rate | None
    pattern: str = POISSON
    burst_period_seconds: float = 1.0
    burst_share: float = 0.5
    trace: array[float] | None = None
    seed: int = 0
    seconds: float = 10.0
    requests: int | None = None
    warm_up_seconds: float = 1.0
    rows: int = 1
    choices: Shares = UNSAID
    priorities: Shares = UNSAID
    deadlines_ms: Shares = UNSAID
    enforcer: str = "client"
    texts: tuple[str, ...] = ()
    channels: int = 4
    patience_seconds: float = 30.0
    max_outstanding: int = 10_000
    max_lag_ms: float | None = None
    credentials: Credentials | None = None

    def workload(self, bundles: Mapping[Bundle, float]) -> Workload:
        """Return the requests to the models of some bundles, in given shares.

        Raises:
            UsageError: a share or a text does not fit.
        """
        return Workload(
            bundles,
            rows=self.rows,
            choices=self.choices,
            priorities=self.priorities,
            deadlines_ms=self.deadlines_ms,
            texts=self.texts,
            seed=self.seed,
        )


class Capacity(NamedTuple):
    """What a server can do for clients that wait: answers per second to eight, and the median in ms of one alone."""

    per_second: float
    alone_ms: float


def capacity(url: str, bundles: Mapping[Bundle, float], plan: Plan, seconds: float) -> Capacity:
    """Measure what a server can do of a plan's requests by full tiers, without deadlines.

    Raises:
        ServerError: it does not answer.
        KeyboardInterrupt: it was interrupted.
    """
    full = msgspec.structs.replace(plan, deadlines_ms=UNSAID, choices=Shares((PINNED,), (1.0,)))
    workload, alone, busy = full.workload(bundles), Record(), Record()
    patience, credentials = plan.patience_seconds, plan.credentials
    first = Sender(url, workload, alone, channels=1, patience_seconds=patience, credentials=credentials)
    second = Sender(url, workload, busy, channels=plan.channels, patience_seconds=patience, credentials=credentials)

    async def ask() -> float:
        async with first:
            await first.closed_loop(1, 0.0, _ALONE_REQUESTS)
        async with second:
            return await second.closed_loop(_CAPACITY_CLIENTS, seconds, 2)

    def interrupt() -> None:
        first.interrupt()
        second.interrupt()

    took = run(ask, interrupt)
    if first.interrupted:
        raise KeyboardInterrupt
    for record in (alone, busy):
        _check_answered(url, record.columns())
    median = float(np.median(alone.columns().latency)) * 1e3
    return Capacity(len(busy) / took, median)


def measure(
    url: str,
    bundles: Mapping[Bundle, float],
    plan: Plan,
    *,
    advanced: Callable[[float], None] = lambda share: None,
) -> LoadReport:
    """Send a plan's requests and report what became of them.

    Args:
        url: the server, ``host:port``.
        bundles: whose models are asked, and how many parts of the requests each gets.
        plan: of the run.
        advanced: called with the share of the run that is over, 0 to 1.

    Raises:
        UsageError: the plan contradicts itself or a bundle.
        ServerError: the server cannot be reached at the start. Later nothing is raised: what a server does to the
            requests is the result.
        KeyboardInterrupt: it was interrupted before the run began; afterwards the report has what there is.
    """
    workload = plan.workload(bundles)
    able: float | None = None
    with Client(url, credentials=plan.credentials) as client:
        for bundle in bundles:
            client.metadata(bundle.manifest.name, str(bundle.manifest.version))
        if plan.rate and plan.rate.of_capacity:
            able = capacity(url, bundles, plan, min(max(plan.seconds / 3, 0.3), 5.0)).per_second
    rate, times, warm_up = _schedule(plan, able)
    record = Record()
    sender = Sender(
        url,
        workload,
        record,
        channels=plan.channels,
        enforcer=plan.enforcer,
        patience_seconds=plan.patience_seconds,
        max_outstanding=plan.max_outstanding,
        credentials=plan.credentials,
    )

    last = warm_up + (plan.requests / rate if plan.requests else plan.seconds)

    async def send() -> None:
        async with sender:
            await sender.open_loop(times, lambda now: advanced(min(now / last, 1.0)))

    with MemoryWatch(url, plan.credentials) as watch:
        run(send, sender.interrupt)
    advanced(1.0)
    return _report(plan, workload, record.columns(), rate, able, warm_up, sender.interrupted, watch.memory)


def _report(
    plan: Plan,
    workload: Workload,
    columns: Columns,
    rate: float,
    able: float | None,
    warm_up: float,
    interrupted: bool,
    memory: Memory | None,
) -> LoadReport:
    early = columns.due < warm_up
    measured = columns.where(~early)
    measured.due[:] -= warm_up
    kinds = workload.kinds
    seconds = _seconds(plan, measured, interrupted=interrupted)
    deadlines = tuple(sorted({kind.deadline_ms for kind in kinds}))
    bound = plan.max_lag_ms or report.lag_bound_ms(deadlines)
    lag, outcomes = Percentiles.of(measured.lag), measured.counts()
    answered = measured.latency[measured.answered]
    by_model = report.groups(measured, kinds, lambda kind: kind.model)
    return LoadReport(
        models=tuple(dict.fromkeys(kind.model for kind in kinds)),
        pattern="trace" if plan.trace else plan.pattern,
        rate_per_second=rate,
        capacity_per_second=able,
        seed=plan.seed,
        seconds=seconds,
        deadlines_ms=deadlines,
        interrupted=interrupted,
        requests=len(measured),
        outcomes=outcomes,
        in_time_per_second=outcomes.get("in_time", 0) / seconds,
        warm_up=columns.where(early).counts(),
        latency=Percentiles.of(answered),
        by_model=by_model or (Group.of(kinds[0].model, measured),),
        by_choice=report.groups(measured, kinds, lambda kind: kind.choice),
        by_priority=report.groups(measured, kinds, lambda kind: str(kind.priority)),
        by_tier=report.tiers(measured),
        causes=report.causes(measured),
        lag=lag,
        lag_bound_ms=bound,
        doubts=report.doubts(measured, lag, bound),
        timeline=report.timeline(measured, seconds),
        interval_seconds=report.interval_of(seconds),
        curve=report.curve(answered),
        memory=memory,
    )


def _schedule(plan: Plan, able: float | None) -> tuple[float, Iterator[float], float]:
    """Return the rate, the times with those of the warm-up, and how long that is."""
    if plan.trace:
        last = min(plan.trace[-1], plan.seconds)
        return len(plan.trace) / max(last, 1e-9), limited(plan.trace, plan.seconds, plan.requests), 0.0
    assert plan.rate is not None
    rate = plan.rate.value * (able or 1.0)
    arrivals = Arrivals(plan.pattern, rate, plan.seed, plan.burst_period_seconds, plan.burst_share)
    warm_up = plan.warm_up_seconds
    if plan.requests is None:
        return rate, limited(arrivals.times(), warm_up + plan.seconds), warm_up
    before = sum(1 for _ in limited(arrivals.times(), warm_up))
    return rate, limited(arrivals.times(), warm_up + plan.seconds, before + plan.requests), warm_up


def _seconds(plan: Plan, measured: Columns, *, interrupted: bool) -> float:
    """Return how long requests came: the time of the plan, or until the last one if they ended before it."""
    last = float(measured.due[-1]) if len(measured) else 0.0
    ended = interrupted or plan.trace is not None or plan.requests is not None
    return max(last, 1e-3) if ended else plan.seconds


def _check_answered(url: str, columns: Columns) -> None:
    if not columns.answered.all():
        cause = columns.where(~columns.answered).cause[0]
        fix = "Ask less of it, or give --rate in requests per second."
        subject = f"capacity of the server at {url}"
        raise ServerError(subject, given=Literally(f"{cause} for a request"), expected="an answer to each", fix=fix)
