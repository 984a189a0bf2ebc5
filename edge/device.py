"""The device thread: the one place where models compute.

CUDA contexts belong to a thread and a small GPU gains nothing from rivals, so one thread owns every runner, from load
to close, and all others hand it work through a bounded queue.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from edge.errors import DeadlineExceeded, Literally, Overloaded

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Job(Generic[T]):
    work: Callable[[], T]
    future: Future[T]
    deadline: float | None
    queued_ns: int = field(default_factory=time.perf_counter_ns)


class DeviceThread:
    """Runs jobs in order, one at a time.

    Args:
        max_queue_size: how many jobs may wait before :meth:`submit` refuses.
    """

    def __init__(self, max_queue_size: int) -> None:
        self._jobs: queue.Queue[_Job[Any] | None] = queue.Queue()
        self._max_queue_size = max_queue_size
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)
        self._thread.start()

    @property
    def depth(self) -> int:
        """How many jobs wait."""
        return self._jobs.qsize()

    def submit(self, work: Callable[[], T], deadline: float | None = None) -> Future[T]:
        """Queue a request's job.

        Args:
            work: what to run on the device thread.
            deadline: ``time.monotonic()`` seconds after which the job is not worth starting.

        Returns:
            Its future. Cancelling it before it starts drops the job.

        Raises:
            Overloaded: too many jobs wait already.
        """
        if self._jobs.qsize() >= self._max_queue_size:
            raise Overloaded(
                "queue",
                given=Literally(f"{self._jobs.qsize()} waiting requests"),
                expected=f"fewer than {self._max_queue_size}",
                fix="Send the request again later, or to another server.",
            )
        return self._put(work, deadline)

    def call(self, work: Callable[[], T]) -> T:
        """Run a job of the server itself, such as loading a model, and wait for it; it is never refused."""
        return self._put(work, None).result()

    def close(self) -> None:
        """Finish the jobs that wait, then stop the thread."""
        self._jobs.put(None)
        self._thread.join()

    def _put(self, work: Callable[[], T], deadline: float | None) -> Future[T]:
        job = _Job(work, Future(), deadline)
        self._jobs.put(job)
        return job.future

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            _execute(job)
            # The loop variable would keep the last request's tensors alive until the next one comes.
            del job


def _execute(job: _Job[T]) -> None:
    if not job.future.set_running_or_notify_cancel():
        return
    if job.deadline is not None and time.monotonic() > job.deadline:
        job.future.set_exception(expired(time.perf_counter_ns() - job.queued_ns))
        return
    try:
        result = job.work()
    except BaseException as error:  # whatever it is, its own request gets it and the thread lives on
        job.future.set_exception(error)
        # The traceback holds this frame, and the frame must not hold the future in turn: until Python's collector came
        # by, such a circle would keep the request's tensors.
        del job
    else:
        job.future.set_result(result)


def expired(waited_ns: int) -> DeadlineExceeded:
    """Return the error of a request whose deadline passed while it waited."""
    return DeadlineExceeded(
        "request",
        given=Literally(f"{waited_ns / 1e6:.1f} ms of waiting"),
        expected="its turn before the deadline",
        fix="Allow more time, send fewer requests at once, or ask a leaner model.",
    )
