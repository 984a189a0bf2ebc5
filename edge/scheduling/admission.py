"""Admission control: the bounds of the queue, and predicted deadline misses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from edge.errors import Literally, Overloaded
from edge.scheduling.drift import Drift, Promise
from edge.scheduling.job import Job
from edge.scheduling.lane import PROMISED_DEVIATIONS, Lane
from edge.scheduling.latency import LatencyTable
from edge.scheduling.queue import JobQueue

#: What an answer needs at least after its run: the hop to the transport, encoding, and the way to the client.
_LEAST_RETURN_SECONDS = 0.001

#: A run that goes on: when it was begun by ``time.monotonic()``, of which lane, and of what size.
Begun = tuple[float, Lane, int]


class Admission:
    """Lets requests wait, or refuses them. The scheduler's lock guards it.

    Args:
        queue: where they wait.
        instances: how many runs are computed at once.
        returns: how long answers took from the end of their runs to the transport, which is learnt elsewhere.
        by_deadline: whether to refuse requests that are predicted to miss their deadline.

    Attributes:
        drift: learns from what became of the promises that were made.
    """

    def __init__(self, queue: JobQueue, instances: int, returns: LatencyTable, by_deadline: bool) -> None:
        self.drift = Drift()
        self._queue = queue
        self._instances = instances
        self._by_deadline = by_deadline
        self._returns = returns

    def check(self, job: Job, now: float, cause: str | None, before: Callable[[], Iterable[Begun]]) -> None:
        """Refuse a job for which there is no room or no time; note in it the predicted finish.

        Args:
            job: the request to admit.
            now: in ``time.monotonic()`` seconds.
            cause: which bound of the queue it would break; None where there is room.
            before: returns the runs that it has to wait for beside what is in the queue.

        Raises:
            Overloaded: it may not wait.
        """
        if cause:
            waiting = len(self._queue) if cause == "requests" else f"{self._queue.size_bytes} bytes in the"
            given = Literally(f"{waiting} waiting requests")
            limit = self._queue.max_jobs if cause == "requests" else self._queue.max_bytes - job.size_bytes + 1
            expected = f"fewer than {limit}"
            raise _overloaded("queue", given, expected, cause, self.finish_seconds(job, now, before()))
        if not self._by_deadline or job.deadline is None:
            return
        seconds, left = self.finish_seconds(job, now, before()), job.deadline - now
        if seconds > left:
            given = Literally(f"an answer in {seconds * 1e3:.1f} ms, as predicted")
            raise _overloaded("deadline", given, f"one in {left * 1e3:.1f} ms", "deadline", seconds - left)
        job.promise = Promise(now, seconds / self.drift.factor(now), left)

    def finish_seconds(self, job: Job, now: float, before: Iterable[Begun]) -> float:
        """Predict in how many seconds a job will be answered if it waits from now on; what is unknown counts 0."""
        seconds, own = self._queue.seconds_until_done(job)
        for begun, lane, size in before:
            seconds += max(begun + lane.run_seconds(size) - now, 0.0)
        waiting = (seconds / self._instances + own) * self.drift.factor(now)
        return waiting + job.lane.max_delay_seconds + self.return_seconds

    @property
    def return_seconds(self) -> float:
        """How long an answer needs after its run, on the safe side."""
        return _LEAST_RETURN_SECONDS + (self._returns.seconds(1, PROMISED_DEVIATIONS) or 0.0)


def _overloaded(subject: str, given: Literally, expected: str, cause: str, seconds: float) -> Overloaded:
    return Overloaded(
        subject,
        given=given,
        expected=expected,
        fix="Send the request again later, or to another server.",
        cause=cause,
        retry_after_ms=max(math.ceil(seconds * 1e3), 1),
    )
