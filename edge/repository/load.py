"""One load of a bundle, on a thread of its own."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from typing import TypeVar

from edge.bundles.bundle import Bundle
from edge.errors import FewheadsError
from edge.repository.entry import Entry
from edge.runtimes.build_child import stopped

T = TypeVar("T")

#: Name of the threads that load. One whose load never ends is still there when the server has ended.
LOAD_THREAD = "load"
#: Time in which a load ends once it is not wanted; a build needs it to end its process.
_STOP_SECONDS = 2.0


class Load:
    """A load of a bundle into an entry; one ``for_requests`` does not begin if none waits for it any more."""

    def __init__(self, entry: Entry, bundle: Bundle, *, for_requests: bool) -> None:
        self.entry, self.bundle, self.for_requests = entry, bundle, for_requests
        self.task: asyncio.Task[FewheadsError | None] | None = None
        self.unwanted = threading.Event()  # set, it ends a build
        self._stopped_at = math.inf
        self._began = time.monotonic()  # infinite while it reports what it waits for, such as a build

    def stop(self) -> None:
        """Let it end soon, without a model if that is not loaded yet."""
        self._stopped_at = min(self._stopped_at, time.monotonic())
        self.unwanted.set()

    def check_wanted(self) -> None:
        """Raise a LoadFailed after :meth:`stop`."""
        if self.unwanted.is_set():
            raise stopped(f"load of bundle {self.bundle.path}")

    def building(self, progress: str) -> None:
        """Note what it waits for, which does not count in the time that it takes, or that it goes on."""
        self._began = math.inf if progress else time.monotonic()

    def is_late(self, seconds: float) -> bool:
        """Return whether it takes longer than so many seconds, or to stop."""
        return time.monotonic() > min(self._began + seconds, self._stopped_at + _STOP_SECONDS)


async def on_thread(work: Callable[[], T]) -> T:
    """Await work as ``asyncio.to_thread`` does, on a thread for which the end of the process does not wait."""
    future: Future[T] = Future()

    def run() -> None:
        future.set_running_or_notify_cancel()
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=copy_context().run, args=(run,), name=LOAD_THREAD, daemon=True).start()
    return await asyncio.wrap_future(future)
