"""Preprocessing that takes milliseconds, as that of images does, on threads beside the event loop."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from edge.errors import Literally, Overloaded
from edge.scheduling.queue import JobQueue
from edge.serving.call import Call
from edge.serving.forms import Preprocess

#: More would take the cores from the runtime.
_MOST_THREADS: Final = 4


class PreprocessThreads:
    """Computes the inputs of calls before they are queued, in the order of their arrival; for one event loop.

    Args:
        queue: its limit for requests counts those that wait here, too.
        done: receives each call on a thread, with its inputs or its error, or unchanged if it was cancelled or late.
    """

    def __init__(self, queue: JobQueue, done: Callable[[Call], None]) -> None:
        self._queue, self._done = queue, done
        self._threads = ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), _MOST_THREADS), "preprocess")
        self._calls = 0

    def submit(self, call: Call, preprocess: Preprocess) -> None:
        """Compute the inputs of a call; raise an Overloaded if too many requests wait."""
        waiting = self._calls + len(self._queue)
        if waiting >= self._queue.max_jobs:
            given, expected = Literally(f"{waiting} waiting requests"), f"fewer than {self._queue.max_jobs}"
            fix = "Send the request again later, or to another server."
            raise Overloaded("queue", given=given, expected=expected, fix=fix, cause="requests")
        self._calls += 1
        self._threads.submit(self._compute, call, preprocess)

    def left(self) -> None:
        """Count a call that has been passed to ``done``."""
        self._calls -= 1

    def _compute(self, call: Call, preprocess: Preprocess) -> None:
        try:
            if not call.leaves(time.monotonic()):
                call.inputs = {**call.inputs, **preprocess()}
        except Exception as error:
            call.error = error
        finally:
            self._done(call)
