"""Tensors in POSIX shared memory: a client of this host names a region once, and requests point into it.

Regions are read and written through their file, not mapped: who shrank a mapped object would end the server by SIGBUS,
and who changed an input after it was checked could make the runtime read what was never checked. What is read is a
copy, which costs no more than the one that every raw tensor of a message is.
"""

from __future__ import annotations

import errno
import os
import stat
import weakref
from pathlib import Path

from edge.errors import AlreadyThere, InvalidRequest, Literally, NotFound, Overloaded

#: Where Linux keeps POSIX shared memory objects.
DIRECTORY = Path("/dev/shm")
#: A client needs a few; each costs the server a file descriptor.
MAX_REGIONS = 256
_MAX_NAME_BYTES = 255
#: Semaphores live in the same directory, and Triton's Python backend keeps its own objects there.
_RESERVED = ("sem.", "triton_python_backend_shm_region")
_REGISTER_FIX = "Register the region again, as large as the object is."


class Region:
    """A part of a shared memory object. Its file is closed when nobody holds it any more.

    Attributes:
        name: what requests call it.
        key: the name of the object.
        offset: where in the object it begins, in bytes.
        byte_size: its size.
        writable: whether outputs may go there.
    """

    def __init__(self, name: str, key: str, offset: int, byte_size: int, *, file: int, writable: bool) -> None:
        self.name = name
        self.key = key
        self.offset = offset
        self.byte_size = byte_size
        self.writable = writable
        self._file = file
        weakref.finalize(self, os.close, file)

    def read(self, offset: int, byte_size: int) -> bytearray:
        """Return a copy of a part; fewer bytes where the object has shrunk since."""
        data = bytearray(byte_size)
        done = 0
        while done < byte_size:
            count = os.preadv(self._file, [memoryview(data)[done:]], self.offset + offset + done)
            if not count:
                return data[:done]
            done += count
        return data

    def write(self, offset: int, data: bytes) -> None:
        """Write into a part.

        Raises:
            OSError: the machine has no memory for it.
        """
        done = 0
        while done < len(data):
            done += os.pwrite(self._file, memoryview(data)[done:], self.offset + offset + done)

    def object_bytes(self) -> int:
        """Return how large the object is now."""
        return os.fstat(self._file).st_size


class Window:
    """The part of a region that holds one tensor of a request or response.

    Args:
        region: which one; the window holds it, so an unregistered region lives until its last request has ended.
        offset: where in it, in bytes.
        byte_size: how large the part is.
        subject: how errors call the tensor.
    """

    def __init__(self, region: Region, offset: int, byte_size: int, subject: str) -> None:
        self.region = region
        self.offset = offset
        self.byte_size = byte_size
        self._subject = f"{subject} in shared memory region {region.name!r}"

    def read(self) -> bytearray:
        """Return a copy of the tensor's bytes.

        Raises:
            InvalidRequest: the object has become too small.
        """
        data = self.region.read(self.offset, self.byte_size)
        if len(data) != self.byte_size:
            raise self._shrunk(f"{len(data)} bytes that are there")
        return data

    def write(self, data: bytes) -> None:
        """Write a tensor's bytes.

        Raises:
            InvalidRequest: they do not fit, or the object has become too small, or cannot be written.
        """
        if len(data) > self.byte_size:
            given, expected = Literally(f"{self.byte_size} bytes"), f"at least {len(data)}"
            raise InvalidRequest(self._subject, given=given, expected=expected, fix="Give the output more room.")
        # Writing would make a shrunk object grow again.
        if self.region.object_bytes() < self.region.offset + self.offset + len(data):
            raise self._shrunk(f"an object of {self.region.object_bytes()} bytes")
        try:
            self.region.write(self.offset, data)
        except OSError as error:
            fix = "Make room in /dev/shm."
            raise InvalidRequest(self._subject, given=Literally(error), expected="room for it", fix=fix) from None

    def _shrunk(self, given: str) -> InvalidRequest:
        expected = f"{self.byte_size} bytes, as when it was registered"
        return InvalidRequest(self._subject, given=Literally(given), expected=expected, fix=_REGISTER_FIX)


