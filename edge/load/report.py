"""Report of a load run: outcomes that add up, percentiles of every group, and both over time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import msgspec
import numpy as np

from edge.datatypes import Array
from edge.load.record import LOST, UNSENT, Columns
from edge.load.workload import Kind

_PERCENTS = (50.0, 90.0, 95.0, 99.0, 99.9)
#: A timeline has at most so many points, and points of one second where that allows it.
_MAX_POINTS, _MIN_POINTS = 600, 20
_STEPS = (0.05, 0.1, 0.2, 0.5, 1.0)


class Percentiles(msgspec.Struct, frozen=True):
    """Exact percentiles in ms, interpolated between neighbours; all 0 without any values."""

    count: int
    p50_ms: float
    p90_ms: float
    p95_ms: float
    p99_ms: float
    p99_9_ms: float
    max_ms: float

    @classmethod
    def of(cls, seconds: Array) -> Percentiles:
        """Return the percentiles of durations in seconds [values]."""
        values = seconds * 1e3 if len(seconds) else np.zeros(1)
        p50, p90, p95, p99, p99_9 = np.percentile(values, _PERCENTS).tolist()
        return cls(len(seconds), p50, p90, p95, p99, p99_9, float(values.max()))


class Group(msgspec.Struct, frozen=True):
    """Requests that have something in common.

    Attributes:
        name: what.
        requests: how many.
        outcomes: how many of them ended in which way; see :data:`edge.load.record.OUTCOMES`.
        latency: of those that were answered.
    """

    name: str
    requests: int
    outcomes: dict[str, int]
    latency: Percentiles

    @classmethod
    def of(cls, name: str, columns: Columns) -> Group:
        """Return the group of some rows."""
        return cls(name, len(columns), columns.counts(), Percentiles.of(columns.latency[columns.answered]))


class Cause(msgspec.Struct, frozen=True):
    """Why requests got no answer.

    Attributes:
        outcome: how they ended.
        cause: the status, and what our server named as the subject: ``queue`` or ``deadline``.
        count: how many.
        latency: until they were told.
        retry_after_p50_ms: the median of when the server said to come back; None where it did not.
    """

    outcome: str
    cause: str
    count: int
    latency: Percentiles
    retry_after_p50_ms: float | None


class Point(msgspec.Struct, frozen=True):
    """The requests that were due in one interval of a timeline, and the answers that came in it.

    Attributes:
        at_seconds: where it begins.
        outcomes: of the requests that were due in it.
        answers_per_second: that came in it.
        p50_ms: of the answers to those that were due in it; None without any.
        p99_ms: likewise.
    """

    at_seconds: float
    outcomes: dict[str, int]
    answers_per_second: float
    p50_ms: float | None
    p99_ms: float | None


class Memory(msgspec.Struct, frozen=True):
    """The server's resident memory by its own Telemetry, in bytes; ``samples`` are seconds and bytes.

    Attributes:
        before_bytes: before the first request of the run.
        after_bytes: after the last.
        peak_bytes: the largest that was seen between.
    """

    before_bytes: int
    after_bytes: int
    peak_bytes: int
    samples: tuple[tuple[float, int], ...]


class LoadReport(msgspec.Struct, frozen=True):
    """One open-loop run.

    Attributes:
        models: that were asked.
        pattern: of the arrivals.
        rate_per_second: that was asked for; of a trace, that it has.
        capacity_per_second: what clients in a closed loop got before; None where that was not measured.
        seed: of arrivals and requests.
        seconds: from the start of what was measured to when the last request was due.
        deadlines_ms: that requests had, from when they were due; 0 is none.
        interrupted: whether it was ended before its time.
        requests: that were due; the outcomes add up to it.
        outcomes: how many ended in which way.
        in_time_per_second: the goodput.
        warm_up: outcomes of requests that came before, and count for nothing else.
        latency: of the answered.
        by_model: and so on.
        causes: of those without an answer, the most frequent first.
        lag: by how much the generator sent late.
        lag_bound_ms: beyond which its p99 must not be.
        doubts: why the numbers are not to be trusted; empty if they are.
        timeline: over the seconds.
        interval_seconds: of each of its points.
        curve: percents and the latency of the answered in ms at them.
        memory: of the server; None where it does not tell.
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
    by_tier: tuple[Group, ...]
    causes: tuple[Cause, ...]
    lag: Percentiles
    lag_bound_ms: float
    doubts: tuple[str, ...]
    timeline: tuple[Point, ...]
    interval_seconds: float
    curve: tuple[tuple[float, float], ...]
    memory: Memory | None

    @property
    def lost(self) -> int:
        """How many requests got no answer at all, in the warm-up too."""
        return self.outcomes.get(LOST, 0) + self.warm_up.get(LOST, 0)

    def named_groups(self) -> list[tuple[str, Group]]:
        """Return all groups with names that tell them apart, that of everything first."""
        everything = Group("all", self.requests, self.outcomes, self.latency)
        models = self.by_model if len(self.by_model) > 1 else ()
        return [
            ("all", everything),
            *((group.name, group) for group in models),
            *((f"policy {group.name or 'of the server'}", group) for group in self.by_choice),
            *((f"priority {group.name}", group) for group in self.by_priority),
            *((f"answered by {group.name}", group) for group in self.by_tier),
        ]


def groups(columns: Columns, kinds: Sequence[Kind], name: Callable[[Kind], str]) -> tuple[Group, ...]:
    """Return a group for each name that requests have by their kind; none where all have the same one."""
    names = np.array([name(kind) for kind in kinds])
    if len(set(names.tolist())) < 2:
        return ()
    of_rows = names[columns.kind]
    return tuple(Group.of(one, columns.where(of_rows == one)) for one in sorted(set(names.tolist())))


def tiers(columns: Columns) -> tuple[Group, ...]:
    """Return a group for each tier that answered."""
    found = sorted(set(columns.tier.tolist()) - {""})
    return tuple(Group.of(tier, columns.where(columns.tier == tier)) for tier in found)


def causes(columns: Columns) -> tuple[Cause, ...]:
    """Return why requests got no answer, the most frequent first."""
    unanswered = columns.where(~columns.answered)
    pairs = set(zip(unanswered.outcome.tolist(), unanswered.cause.tolist(), strict=True))
    found = []
    for outcome, cause in pairs:
        rows = unanswered.where((unanswered.outcome == outcome) & (unanswered.cause == cause))
        retry = rows.retry_ms[~np.isnan(rows.retry_ms)]
        told = rows.latency[~np.isnan(rows.latency)]
        after = float(np.median(retry)) if len(retry) else None
        found.append(Cause(outcome, cause, len(rows), Percentiles.of(told), after))
    return tuple(sorted(found, key=lambda each: (-each.count, each.outcome, each.cause)))


def interval_of(seconds: float) -> float:
    """Return the length of a timeline's points: a second, less in a short run, more in a long one."""
    longer = (float(10**power) for power in range(1, 9))
    fitting = [step for step in _STEPS if seconds / step >= _MIN_POINTS] or [_STEPS[0]]
    return next((step for step in (fitting[-1], *longer) if seconds / step <= _MAX_POINTS), fitting[-1])


def timeline(columns: Columns, seconds: float) -> tuple[Point, ...]:
    """Return the points of a run of so many seconds."""
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
    """Return why the numbers are not to be trusted."""
    found = []
    if lag.p99_ms > bound_ms:
        found.append(
            f"the generator itself was late: {lag.p99_ms:.3g} ms at p99, of {bound_ms:.3g} ms that are allowed. "
            "Ask for less, or give it a processor of its own."
        )
    unsent = int(np.count_nonzero(columns.outcome == UNSENT))
    if unsent:
        found.append(f"{unsent} requests were not sent, because too many were on their way. Raise --max-outstanding.")
    return tuple(found)


def lag_bound_ms(deadlines_ms: Iterable[float]) -> float:
    """Return how late the generator may be at p99: a tenth of the shortest deadline, 10 ms without any."""
    return min((deadline / 10 for deadline in deadlines_ms if deadline), default=10.0)
