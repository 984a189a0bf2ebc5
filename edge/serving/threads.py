"""Work of milliseconds for single requests, such as decoding images or JSON, on threads beside the event loop."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

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

    def submit(
        self, size_bytes: int, work: Callable[[], Any], done: Callable[[Any], None], *, accepted: bool = False
    ) -> None:
        """Run work that holds so many bytes; ``done`` gets its result or its error, on the event loop.

        Raise an Overloaded if too many requests, or bytes, wait, and this request is not ``accepted`` already.
        """
        if not accepted and (full := self._queue.full(size_bytes)):
            raise self._queue.refusal(full, size_bytes)
        self._queue.hold(size_bytes)
        self._threads.submit(self._run, size_bytes, work, done)

    async def run(self, size_bytes: int, work: Callable[[], T], *, accepted: bool = False) -> T:
        """Return the result of work, as :meth:`submit`; it does not begin after a cancellation of this."""
        gone = threading.Event()

        def start(done: Callable[[Any], None]) -> None:
            self.submit(size_bytes, lambda: None if gone.is_set() else work(), done, accepted=accepted)

        result: T = await outcome_of(start, lambda _: gone.set())
        return result

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
        self._queue.release(size_bytes)
        done(outcome)
