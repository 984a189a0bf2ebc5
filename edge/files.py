"""Verified reads and atomic writes of files and directories."""

from __future__ import annotations

import errno
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

from edge.errors import BundleError, Raw, UsageError

#: Bytes that are hashed at a time.
_PART_BYTES = 1024**2
COPY_AGAIN = "Copy the bundle again from where it was exported, or export it again."


def sha256(data: bytes) -> str:
    """Return the SHA-256 of ``data`` as 64 hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def read_regular(path: Path, max_bytes: int) -> bytes:
    """Return the contents of a file; raise a BundleError if it is missing, a link or a device, or too large."""
    with _opened(path) as (descriptor, size_bytes):
        if size_bytes > max_bytes:
            raise _wrong(f"file {path}", f"{size_bytes} bytes", f"at most {max_bytes} bytes")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(max_bytes)


def check_size(path: Path, size_bytes: int) -> None:
    """Raise a BundleError if a file is not regular or has another size; nothing is read."""
    with _opened(path) as (_, actual):
        if actual != size_bytes:
            raise _wrong(f"file {path}", f"{actual} bytes", f"{size_bytes} bytes")


def read_recorded(path: Path, size_bytes: int, digest: str) -> bytes:
    """Return the contents of a file; raise a BundleError if it is missing, not regular, or differs from the record."""
    check_size(path, size_bytes)
    data = read_regular(path, size_bytes)
    if (actual := sha256(data)) != digest:
        raise _wrong(f"file {path} sha256", actual, digest)
    return data


def check_recorded(path: Path, size_bytes: int, digest: str) -> None:
    """Raise a BundleError as :func:`read_recorded`, in little memory however large the file is."""
    check_size(path, size_bytes)
    hashed = hashlib.sha256()
    with _opened(path) as (descriptor, _), open(descriptor, "rb", closefd=False) as file:
        while part := file.read(_PART_BYTES):
            hashed.update(part)
    if (actual := hashed.hexdigest()) != digest:
        raise _wrong(f"file {path} sha256", actual, digest)


@contextmanager
def _opened(path: Path) -> Iterator[tuple[int, int]]:
    try:
        # O_NONBLOCK: opening a FIFO must fail below, not hang here.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        what = "a symbolic link" if path.is_symlink() else str(error.strerror)
        raise _wrong(f"file {path}", what, "a regular file") from None
    try:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode):
            raise _wrong(f"file {path}", "no regular file", "a regular file")
        yield descriptor, info.st_size
    finally:
        os.close(descriptor)


def _wrong(subject: str, given: str, expected: str) -> BundleError:
    return BundleError(subject, given=Raw(given), expected=expected, fix=COPY_AGAIN)


def write_durably(path: Path, data: bytes, mode: str = "xb") -> None:
    """Write a file and wait until it is on the disk. ``mode`` is ``xb`` for a new file, ``wb`` to overwrite."""
    with open(path, mode) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_whole(path: Path, data: bytes) -> None:
    """Write or replace a file atomically: readers see the earlier file until the new one is complete on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.new")
    write_durably(scratch, data, "wb")
    scratch.replace(path)


def check_parent(option: str, path: Path) -> None:
    """Raise a UsageError if there is no directory for a result."""
    if not path.parent.is_dir():
        given = Raw(f"{path.parent}, which is not a directory")
        raise UsageError(option, given=given, expected="an existing directory", fix="Make it.")


def write_result(path: Path, data: bytes) -> None:
    """Write a file for the user as :func:`write_whole`; raise a UsageError if it cannot be written."""
    try:
        write_whole(path, data)
    except OSError as error:
        given, fix = Raw(error.strerror), "Choose another place."
        raise UsageError(f"{path}", given=given, expected="a file to write", fix=fix) from None


def reserve(path: Path, size_bytes: int) -> None:
    """Raise an OSError if the disk has no room for ``size_bytes`` in a temporary file at ``path``."""
    with open(path, "xb") as file:
        os.posix_fallocate(file.fileno(), 0, size_bytes)
    path.unlink()


@contextmanager
def replaced_directory(directory: Path) -> Iterator[Path]:
    """Yield an empty directory that replaces ``directory`` atomically when the block succeeds.

    Of several at once, that of the last one to end stays. If the block raises, ``directory`` stays as it was and
    nothing is left beside it. A killed process leaves a directory that :func:`remove_abandoned` removes. Write the
    files in it with :func:`write_durably`.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    scratch, lock = _scratch(directory)
    new, old = scratch / "new", scratch / "old"
    try:
        new.mkdir()
        yield new
        _sync_directory(new)
        while new.exists():
            shutil.rmtree(old, ignore_errors=True)
            with suppress(FileNotFoundError):
                directory.rename(old)
            try:
                new.rename(directory)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise  # else another process has put its own there in between
        _sync_directory(directory.parent)
    finally:
        if new.exists() and old.exists() and not directory.exists():
            old.rename(directory)
        shutil.rmtree(scratch, ignore_errors=True)
        os.close(lock)


def remove_abandoned(parent: Path, prefix: str) -> None:
    """Remove the temporary directories that killed processes left in ``parent``; those of live processes stay.

    ``prefix`` is a regular expression for the names of the directories given to :func:`replaced_directory`.
    """
    pattern = re.compile(rf"\.{prefix}\.\w+")
    for path in parent.iterdir() if parent.is_dir() else ():
        if not pattern.fullmatch(path.name):
            continue
        with suppress(OSError):  # it is gone, or its process lives
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


def _scratch(directory: Path) -> tuple[Path, int]:
    while True:
        # A sibling, so that the rename stays on one file system; servers ignore names that start with a dot.
        scratch = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
        try:
            lock = os.open(scratch, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:  # remove_abandoned of another process removed it before it was locked
            continue
        with suppress(OSError):  # without locks, as on some network file systems, remove_abandoned removes nothing
            fcntl.flock(lock, fcntl.LOCK_EX)
        if scratch.exists():
            return scratch, lock
        os.close(lock)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
