"""Files that must be right: read only when regular and as recorded, written whole or not at all."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from edge.errors import BundleError, Literally

_FIX = "Copy the bundle again from where it was exported, or export it again."


def sha256(data: bytes) -> str:
    """Return the SHA-256 of ``data`` as 64 hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def read_regular(path: Path, max_bytes: int) -> bytes:
    """Return the contents of a regular file of at most ``max_bytes``; links and devices are refused.

    Raises:
        BundleError: it is missing, not regular, or too large.
    """
    with _opened(path) as (descriptor, size_bytes):
        if size_bytes > max_bytes:
            given = Literally(f"{size_bytes} bytes")
            raise BundleError(f"file {path}", given=given, expected=f"at most {max_bytes} bytes", fix=_FIX)
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(max_bytes)


def check_size(path: Path, size_bytes: int) -> None:
    """Check that a file is regular and as large as recorded, without reading it.

    Raises:
        BundleError: it is not.
    """
    with _opened(path) as (_, found):
        if found != size_bytes:
            raise BundleError(
                f"file {path}", given=Literally(f"{found} bytes"), expected=f"{size_bytes} bytes", fix=_FIX
            )


@contextmanager
def _opened(path: Path) -> Iterator[tuple[int, int]]:
    """Give the descriptor and the size of a regular file."""
    try:
        # O_NONBLOCK: opening a FIFO must fail below, not hang here.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        what = "a symbolic link" if path.is_symlink() else error.strerror
        raise BundleError(f"file {path}", given=Literally(what), expected="a regular file", fix=_FIX) from None
    try:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode):
            raise BundleError(f"file {path}", given=Literally("no regular file"), expected="a regular file", fix=_FIX)
        yield descriptor, info.st_size
    finally:
        os.close(descriptor)


def read_recorded(path: Path, size_bytes: int, digest: str) -> bytes:
    """Return the contents of a regular file whose size and SHA-256 are those recorded.

    Raises:
        BundleError: as :func:`read_regular`, or the file is another one.
    """
    check_size(path, size_bytes)
    data = read_regular(path, size_bytes)
    found = sha256(data)
    if found != digest:
        raise BundleError(f"file {path} sha256", given=found, expected=digest, fix=_FIX)
    return data


def write_durably(path: Path, data: bytes) -> None:
    """Write a new file and wait until the disk has it."""
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_whole(path: Path, data: bytes) -> None:
    """Write a file, or replace an earlier one, which stays until the new one is whole on the disk.

    Raises:
        OSError: the disk refuses.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.new")
    with open(scratch, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)


def reserve(path: Path, size_bytes: int) -> None:
    """Make sure that the disk has room, with a file at ``path`` that is removed again.

    Raises:
        OSError: it has not.
    """
    with open(path, "xb") as file:
        os.posix_fallocate(file.fileno(), 0, size_bytes)
    path.unlink()


@contextmanager
def replaced_directory(directory: Path) -> Iterator[Path]:
    """Give an empty directory to fill, which takes the place of ``directory`` when the block ends well.

    When the block raises, what stood at ``directory`` stands there still, and nothing is left beside it. A process that
    is killed leaves a directory that :func:`remove_abandoned` removes. Files in it are to be written with
    :func:`write_durably`.

    Raises:
        OSError: the place cannot be written, or the disk is full.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    scratch, held = _scratch(directory)
    new, old = scratch / "new", scratch / "old"
    try:
        new.mkdir()
        yield new
        _sync_directory(new)
        if directory.exists():
            directory.rename(old)
        new.rename(directory)
        _sync_directory(directory.parent)
    finally:
        if old.exists() and not directory.exists():
            old.rename(directory)
        shutil.rmtree(scratch, ignore_errors=True)
        os.close(held)


def remove_abandoned(parent: Path, prefix: str) -> None:
    """Remove what killed processes left of :func:`replaced_directory`; the directories of live ones stay.

    Args:
        parent: the directory to look in.
        prefix: a regular expression for the names of the directories that were to be replaced.
    """
    pattern = re.compile(rf"\.{prefix}\.\w+")
    for path in parent.iterdir() if parent.is_dir() else ():
        if not pattern.fullmatch(path.name):
            continue
        with suppress(OSError):  # it has gone, or its process lives
            held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(held)


def _scratch(directory: Path) -> tuple[Path, int]:
    """Return a new directory beside ``directory``, and a descriptor that locks it while this process lives."""
    while True:
        # A sibling, so that the rename stays on one file system; the dot keeps servers from looking into it.
        scratch = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
        try:
            held = os.open(scratch, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:  # another process took it for abandoned before it was locked
            continue
        with suppress(OSError):  # some network file systems have no locks, and remove_abandoned removes nothing there
            fcntl.flock(held, fcntl.LOCK_EX)
        if scratch.exists():
            return scratch, held
        os.close(held)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
