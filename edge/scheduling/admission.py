"""Admission control: limits of the queue, predicted deadline misses, and memory for keys and values."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple

from edge.errors import InvalidRequest, Overloaded, Raw
from edge.scheduling.continuous import ContinuousRun
from edge.scheduling.job import Job
from edge.scheduling.latency import LatencyCorrection, LatencyEstimate, LatencyModel
from edge.scheduling.queue import LATER, JobQueue
from edge.scheduling.runs import Run
from edge.scheduling.tier_executor import TAIL_DEVIATIONS

#: The least time from the end of a run to the client: the hop to the transport, encoding, and the network.
_LEAST_RETURN_SECONDS = 0.001


class Admission:
    """Admits requests to the queue, or rejects them. The scheduler's lock guards it.

    ``instances`` runs are computed at once. With ``by_deadline``, it rejects requests that would miss their deadline.
    """

    def __init__(self, queue: JobQueue, instances: int, by_deadline: bool) -> None:
        self.correction = LatencyCorrection()
        self.returns = LatencyModel()  # from the end of a run to the transport
        self._queue, self._instances, self._by_deadline = queue, instances, by_deadline

    def check(self, job: Job, now: float, full: str | None, runs: Callable[[], Iterable[Run | ContinuousRun]]) -> None:
        """Record the latency estimate of a job; raise Overloaded if the queue has no room for it or it would be late.

        ``full`` is the result of :meth:`JobQueue.full`; ``runs`` returns the current runs that the job waits for.
        """
        left = job.deadline - now if self._by_deadline and job.deadline is not None else math.inf
        if not full and left == math.inf:
            return
        seconds = self.finish_seconds(job, now, runs())
        if job.best_effort and seconds > left:  # it ends in time, if there is time for a first answer
            seconds = max(self.finish_seconds(job, now, runs(), first=True), left)
        if full:
            raise self._queue.refusal(full, job.size_bytes, _milliseconds(seconds))
        if seconds <= left:
            job.estimate = LatencyEstimate(now, seconds / self.correction.factor(now), left)
            return
        raise Overloaded(
            "deadline",
            given=Raw(f"an answer in {seconds * 1e3:.1f} ms, as predicted"),
            expected=f"one in {left * 1e3:.1f} ms",
            fix=LATER,
            cause="deadline",
            retry_after_ms=_milliseconds(seconds - left),
        )

    def finish_seconds(
        self, job: Job, now: float, runs: Iterable[Run | ContinuousRun], *, first: bool = False
    ) -> float:
        """Predict the seconds until a job is answered that joins the queue now, or until it has a ``first`` answer.

        Unknown run times count as 0.
        """
        seconds, run_seconds = self._queue.seconds_until_done(job)
        for run in runs:
            seconds += run.wait_seconds(job, now)
        if first:
            run_seconds = min(run_seconds, job.executor.first_seconds(job.rows, job.size))
        waiting = (seconds / self._instances + run_seconds) * self.correction.factor(now)
        return waiting + job.executor.max_delay_seconds + self.return_seconds

    @property
    def return_seconds(self) -> float:
        """Seconds from the end of a run to the client, on the safe side."""
        return _LEAST_RETURN_SECONDS + (self.returns.seconds(1, TAIL_DEVIATIONS) or 0.0)


def _milliseconds(seconds: float) -> int:
    return max(math.ceil(seconds * 1e3), 1)


class CacheBudget:
    """Bytes that all requests for text, of all models, may reserve together; any thread may give them back."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes, self.reserved_bytes = most_bytes, 0
        self.lock = threading.Lock()

    def reserve(self, model: str, size_bytes: int) -> Reservation | None:
        """Reserve bytes for a request; None if others have too many, an InvalidRequest if it would not fit alone."""
        if size_bytes > self.most_bytes:
            given = Raw(f"{size_bytes} bytes of keys and values")
            expected = f"at most {self.most_bytes}, all that the server has for them"
            fix = "Shorten the prompt, lower max_tokens, or raise --cache-mib."
            raise InvalidRequest(f"prompt and max_tokens of {model!r}", given=given, expected=expected, fix=fix)
        with self.lock:
            if self.reserved_bytes + size_bytes > self.most_bytes:
                return None
            self.reserved_bytes += size_bytes
        return Reservation(self, size_bytes)

    def refusal(self, size_bytes: int, seconds: float) -> Overloaded:
        """Return the error of a request that gets no bytes, and would be answered in ``seconds`` with others before."""
        return Overloaded(
            "cache",
            given=Raw(f"{size_bytes} bytes of keys and values for prompt and max_tokens"),
            expected=f"at most {self.most_bytes - self.reserved_bytes}, which other requests leave",
            fix="Send the request again later, or lower max_tokens.",
            cause="cache",
            retry_after_ms=max(round(seconds * 1e3), 1),
        )


class Reservation(NamedTuple):
    """The bytes of one request, given back when it has ended."""

    budget: CacheBudget
    size_bytes: int

    def give_back(self) -> None:
        with self.budget.lock:
            self.budget.reserved_bytes -= self.size_bytes
