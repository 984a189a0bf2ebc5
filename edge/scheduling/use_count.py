"""Reference count that can be awaited, so that a model is closed only after its last user has left."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future


class UseCount:
    """Counts the users of a model until its use is ended. Thread-safe.

    A user calls :meth:`take` and later :meth:`give_back`, on any threads. To close the model, call :meth:`end`, await
    :meth:`wait_unused`, and then close it on the thread that owns it.
    """

    def __init__(self) -> None:
        self.users = 0
        self._lock = threading.Lock()
        self._ended = False
        self._unused: Future[None] = Future()
        # A running future cannot be cancelled, so a waiter that is cancelled leaves the other waiters alone.
        self._unused.set_running_or_notify_cancel()

    def take(self) -> bool:
        """Become a user. Returns False, and counts no user, after :meth:`end`."""
        with self._lock:
            if self._ended:
                return False
            self.users += 1
            return True

    def give_back(self) -> None:
        """Stop being a user."""
        with self._lock:
            self.users -= 1
            unused = self._ended and not self.users
        if unused:
            self._unused.set_result(None)

    def end(self) -> None:
        """Reject further users. Calling it again changes nothing."""
        with self._lock:
            unused = not self._ended and not self.users
            self._ended = True
        if unused:
            self._unused.set_result(None)

    async def wait_unused(self) -> None:
        """Wait until :meth:`end` has been called and the last user has left."""
        await asyncio.wrap_future(self._unused)
