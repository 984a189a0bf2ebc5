"""Report of a load run: outcomes that add up, percentiles of every group, and both over time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import msgspec
import numpy as np

from edge.bench.plan import Plan
from edge.bench.sender import FAILED, IN_TIME, LOST, UNSENT, Columns
from edge.bench.timing import Percentiles
from edge.bench.workload import Kind
from edge.datatypes import Array

#: Limits of the number of points in a timeline; points are a second long where these allow.
_MAX_POINTS, _MIN_POINTS = 600, 20
_STEPS = (0.05, 0.1, 0.2, 0.5, 1.0)


class Group(msgspec.Struct, frozen=True):
    """Requests with something in common; ``latency`` is that of the responses, ``loops`` their mean if looped."""

    name: str
    requests: int
    outcomes: dict[str, int]
    latency: Percentiles
    loops: float | None = None

    @classmethod
    def of(cls, name: str, columns: Columns) -> Group:
        """Return the group of some rows."""
        latency = Percentiles.of(columns.latency[columns.answered])
        return cls(name, len(columns), columns.counts(), latency, mean_loops(columns))


class Cause(msgspec.Struct, frozen=True):
    """Requests without a response, by cause: the status, and the subject of our server's error, such as ``queue``.

    ``latency`` is until the error, ``retry_after_p50_ms`` the median of the server's hints when to retry.
    """

    outcome: str
    cause: str
    count: int
    latency: Percentiles
    retry_after_p50_ms: float | None


class Point(msgspec.Struct, frozen=True):
    """One interval of a timeline: outcomes and latency of the requests due in it, and responses that came in it."""

    at_seconds: float
    outcomes: dict[str, int]
    answers_per_second: float
    p50_ms: float | None
    p99_ms: float | None


class Memory(msgspec.Struct, frozen=True):
    """The server's resident memory before, after and at most during the run; ``samples`` are seconds and bytes."""

    before_bytes: int
    after_bytes: int
    peak_bytes: int
    samples: tuple[tuple[float, int], ...]

    @classmethod
    def of(cls, samples: Sequence[tuple[float, int]]) -> Memory:
        """Return the summary of samples, at least one."""
        sizes = [size for _, size in samples]
        return cls(sizes[0], sizes[-1], max(sizes), tuple(samples))


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """One open-loop run.

    Attributes:
        rate_per_second: the plan's, or the trace's.
        capacity_per_second: responses to clients in a closed loop before the run; None if not measured.
        seconds: length of the measurement, up to when the last request was due.
        deadlines_ms: from when requests were due; 0 is none.
        outcomes: number of requests by outcome, which add up to ``requests``.
        in_time_per_second: the goodput.
        warm_up: outcomes of earlier requests, which count for nothing else.
        causes: of requests without a response, the most frequent first.
        lag: delay of the generator.
        lag_bound_ms: limit of its p99.
        interval_seconds: length of each point of the timeline.
        curve: percents, and the latency of the responses in ms at them.
        memory: of the server; None if it reports none.
        loops: mean of the responses of looped models; None without any.
    """

    models: tuple[str, ...]
    pattern: str
    rate_per_second: float
    capacity_per_second: float | None
    seed: int
    seconds: float
    deadlines_ms: tuple[float, ...]
    interrupted: bool
    requests: int
    outcomes: dict[str, int]
    in_time_per_second: float
    warm_up: dict[str, int]
    latency: Percentiles
    by_model: tuple[Group, ...]
    by_choice: tuple[Group, ...]
    by_priority: tuple[Group, ...]
    by_limits: tuple[Group, ...]
    by_tier: tuple[Group, ...]
    causes: tuple[Cause, ...]
    lag: Percentiles
    lag_bound_ms: float
    doubts: tuple[str, ...]
    timeline: tuple[Point, ...]
    interval_seconds: float
    curve: tuple[tuple[float, float], ...]
    memory: Memory | None
    loops: float | None

    @property
    def lost(self) -> int:
        """Number of lost requests, those of the warm-up included."""
        return self.outcomes.get(LOST, 0) + self.warm_up.get(LOST, 0)

    @property
    def failed(self) -> int:
        """Number of failed requests, those of the warm-up included."""
        return self.outcomes.get(FAILED, 0) + self.warm_up.get(FAILED, 0)

    @property
    def summary(self) -> str:
        """The load and the goodput on one line."""
        capacity = f", capacity {self.capacity_per_second:.0f}" if self.capacity_per_second else ""
        deadlines = ", ".join(f"{each:g} ms" for each in self.deadlines_ms if each) or "no deadline"
        return (
            f"{self.pattern}, {self.rate_per_second:.4g} requests/s{capacity}, {deadlines}: {self.requests} requests "
            f"in {self.seconds:.4g} s, {self.in_time_per_second:.4g} answers/s in time"
        )

    def named_groups(self) -> list[tuple[str, Group]]:
        """Return all groups with unambiguous names, that of all requests first."""
        return [
            ("all", Group("all", self.requests, self.outcomes, self.latency, self.loops)),
            *((group.name, group) for group in self.by_model if len(self.by_model) > 1),
            *((f"policy {group.name or 'of the server'}", group) for group in self.by_choice),
            *((f"priority {group.name}", group) for group in self.by_priority),
            *((group.name or "the server's limits", group) for group in self.by_limits),
            *((f"answered by {group.name}", group) for group in self.by_tier),
        ]


