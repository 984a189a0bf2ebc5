"""Admission control: limits of the queue, and predicted deadline misses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from edge.errors import Literally, Overloaded
from edge.scheduling.job import Job
from edge.scheduling.latency import LatencyCorrection, LatencyEstimate, LatencyTable
from edge.scheduling.queue import JobQueue
from edge.scheduling.runs import Run
from edge.scheduling.tier_executor import TAIL_DEVIATIONS

#: The least time from the end of a run to the client: the hop to the transport, encoding, and the network.
_LEAST_RETURN_SECONDS = 0.001


class Admission:
    """Admits requests to the queue, or rejects them. The scheduler's lock guards it.

    Args:
        queue: of the waiting requests.
        instances: runs computed at once.
        by_deadline: whether to reject requests that are predicted to miss their deadline.

    Attributes:
        correction: of the predictions.
        returns: times from the end of a run to the transport.
    """

    def __init__(self, queue: JobQueue, instances: int, by_deadline: bool) -> None:
        self.correction = LatencyCorrection()
        self.returns = LatencyTable()
        self._queue = queue
        self._instances = instances
        self._by_deadline = by_deadline

    def check(self, job: Job, now: float, full: str | None, runs: Callable[[], Iterable[Run]]) -> None:
        """Reject a job that the queue has no room for or that would be late; otherwise record its latency estimate.

        Args:
            job: the request.
            now: ``time.monotonic()`` seconds.
            full: the result of :meth:`edge.scheduling.queue.JobQueue.full`.
            runs: returns the current runs that it has to wait for.

        Raises:
            Overloaded: the job must not wait.
        """
        if full == "requests":
            given, expected = f"{len(self._queue)} waiting requests", f"fewer than {self._queue.max_jobs}"
        elif full:
            given = f"{self._queue.size_bytes + job.size_bytes} bytes with this request"
            expected = f"at most {self._queue.max_bytes}"
        if full:
            raise _overloaded("queue", given, expected, full, self.finish_seconds(job, now, runs()))
        if not self._by_deadline or job.deadline is None:
            return
        seconds, left = self.finish_seconds(job, now, runs()), job.deadline - now
        if seconds > left:
            given, expected = f"an answer in {seconds * 1e3:.1f} ms, as predicted", f"one in {left * 1e3:.1f} ms"
            raise _overloaded("deadline", given, expected, "deadline", seconds - left)
        job.estimate = LatencyEstimate(now, seconds / self.correction.factor(now), left)

    def finish_seconds(self, job: Job, now: float, runs: Iterable[Run]) -> float:
        """Predict the seconds until a job is answered that joins the queue now; unknown run times count as 0."""
        seconds, own = self._queue.seconds_until_done(job)
        for run in runs:
            seconds += max(run.begun + run.executor.run_seconds(run.size) - now, 0.0)
        waiting = (seconds / self._instances + own) * self.correction.factor(now)
        return waiting + job.executor.max_delay_seconds + self.return_seconds

    @property
    def return_seconds(self) -> float:
        """Seconds from the end of a run to the client, on the safe side."""
        return _LEAST_RETURN_SECONDS + (self.returns.seconds(1, TAIL_DEVIATIONS) or 0.0)


def _overloaded(subject: str, given: str, expected: str, cause: str, seconds: float) -> Overloaded:
    return Overloaded(
        subject,
        given=Literally(given),
        expected=expected,
        fix="Send the request again later, or to another server.",
        cause=cause,
        retry_after_ms=max(math.ceil(seconds * 1e3), 1),
    )
