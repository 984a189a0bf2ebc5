"""Files that are read again when they change; the previous value stays in force while the new files are invalid."""

from __future__ import annotations

import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from edge.errors import FewheadsError, Raw, UsageError

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Time until files with a problem are read again although they have not changed.
_AGAIN_SECONDS = 5.0
_LOG = "See the server's log."


def read_limited(subject: str, path: Path, max_bytes: int, fix: str) -> tuple[bytes | None, os.stat_result]:
    """Return the contents and status of a file; no contents if it is not regular or larger than ``max_bytes``.

    Raise a UsageError if the file, ``subject``, cannot be opened.
    """
    try:
        # Without O_NONBLOCK, opening a pipe would wait for a writer.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                return None, status
            data = file.read(max_bytes + 1)  # it may grow after its size was read
            return data if len(data) <= max_bytes else None, status
    except OSError as error:
        raise UsageError(subject, given=Raw(error.strerror), expected="a readable file", fix=fix) from None


class Watched(Generic[T]):
    """The current contents of some files, for any thread; invalid files at the start raise the error of ``read``.

    When the files become invalid, the previous value stays, and the error is logged once and is in :attr:`problem`.
    They are read again when they change, and from time to time in case that the error was not theirs.

    Args:
        subject: names the files in the log.
        read: reads and checks all of them.
        check_seconds: minimum time between two checks for a change.
    """

    def __init__(self, subject: str, paths: Sequence[Path], read: Callable[[], T], check_seconds: float) -> None:
        self._subject = subject
        self._paths = tuple(paths)
        self._read, self._check_seconds = read, check_seconds
        self._lock = threading.Lock()
        self._problem = ""
        self._again_at = 0.0
        # Taken before reading, so that a change during the read is noticed.
        self._stamps = [_stamp(path) for path in self._paths]
        self._value = read()
        self._checked = time.monotonic()

    @property
    def value(self) -> T:
        """The contents of the files when they were last valid."""
        # Only one thread checks; the others use the previous value meanwhile.
        if time.monotonic() - self._checked >= self._check_seconds and self._lock.acquire(blocking=False):
            try:
                self._check()
            finally:
                self._lock.release()
        return self._value

    @property
    def problem(self) -> str:
        """Why the current files are not in force; empty if they are."""
        _ = self.value
        return self._problem

    def _check(self) -> None:
        self._checked = time.monotonic()
        stamps = [_stamp(path) for path in self._paths]
        if stamps == self._stamps and not (self._problem and self._checked >= self._again_at):
            return
        self._stamps, self._again_at = stamps, self._checked + _AGAIN_SECONDS
        before = self._problem
        try:
            self._value = self._read()
            self._problem = ""
        except Exception as error:  # whatever it is, connections and calls go on with the previous value
            known = isinstance(error, FewheadsError)
            given = Raw(type(error).__name__)
            reason = error if known else UsageError(self._subject, given=given, expected="files to read", fix=_LOG)
            self._problem = f"{reason} The previous version stays in force."
            if self._problem != before:
                log.error("%s: %s", self._subject, self._problem, exc_info=None if known else error)
        else:
            log.info("%s: read again", self._subject)


def _stamp(path: Path) -> tuple[int, ...] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    # ctime changes with mode and owner, for which a file may have been refused.
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino
