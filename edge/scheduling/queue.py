"""Queue of waiting requests: bounded by number and bytes, ordered by priority, grouped by what may share a run.

It takes no locks; the scheduler's lock guards it.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, takewhile
from operator import attrgetter
from types import MappingProxyType
from typing import Final

from edge.errors import Overloaded, Raw
from edge.scheduling.job import Job
from edge.scheduling.tier_executor import Ahead, TierExecutor

LATER: Final = "Send the request again later, or to another server."


@dataclass(slots=True)
class _Alike:
    """Waiting requests that may share a run, in order."""

    executor: TierExecutor
    jobs: list[Job] = field(default_factory=list)
    rows: int = 0
    size: int = 0
    loops: float = 0.0  # predicted, of all rows

    def ready_at(self) -> float:
        """Return when it may run: 0 if waiting gains nothing, else when its first arrival has waited long enough."""
        if not self.executor.max_delay_seconds or self.rows >= self.executor.max_rows or self._fitting()[1]:
            return 0.0
        return min(job.ready_at for job in self.jobs)

    def next_run(self, room: int | None) -> list[Job]:
        """Return the requests of the next run: as many as fit, or the most that make up a preferred size.

        A continuous run has ``room`` for so many rows.
        """
        if room is not None:
            totals = accumulate(job.rows for job in self.jobs)
            return self.jobs[: sum(1 for _ in takewhile(lambda rows: rows <= room, totals))]
        if not self.executor.max_rows:
            return self.jobs[:1]
        fitting, preferred = self._fitting()
        return self.jobs[: preferred if preferred and fitting == len(self.jobs) else fitting]

    def ahead(self, priority: int) -> Ahead:
        if self.jobs[-1].priority <= priority:
            return Ahead(len(self.jobs), self.rows, self.size, self.loops)
        before = list(takewhile(lambda job: job.priority <= priority, self.jobs))
        loops = sum(job.rows * job.repeats for job in before)
        return Ahead(len(before), sum(job.rows for job in before), sum(job.size for job in before), loops)

    def _fitting(self) -> tuple[int, int]:
        """Return how many of the first jobs fit into a run, and how many make up the largest preferred size, or 0."""
        rows, preferred = 0, 0
        for index, job in enumerate(self.jobs):
            rows += job.rows
            if rows > self.executor.max_rows:
                return index, preferred
            if rows in self.executor.preferred_rows:
                preferred = index + 1
        return len(self.jobs), preferred


class JobQueue:
    """The waiting requests of a server, the bytes of their tensors, and the maxima of both since the start.

    Its limits include requests that wait elsewhere, and join it later: :meth:`hold` keeps a place for each.
    """

    def __init__(self, max_jobs: int, max_bytes: int) -> None:
        self.max_jobs, self.max_bytes = max_jobs, max_bytes
        self.size_bytes = 0
        self.held_jobs = self.held_bytes = 0
        self.peak_jobs = 0
        self.peak_bytes = 0
        self._groups: dict[Hashable, _Alike] = {}
        self._jobs: dict[Job, Hashable] = {}
        self._pushed = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs)

    @property
    def fullness(self) -> float:
        """The used part of the limits, by requests or bytes, 0 to 1."""
        return max(len(self._jobs) / self.max_jobs, self.size_bytes / self.max_bytes)

    def hold(self, size_bytes: int) -> None:
        """Keep a place for a request of so many bytes, until :meth:`release`; only the event loop may call these."""
        self.held_jobs += 1
        self.held_bytes += size_bytes

    def release(self, size_bytes: int) -> None:
        self.held_jobs -= 1
        self.held_bytes -= size_bytes

    def full(self, size_bytes: int) -> str | None:
        """Return the limit that a request of so many bytes would exceed, ``requests`` or ``bytes``; None if it fits."""
        if len(self._jobs) + self.held_jobs >= self.max_jobs:
            return "requests"
        return "bytes" if self.size_bytes + self.held_bytes + size_bytes > self.max_bytes else None

    def refusal(self, full: str, size_bytes: int, retry_after_ms: int = 0) -> Overloaded:
        """Return the error of a request for a result of :meth:`full`."""
        given, expected = f"{len(self._jobs) + self.held_jobs} waiting requests", f"fewer than {self.max_jobs}"
        if full == "bytes":
            given = f"{self.size_bytes + self.held_bytes + size_bytes} bytes with this request"
            expected = f"at most {self.max_bytes}"
        return Overloaded(
            "queue", given=Raw(given), expected=expected, fix=LATER, cause=full, retry_after_ms=retry_after_ms
        )

    def push(self, job: Job) -> None:
        """Add a job behind those of its priority."""
        self._pushed += 1
        job.order = (job.priority, self._pushed)
        self._jobs[job] = key = job.key
        group = self._groups.get(key)
        if not group:
            group = self._groups[key] = _Alike(job.executor)
        insort(group.jobs, job, key=attrgetter("order"))
        if job.executor.iterative:
            job.repeats = job.executor.repeats(job.options)
        group.loops += job.rows * job.repeats
        group.rows += job.rows
        group.size += job.size
        self.size_bytes += job.size_bytes
        self.peak_jobs = max(self.peak_jobs, len(self._jobs))
        self.peak_bytes = max(self.peak_bytes, self.size_bytes)

    def remove(self, job: Job) -> bool:
        """Remove a job; return False if it does not wait any more."""
        if job not in self._jobs:
            return False
        self._remove(self._jobs[job], [job])
        return True

    def take(self, now: float, rooms: Mapping[TierExecutor, int] = MappingProxyType({})) -> list[Job]:
        """Remove and return the next run: of the groups that may run by now, the one whose first job is first.

        ``rooms`` has the rows that may join the continuous runs of the calling worker.
        """
        ready: dict[Hashable, int | None] = {}
        for key, group in self._groups.items():
            room = rooms.get(group.executor)
            if room is not None:
                if group.jobs[0].rows <= room:
                    ready[key] = room
            elif group.ready_at() <= now:
                ready[key] = None
        if not ready:
            return []
        key = min(ready, key=lambda key: self._groups[key].jobs[0].order)
        jobs = self._groups[key].next_run(ready[key])
        self._remove(key, jobs)
        return jobs

    def ready_at(self) -> float | None:
        """Return when the first group may run; None if no request waits."""
        return min((group.ready_at() for group in self._groups.values()), default=None)

    def take_expired(self, now: float) -> list[Job]:
        """Remove and return the jobs whose deadline has passed."""
        late = [job for job in self._jobs if job.deadline is not None and job.deadline <= now]
        for job in late:
            self.remove(job)
        return late

    def next_deadline(self) -> float | None:
        """Return the earliest deadline of the waiting jobs; None if they have none."""
        return min((job.deadline for job in self._jobs if job.deadline is not None), default=None)

    def seconds_until_done(self, job: Job) -> tuple[float, float]:
        """Predict the runs before that of a job that would be pushed now, and its own run, in seconds."""
        key = job.key
        before, ahead = 0.0, Ahead()
        for other, group in self._groups.items():
            if other == key:
                ahead = group.ahead(job.priority)
            else:
                before += group.executor.seconds(*group.ahead(job.priority))
        unshared, run_seconds = job.executor.seconds_before_and_of(job.rows, job.size, job.options, ahead)
        return before + unshared, run_seconds

    def _remove(self, key: Hashable, jobs: list[Job]) -> None:
        group = self._groups[key]
        for job in jobs:
            del self._jobs[job]
            self.size_bytes -= job.size_bytes
            group.loops -= job.rows * job.repeats
            group.rows -= job.rows
            group.size -= job.size
        group.jobs = [job for job in group.jobs if job in self._jobs]
        if not group.jobs:
            del self._groups[key]
