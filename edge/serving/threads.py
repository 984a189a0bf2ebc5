"""Work of milliseconds for single requests, such as decoding images or JSON, on threads beside the event loop."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from edge.errors import Overloaded, Raw
from edge.scheduling.queue import JobQueue

log = logging.getLogger(__name__)

T = TypeVar("T")
#: More would take the cores from the runtime.
_MOST_THREADS: Final = 4


class Threads:
    """Runs work in the order of its arrival; for the event loop in which it is created.

    ``queue`` has the limits that count the requests that wait here, and their bytes, too.
    """

    def __init__(self, queue: JobQueue) -> None:
        self._queue = queue
        self._loop = asyncio.get_running_loop()
        self._threads = ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), _MOST_THREADS), "work")
        self._waiting = self._bytes = 0

    def submit(
        self, size_bytes: int, work: Callable[[], Any], done: Callable[[Any], None], *, accepted: bool = False
    ) -> None:
        """Run work that holds so many bytes; ``done`` gets its result or its error, on the event loop.

        Raises:
            Overloaded: too many requests, or bytes, wait, and this request is not ``accepted`` already.
        """
        if not accepted:
            self._check(size_bytes)
        self._waiting += 1
        self._bytes += size_bytes
        self._threads.submit(self._run, size_bytes, work, done)

    async def run(self, size_bytes: int, work: Callable[[], T], *, accepted: bool = False) -> T:
        """Return the result of work that holds so many bytes; it does not begin after a cancellation of this.

        Raises:
            Overloaded: as in :meth:`submit`.
        """
        outcome: asyncio.Future[T | Exception] = self._loop.create_future()

        def done(end: T | Exception) -> None:
            if not outcome.done():
                outcome.set_result(end)

        self.submit(size_bytes, lambda: None if outcome.cancelled() else work(), done, accepted=accepted)
        end = await outcome
        if isinstance(end, Exception):
            try:
                raise end
            finally:
                del end, outcome, done  # the error's traceback refers to this frame
        return end

    def _check(self, size_bytes: int) -> None:
        queue, cause = self._queue, ""
        waiting, total = self._waiting + len(queue), self._bytes + queue.size_bytes + size_bytes
        if waiting >= queue.max_jobs:
            cause, given, expected = "requests", f"{waiting} waiting requests", f"fewer than {queue.max_jobs}"
        elif total > queue.max_bytes:
            cause, given, expected = "bytes", f"{total} bytes with this request", f"at most {queue.max_bytes}"
        if cause:
            fix = "Send the request again later, or to another server."
            raise Overloaded("queue", given=Raw(given), expected=expected, fix=fix, cause=cause)

    def _run(self, size_bytes: int, work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        try:
            outcome = work()
        except Exception as error:
            outcome = error
        try:
            self._loop.call_soon_threadsafe(self._end, size_bytes, done, outcome)
        except RuntimeError:
            log.debug("work ended after the event loop")
        finally:
            del outcome  # the error's traceback refers to this frame

    def _end(self, size_bytes: int, done: Callable[[Any], None], outcome: Any) -> None:
        self._waiting -= 1
        self._bytes -= size_bytes
        done(outcome)