def report_of(
    plan: Plan,
    kinds: Sequence[Kind],
    columns: Columns,
    *,
    rate: float,
    capacity: float | None,
    warm_up_seconds: float,
    interrupted: bool,
    memory: Memory | None,
) -> LoadReport:
    """Return the report of all requests of a run, of which those due during the warm-up are only counted."""
    early = columns.due < warm_up_seconds
    measured = columns.where(~early)
    measured.due[:] -= warm_up_seconds
    last = float(measured.due[-1]) if len(measured) else 0.0
    ended_early = interrupted or plan.trace is not None or plan.requests is not None
    seconds = max(last, 1e-3) if ended_early else plan.seconds
    deadlines = tuple(sorted({kind.deadline_ms for kind in kinds}))
    bound = lag_bound_ms(deadlines)
    lag, outcomes = Percentiles.of(measured.lag), measured.counts()
    answered = measured.latency[measured.answered]
    return LoadReport(
        models=tuple(dict.fromkeys(kind.model for kind in kinds)),
        pattern="trace" if plan.trace else plan.pattern,
        rate_per_second=rate,
        capacity_per_second=capacity,
        seed=plan.seed,
        seconds=seconds,
        deadlines_ms=deadlines,
        interrupted=interrupted,
        requests=len(measured),
        outcomes=outcomes,
        in_time_per_second=outcomes.get(IN_TIME, 0) / seconds,
        warm_up=columns.where(early).counts(),
        latency=Percentiles.of(answered),
        by_model=groups(measured, kinds, lambda kind: kind.model) or (Group.of(kinds[0].model, measured),),
        by_choice=groups(measured, kinds, lambda kind: kind.policy),
        by_priority=groups(measured, kinds, lambda kind: str(kind.priority)),
        by_limits=groups(measured, kinds, lambda kind: kind.limits),
        by_tier=tiers(measured),
        causes=causes(measured),
        lag=lag,
        lag_bound_ms=bound,
        doubts=doubts(measured, lag, bound),
        timeline=timeline(measured, seconds),
        interval_seconds=interval_of(seconds),
        curve=curve(answered),
        memory=memory,
        loops=mean_loops(measured),
    )


def groups(columns: Columns, kinds: Sequence[Kind], name: Callable[[Kind], str]) -> tuple[Group, ...]:
    """Return a group for each name that kinds have; none if they share one."""
    names = np.array([name(kind) for kind in kinds])
    distinct = sorted(set(names.tolist()))
    of_rows = names[columns.kind]
    return tuple(Group.of(one, columns.where(of_rows == one)) for one in distinct) if len(distinct) > 1 else ()


