"""Who still uses a thing that is to be closed: a model may be replaced while its last requests are on their way."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Lease:
    """Counts users, and says when the last of them has gone after the end was asked for. Thread-safe.

    Args:
        close: what frees the thing. Nothing here calls it: it may have to run on a thread of its own.
    """

    def __init__(self, close: Callable[[], None]) -> None:
        self.close = close
        self._lock = threading.Lock()
        self._users = 0
        self._ending = False

    @property
    def users(self) -> int:
        """How many use it now."""
        return self._users

    def take(self) -> bool:
        """Become a user; False when the end was asked for already."""
        with self._lock:
            if self._ending:
                return False
            self._users += 1
            return True

    def give_back(self) -> bool:
        """Stop being a user; True when that was the last one of an ended lease, and :attr:`close` is due."""
        with self._lock:
            self._users -= 1
            return self._ending and not self._users

    def end(self) -> bool:
        """Let nobody in any more; True when nobody is inside and :attr:`close` is due. A second end is no end."""
        with self._lock:
            first, self._ending = not self._ending, True
            return first and not self._users
