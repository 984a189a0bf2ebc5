"""Work of milliseconds for single requests, such as decoding images or JSON, on threads beside the event loop."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from edge.errors import Overloaded, Raw
from edge.scheduling.queue import JobQueue
from edge.serving.call import outcome_of

log = logging.getLogger(__name__)

T = TypeVar("T")
#: More would take the cores from the runtime.
_MOST_THREADS: Final = 4


class Threads:
    """Runs work in the order of its arrival, within the limits of the queue; for the event loop that creates it."""

    def __init__(self, queue: JobQueue) -> None:
        self._queue = queue
        self._loop = asyncio.get_running_loop()
        self._threads = ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), _MOST_THREADS), "work")
        self._waiting = self._bytes = 0

    def submit(
        self, size_bytes: int, work: Callable[[], Any], done: Callable[[Any], None], *, accepted: bool = False
    ) -> None:
        """Run work that holds so many bytes; ``done`` gets its result or its error, on the event loop.

        Raise an Overloaded if too many requests, or bytes, wait, and this request is not ``accepted`` already.
        """
        self.enter(size_bytes, accepted=accepted)
        self._threads.submit(self._run, size_bytes, work, done)

    async def run(self, size_bytes: int, work: Callable[[], T], *, accepted: bool = False) -> T:
        """Return the result of work, as :meth:`submit`; it does not begin after a cancellation of this."""
        gone = threading.Event()

        def start(done: Callable[[Any], None]) -> None:
            self.submit(size_bytes, lambda: None if gone.is_set() else work(), done, accepted=accepted)

        result: T = await outcome_of(start, lambda _: gone.set())
        return result

    def enter(self, size_bytes: int, *, accepted: bool = False) -> None:
        """Count a request that waits elsewhere than in the queue, until :meth:`leave`; raise as :meth:`submit`."""
        if not accepted:
            self._check(size_bytes)
        self._waiting += 1
        self._bytes += size_bytes

    def leave(self, size_bytes: int) -> None:
        """Count a request no longer that has entered."""
        self._waiting -= 1
        self._bytes -= size_bytes

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
        except BaseException as error:  # a panic of a library in Rust, which must not leave the request without an end
            log.exception("work on a thread ended with %s", type(error).__name__)
            outcome = RuntimeError(f"{type(error).__name__} in work on a thread")
        try:
            self._loop.call_soon_threadsafe(self._end, size_bytes, done, outcome)
        except RuntimeError:
            log.debug("work ended after the event loop")
        finally:
            del outcome  # the error's traceback refers to this frame

    def _end(self, size_bytes: int, done: Callable[[Any], None], outcome: Any) -> None:
        self.leave(size_bytes)
        done(outcome)
