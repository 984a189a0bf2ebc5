"""Files that are read again when they change, while what they held before stays in force until the new is right."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from edge.errors import FewheadsError

log = logging.getLogger(__name__)

T = TypeVar("T")

_Stamp = tuple[tuple[int, int, int, int] | None, ...]


class Watched(Generic[T]):
    """What some files hold now. Safe to use from any thread.

    A new state that is wrong leaves the old value; the log says so once, and :attr:`problem` for as long as it lasts.

    Args:
        what: how the log calls it.
        paths: the files; links are followed, so that a link may be turned to another file.
        read: reads and checks all of them, and raises a :class:`FewheadsError` if one is wrong.
        look_seconds: how long a look at the files holds.

    Raises:
        FewheadsError: as ``read``; there is no old value at the start.
    """

    def __init__(self, what: str, paths: Sequence[Path], read: Callable[[], T], look_seconds: float = 1.0) -> None:
        self._what = what
        self._paths = tuple(paths)
        self._read = read
        self._look_seconds = look_seconds
        self._lock = threading.Lock()
        self._problem = ""
        # Before the files are read: what changes meanwhile is read again.
        self._stamp = self._stamps()
        self._value = read()
        self._looked = time.monotonic()

    @property
    def value(self) -> T:
        """What the files hold, or held when they were last right."""
        if time.monotonic() - self._looked >= self._look_seconds:
            self._look()
        return self._value

    @property
    def problem(self) -> str:
        """Why the files are not in force as they are now; empty when they are."""
        _ = self.value
        return self._problem

    def _look(self) -> None:
        if not self._lock.acquire(blocking=False):
            return  # another thread is looking, and the old value is good until it has seen
        try:
            self._looked = time.monotonic()
            stamp = self._stamps()
            if stamp == self._stamp:
                return
            self._stamp = stamp
            try:
                self._value = self._read()
            except FewheadsError as error:
                self._problem = f"{error} What was read before stays in force."
                log.error("%s: %s", self._what, self._problem)
            else:
                self._problem = ""
                log.info("%s: read again", self._what)
        finally:
            self._lock.release()

    def _stamps(self) -> _Stamp:
        return tuple(_stamp(path) for path in self._paths)


def _stamp(path: Path) -> tuple[int, int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    # The time of the last change of mode and owner too: what was refused for them may be right now.
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino
