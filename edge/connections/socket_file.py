"""The file of a Unix socket: who may connect, what it replaces, and its removal."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, TypeVar

from edge.errors import Raw, UsageError

T = TypeVar("T")

#: Its owner and its group may connect, which takes the permission to write.
_UMASK: Final = 0o117
#: The longest path that Linux takes, without the zero byte behind it.
_MAX_PATH_BYTES: Final = 107
#: What connecting to a file ends with that its server has left behind, or removed a moment ago.
_STALE: Final = (errno.ECONNREFUSED, errno.ENOENT)
#: The limit for waiting for another server; it makes its socket within milliseconds.
_TURN_SECONDS: Final = 1.0


class SocketFile:
    """The file of a server's Unix socket, to which only its owner and its group may connect.

    Args:
        option: names the path in errors.
    """

    def __init__(self, option: str, path: Path) -> None:
        self._option, self._path = option, path.absolute()
        self._made: int | None = None  # refers to the file, so that no other one gets its inode

    def make(self, bind: Callable[[Path], T]) -> T:
        """Return what ``bind`` returns, which makes the file at an absolute path; a stale socket there goes first.

        A UsageError says that another server listens there, the file is no socket, or none can be made. Call it while
        no other thread creates files: for its duration, the process creates them for owner and group alone.
        """
        with _turn(self._path.parent):
            return self._make(bind)

    def remove(self) -> None:
        """Remove the file, unless another server has replaced it. A second call has no effect."""
        if self._made is None:
            return
        with suppress(OSError):
            if os.path.samestat(os.fstat(self._made), self._path.lstat()):
                self._path.unlink()
        os.close(self._made)
        self._made = None

    def _make(self, bind: Callable[[Path], T]) -> T:
        mask = os.umask(_UMASK)
        try:
            self.check()
            self._path.unlink(missing_ok=True)
            made = bind(self._path)
            self._made = os.open(self._path, os.O_PATH | os.O_NOFOLLOW)
        except (OSError, RuntimeError) as error:  # RuntimeError is gRPC's
            fix = "Give a path in a directory that the server's user may write."
            raise self._wrong(str(error).splitlines()[0], "a path for a Unix socket", fix) from None
        finally:
            os.umask(mask)
        return made

    def check(self) -> None:
        """Raise a UsageError as :meth:`make` if no server can listen there now."""
        size = len(os.fsencode(self._path))
        if size > _MAX_PATH_BYTES:
            raise self._wrong(f"{size} bytes", f"a path of at most {_MAX_PATH_BYTES} bytes", "Give a shorter one.")
        if not os.access(self._path.parent, os.W_OK | os.X_OK):
            given = "a directory that cannot be written" if self._path.parent.is_dir() else "no such directory"
            raise self._wrong(given, "a directory that the server's user may write", "Make it, or give another path.")
        try:
            mode = self._path.lstat().st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(mode):
            fix = "Give another path, or remove what is there."
            raise self._wrong("a file that is no socket", "a socket, or a path without a file", fix)
        with socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)  # a server may have no room for another connection
            if probe.connect_ex(os.fsencode(self._path)) not in _STALE:
                fix = "Stop that server, or give another path."
                raise self._wrong("the socket of another server", "a path where none listens", fix)

    def _wrong(self, given: str, expected: str, fix: str) -> UsageError:
        return UsageError(f"{self._option} {self._path}", given=Raw(given), expected=expected, fix=fix)


@contextmanager
def _turn(directory: Path) -> Iterator[None]:
    """Wait while another server makes a socket: two could each take the other's, which does not listen yet, for stale.

    The wait has an end, because whoever may read the directory can lock it, too.
    """
    try:
        locked = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:  # not there, or only writable
        yield
        return
    try:
        end = time.monotonic() + _TURN_SECONDS
        while time.monotonic() < end:
            with suppress(BlockingIOError):
                fcntl.flock(locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(0.01)
        yield
    finally:
        os.close(locked)
