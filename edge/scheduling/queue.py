"""The requests that wait: bounded in number and bytes, by priority, grouped by what may share a run.

No thread is known here; the scheduler's lock guards it.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Hashable, Iterator
from itertools import takewhile
from operator import attrgetter

from edge.scheduling.job import Job
from edge.scheduling.lane import Lane


class _Group:
    """Waiting requests that may share a run, in order."""

    __slots__ = ("jobs", "lane", "rows", "size")

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.jobs: list[Job] = []
        self.rows = 0
        self.size = 0

    def add(self, job: Job) -> None:
        if not self.jobs or self.jobs[-1].order < job.order:
            self.jobs.append(job)
        else:
            insort(self.jobs, job, key=attrgetter("order"))
        self.rows += job.rows
        self.size += job.size

    def remove(self, jobs: list[Job]) -> None:
        gone = set(map(id, jobs))
        self.jobs = [job for job in self.jobs if id(job) not in gone]
        self.rows -= sum(job.rows for job in jobs)
        self.size -= sum(job.size for job in jobs)

    def ready_at(self) -> float:
        """Return when it may run: at once if nothing is worth waiting for, else when its first to come has waited."""
        if not self.lane.max_delay_seconds or self.rows >= self.lane.max_rows or self._preferred():
            return 0.0
        return min(job.ready_at for job in self.jobs)

    def next_run(self) -> list[Job]:
        """Return the requests of the next run: as many as fit, or the most that make up a preferred size."""
        if not self.lane.max_rows:
            return self.jobs[:1]
        fitting = self._fitting()
        preferred = self._preferred()
        return fitting[:preferred] if preferred and len(fitting) == len(self.jobs) else fitting

    def ahead(self, priority: int) -> tuple[int, int, int]:
        """Return how many jobs, rows and elements come before a new job of a priority."""
        if not self.jobs or self.jobs[-1].priority <= priority:
            return len(self.jobs), self.rows, self.size
        before = list(takewhile(lambda job: job.priority <= priority, self.jobs))
        return len(before), sum(job.rows for job in before), sum(job.size for job in before)

    def _fitting(self) -> list[Job]:
        rows, limit = 0, self.lane.max_rows
        for index, job in enumerate(self.jobs):
            rows += job.rows
            if rows > limit:
                return self.jobs[:index]
        return self.jobs[:]

    def _preferred(self) -> int:
        """Return how many of the first jobs make up the largest preferred size; 0 where none do."""
        rows, found = 0, 0
        if self.lane.preferred_rows:
            for index, job in enumerate(self._fitting()):
                rows += job.rows
                if rows in self.lane.preferred_rows:
                    found = index + 1
        return found


class JobQueue:
    """The waiting requests of a server.

    Args:
        max_jobs: how many may wait.
        max_bytes: how many bytes they may hold together.

    Attributes:
        size_bytes: how many they hold.
        peak_jobs: how many have waited at once since the start.
        peak_bytes: how many bytes they have held at once.
    """

    def __init__(self, max_jobs: int, max_bytes: int) -> None:
        self.max_jobs = max_jobs
        self.max_bytes = max_bytes
        self.size_bytes = 0
        self.peak_jobs = 0
        self.peak_bytes = 0
        self._groups: dict[Hashable, _Group] = {}
        self._jobs: dict[Job, Hashable] = {}
        self._pushed = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs)

    def full(self, job: Job) -> str | None:
        """Return which bound a job would break, ``requests`` or ``bytes``, or None."""
        if len(self._jobs) >= self.max_jobs:
            return "requests"
        return "bytes" if self.size_bytes + job.size_bytes > self.max_bytes else None

    def push(self, job: Job) -> None:
        """Let a job wait behind those of its priority."""
        self._pushed += 1
        job.order = (job.priority, self._pushed)
        key = job.key
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Group(job.lane)
        group.add(job)
        self._jobs[job] = key
        self.size_bytes += job.size_bytes
        self.peak_jobs = max(self.peak_jobs, len(self._jobs))
        self.peak_bytes = max(self.peak_bytes, self.size_bytes)

    def remove(self, job: Job) -> bool:
        """Take a job out; False when it does not wait any more."""
        if job not in self._jobs:
            return False
        self._remove(self._jobs[job], [job])
        return True

    def take(self, now: float) -> list[Job]:
        """Take out the next run: the group whose first job is first of all, among those that may run by now."""
        ready = [(group.jobs[0].order, key) for key, group in self._groups.items() if group.ready_at() <= now]
        if not ready:
            return []
        _, key = min(ready, key=lambda pair: pair[0])
        jobs = self._groups[key].next_run()
        self._remove(key, jobs)
        return jobs

    def ready_at(self) -> float | None:
        """Return when the first group may run; None when nothing waits."""
        return min((group.ready_at() for group in self._groups.values()), default=None)

    def take_expired(self, now: float) -> list[Job]:
        """Take out the jobs whose deadline has passed."""
        late = [job for job in self._jobs if job.deadline is not None and job.deadline <= now]
        for job in late:
            self.remove(job)
        return late

    def next_deadline(self) -> float | None:
        """Return the earliest deadline of those that wait."""
        return min((job.deadline for job in self._jobs if job.deadline is not None), default=None)

    def seconds_until_done(self, job: Job) -> tuple[float, float]:
        """Predict the runs that come before a job if it is pushed now, and the run that it will be part of."""
        key, lane = job.key, job.lane
        before = 0.0
        for other, group in self._groups.items():
            if other != key:
                before += group.lane.seconds(*group.ahead(job.priority))
        jobs, rows, size = self._groups[key].ahead(job.priority) if key in self._groups else (0, 0, 0)
        if not lane.max_rows:
            return before + lane.seconds(jobs, rows, size), lane.run_seconds(job.size)
        rows, size = rows + job.rows, size + job.size
        runs = (rows - 1) // lane.max_rows
        each = size / rows
        before += runs * lane.seconds(1, lane.max_rows, round(lane.max_rows * each))
        return before, lane.run_seconds(round((rows - runs * lane.max_rows) * each))

    def _remove(self, key: Hashable, jobs: list[Job]) -> None:
        group = self._groups[key]
        group.remove(jobs)
        if not group.jobs:
            del self._groups[key]
        for job in jobs:
            del self._jobs[job]
            self.size_bytes -= job.size_bytes
