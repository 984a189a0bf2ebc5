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
        queue: its limits count the requests that wait here, and their bytes, too.
        done: receives each call on a thread, with its inputs or its error, or unchanged if it was cancelled or late.
    """

    def __init__(self, queue: JobQueue, done: Callable[[Call], None]) -> None:
        self._queue, self._done = queue, done
        self._threads = ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), _MOST_THREADS), "preprocess")
        self._calls = self._bytes = 0

    def submit(self, call: Call, preprocess: Preprocess) -> None:
        """Compute the inputs of a call; raise an Overloaded if too many requests, or bytes, wait."""
        queue, cause = self._queue, ""
        waiting, size_bytes = self._calls + len(queue), self._bytes + queue.size_bytes + call.size_bytes
        if waiting >= queue.max_jobs:
            cause, given, expected = "requests", f"{waiting} waiting requests", f"fewer than {queue.max_jobs}"
        elif size_bytes > queue.max_bytes:
            cause, given, expected = "bytes", f"{size_bytes} bytes with this request", f"at most {queue.max_bytes}"
        if cause:
            fix = "Send the request again later, or to another server."
            raise Overloaded("queue", given=Literally(given), expected=expected, fix=fix, cause=cause)
        self._calls += 1
        self._bytes += call.size_bytes
        self._threads.submit(self._compute, call, preprocess)

    def left(self, call: Call) -> None:
        """Stop counting a call that has been passed to ``done``."""
        self._calls -= 1
        self._bytes -= call.size_bytes

    def _compute(self, call: Call, preprocess: Preprocess) -> None:
        try:
            if not call.leaves(time.monotonic()):
                call.inputs = {**call.inputs, **preprocess()}
        except Exception as error:
            call.error = error
        finally:
            self._done(call)