def tiers(columns: Columns) -> tuple[Group, ...]:
    """Return a group for each tier that responses name."""
    found = sorted(set(columns.tier.tolist()) - {""})
    return tuple(Group.of(tier, columns.where(columns.tier == tier)) for tier in found)


def mean_loops(columns: Columns) -> float | None:
    """Return the mean loops of the responses of looped models; None without any."""
    found = columns.loops[~np.isnan(columns.loops)]
    return float(found.mean()) if len(found) else None


def causes(columns: Columns) -> tuple[Cause, ...]:
    """Return the causes of requests without a response, the most frequent first."""
    found = []
    unanswered = columns.where(~columns.answered)
    for outcome, cause in set(zip(unanswered.outcome.tolist(), unanswered.cause.tolist(), strict=True)):
        rows = unanswered.where((unanswered.outcome == outcome) & (unanswered.cause == cause))
        retry = rows.retry_ms[~np.isnan(rows.retry_ms)]
        latency = Percentiles.of(rows.latency[~np.isnan(rows.latency)])
        found.append(Cause(outcome, cause, len(rows), latency, float(np.median(retry)) if len(retry) else None))
    return tuple(sorted(found, key=lambda each: (-each.count, each.outcome, each.cause)))


def interval_of(seconds: float) -> float:
    """Return the length of a timeline's points: a second, less in a short run, more in a long one."""
    longer = (float(10**power) for power in range(1, 9))
    fitting = [step for step in _STEPS if seconds / step >= _MIN_POINTS] or [_STEPS[0]]
    return next((step for step in (fitting[-1], *longer) if seconds / step <= _MAX_POINTS), fitting[-1])


def timeline(columns: Columns, seconds: float) -> tuple[Point, ...]:
    """Return the points of a run of ``seconds``, one for each interval; see :func:`interval_of`."""
    step = interval_of(seconds)
    count = max(math.ceil(seconds / step), 1)
    place = np.minimum(columns.due // step, count - 1).astype(int)
    answered = columns.answered
    came = np.bincount(((columns.due + columns.latency)[answered] // step).astype(int), minlength=count)
    points = []
    for index in range(count):
        rows = columns.where(place == index)
        good = rows.latency[rows.answered]
        p50, p99 = (np.percentile(good, [50, 99]) * 1e3).tolist() if len(good) else (None, None)
        points.append(Point(round(index * step, 6), rows.counts(), float(came[index] / step), p50, p99))
    return tuple(points)


def curve(latency: Array) -> tuple[tuple[float, float], ...]:
    """Return percents and the latencies in ms at them, denser towards 100 as far as the number of values allows."""
    if not len(latency):
        return ()
    # 1 - 10^-x for x up to the last value's own share.
    depth = np.linspace(0, math.log10(max(len(latency), 10)), 100)
    percents = 100 * (1 - 10**-depth)
    return tuple(zip(percents.tolist(), (np.percentile(latency, percents) * 1e3).tolist(), strict=True))


def doubts(columns: Columns, lag: Percentiles, bound_ms: float) -> tuple[str, ...]:
    """Return reasons not to trust the numbers."""
    found = []
    if lag.p99_ms > bound_ms:
        late = f"the generator itself was late: {lag.p99_ms:.3g} ms at p99, of {bound_ms:.3g} ms that are allowed."
        found.append(f"{late} Lower the rate, or give the generator a processor of its own.")
    if unsent := columns.counts().get(UNSENT, 0):
        found.append(f"{unsent} requests were not sent, because too many were in flight. Raise --max-outstanding.")
    return tuple(found)


def lag_bound_ms(deadlines_ms: Iterable[float]) -> float:
    """Return the limit of the generator's delay at p99: a tenth of the shortest deadline, 10 ms without any."""
    return min((deadline / 10 for deadline in deadlines_ms if deadline), default=10.0)