class SharedMemory:
    """The regions that clients have registered. Used by the event loop alone.

    Args:
        max_bytes: how large all regions may be together.
        max_tensor_bytes: how large the part of one tensor may be.
        directory: where the objects are.
    """

    def __init__(self, max_bytes: int, max_tensor_bytes: int, directory: Path = DIRECTORY) -> None:
        self._max_bytes = max_bytes
        self._max_tensor_bytes = max_tensor_bytes
        self._directory = directory
        self._regions: dict[str, Region] = {}

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Make a part of a shared memory object known under a name.

        Args:
            name: for requests.
            key: the object's name, with or without its leading slash.
            offset: in bytes; it need not be a multiple of anything.
            byte_size: in bytes.

        Raises:
            InvalidRequest: a name that is none or is reserved, an object that is none, or a part that it does not have.
            NotFound: there is no such object.
            AlreadyThere: the name is taken; as with Triton, the old region has to be unregistered first.
            Overloaded: too many regions, or too large ones.
        """
        subject = f"shared memory region {name!r}"
        if not 0 < len(name.encode()) <= _MAX_NAME_BYTES:
            expected = f"1 to {_MAX_NAME_BYTES} bytes"
            raise InvalidRequest("shared memory region name", given=name, expected=expected, fix="Choose another name.")
        if name in self._regions:
            fix = "Unregister it first, or choose another name."
            raise AlreadyThere(subject, given=Literally("a name that is taken"), expected="a new one", fix=fix)
        if not byte_size:
            raise InvalidRequest(subject, given=Literally("0 bytes"), expected="1 or more", fix="Give its size.")
        self._check_room(subject, byte_size)
        file, writable = self._open(subject, key)
        try:
            size = _regular_size(file)
            if size is None:
                fix = "Give the key of a shared memory object."
                given = Literally("something that is no regular file")
                raise InvalidRequest(f"{subject} key", given=given, expected="a shared memory object", fix=fix)
            if offset + byte_size > size:
                given = Literally(f"{byte_size} bytes from {offset} on")
                fix = "Make the object larger, or register less of it."
                raise InvalidRequest(subject, given=given, expected=f"at most the object's {size} bytes", fix=fix)
        except BaseException:
            os.close(file)
            raise
        self._regions[name] = Region(name, key, offset, byte_size, file=file, writable=writable)

    def unregister(self, name: str = "") -> None:
        """Forget a region, or all of them if the name is empty; an unknown one is no error, as with Triton.

        Requests on their way keep what they hold until they end.
        """
        if name:
            self._regions.pop(name, None)
        else:
            self._regions.clear()

    def regions(self, name: str = "") -> list[Region]:
        """Return a region, or all of them if the name is empty.

        Raises:
            NotFound: there is none of that name.
        """
        return [self._region(name)] if name else list(self._regions.values())

    def window(self, name: str, offset: int, byte_size: int, subject: str, *, write: bool = False) -> Window:
        """Return a part of a region for one tensor.

        Args:
            name: of the region.
            offset: in it, in bytes.
            byte_size: of the part.
            subject: how errors call the tensor.
            write: whether it is an output.

        Raises:
            NotFound: there is no such region.
            InvalidRequest: the part is not inside it, larger than a tensor may be, or not to be written.
        """
        region = self._region(name)
        if write and not region.writable:
            given = Literally(f"region {name!r}, which the server may only read")
            fix = "Let the server's user write the object, and register it again."
            raise InvalidRequest(subject, given=given, expected="one that it may write", fix=fix)
        if offset < 0 or byte_size < 1 or offset + byte_size > region.byte_size:
            given = Literally(f"{byte_size} bytes from {offset} on")
            expected = f"a part of the {region.byte_size} bytes of region {name!r}"
            raise InvalidRequest(f"{subject} in shared memory", given=given, expected=expected, fix="Stay inside it.")
        if byte_size > self._max_tensor_bytes:
            given = Literally(f"{byte_size} bytes")
            fix = "Split the request, or start the server with a larger --max-message-bytes."
            expected = f"at most {self._max_tensor_bytes}"
            raise InvalidRequest(f"{subject} in shared memory", given=given, expected=expected, fix=fix)
        return Window(region, offset, byte_size, subject)

    def _region(self, name: str) -> Region:
        if name not in self._regions:
            expected = f"one of: {', '.join(sorted(self._regions)) or 'none at all'}"
            fix = "SystemSharedMemoryStatus lists the regions."
            raise NotFound("shared memory region", given=name, expected=expected, fix=fix)
        return self._regions[name]

    def _check_room(self, subject: str, byte_size: int) -> None:
        used = sum(region.byte_size for region in self._regions.values())
        if len(self._regions) >= MAX_REGIONS:
            given = Literally(f"one more than {MAX_REGIONS} regions")
            raise Overloaded(subject, given=given, expected=f"at most {MAX_REGIONS}", fix="Unregister one.")
        if used + byte_size > self._max_bytes:
            given = Literally(f"{byte_size} bytes beside {used}")
            fix = "Unregister a region, or start the server with a larger --max-shared-memory-bytes."
            raise Overloaded(subject, given=given, expected=f"at most {self._max_bytes} in all regions", fix=fix)

    def _open(self, subject: str, key: str) -> tuple[int, bool]:
        """Open an object and say whether it may be written."""
        subject = f"{subject} key"
        base = key.removeprefix("/")
        if not 0 < len(base.encode()) <= _MAX_NAME_BYTES or base in (".", "..") or set(base) & {"/", "\0"}:
            fix = "Give the name that the object was made with."
            raise InvalidRequest(subject, given=key, expected="the name of an object, without a path", fix=fix)
        if base.startswith(_RESERVED):
            expected = f"a key that does not begin with {' or '.join(_RESERVED)}"
            raise InvalidRequest(subject, given=key, expected=expected, fix="Choose another key.")
        for access in (os.O_RDWR, os.O_RDONLY):
            try:
                # A link could lead out of the directory, and a pipe would wait for its other end.
                file = os.open(
                    os.fsencode(self._directory) + b"/" + base.encode(),
                    access | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC,
                )
            except OSError as error:
                if error.errno in (errno.EACCES, errno.EROFS) and access == os.O_RDWR:
                    continue  # inputs can be read from it still
                kind = NotFound if error.errno == errno.ENOENT else InvalidRequest
                fix = "Make the object first, where the server's user may open it."
                expected = f"an object in {self._directory} of this host"
                raise kind(
                    subject, given=Literally(f"{base!r}: {error.strerror}"), expected=expected, fix=fix
                ) from None
            return file, access == os.O_RDWR
        raise AssertionError("the loop has returned or raised")


def _regular_size(file: int) -> int | None:
    """Return the size of an open regular file; None if it is anything else."""
    status = os.fstat(file)
    return status.st_size if stat.S_ISREG(status.st_mode) else None
