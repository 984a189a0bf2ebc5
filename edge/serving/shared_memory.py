"""Tensors in POSIX shared memory: a client on this host registers a region once, and its requests refer to it.

The server copies through the object's file. Were it mapped, a client that shrinks the object would end the server with
SIGBUS, and one that changes an input after its check could make the runtime read unchecked data.
"""

from __future__ import annotations

import errno
import os
import stat
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge.errors import AlreadyThere, InvalidRequest, NotFound, Overloaded, Raw, Unsupported
from edge.pb import inference_pb2 as pb
from edge.serving.request import parameter_kind

#: Where Linux keeps POSIX shared memory objects.
DIRECTORY = Path("/dev/shm")
#: Clients need a few; each costs the server a file descriptor.
MAX_REGIONS = 256
_MAX_NAME_BYTES = 255
#: Semaphores are in the same directory, and so are the objects of Triton's Python backend.
_RESERVED = ("sem.", "triton_python_backend_shm_region")
_REGION, _BYTE_SIZE, _OFFSET = "shared_memory_region", "shared_memory_byte_size", "shared_memory_offset"
_INTEGERS = (int, ("int64_param", "uint64_param"))
_KINDS: dict[str, tuple[type, tuple[str, ...]]] = {
    _REGION: (str, ("string_param",)),
    _BYTE_SIZE: _INTEGERS,
    _OFFSET: _INTEGERS,
}


@dataclass(frozen=True, eq=False)
class Region:
    """A part of a shared memory object. Its file is closed once neither the registry nor a tensor refers to it."""

    name: str
    key: str  # the name of the object
    offset: int  # in the object, in bytes
    byte_size: int
    file: int  # of the object, open
    writable: bool  # whether outputs may be written to it

    def __post_init__(self) -> None:
        weakref.finalize(self, os.close, self.file)


@dataclass(frozen=True)
class TensorRegion:
    """The part of a region that holds one tensor; it keeps an unregistered region open until the request ends."""

    region: Region
    offset: int  # in the region, in bytes
    byte_size: int
    subject: str  # the tensor, in error messages

    def read(self) -> bytes:
        """Return a copy of the tensor's bytes; raise an InvalidRequest if the object has shrunk."""
        data = os.pread(self.region.file, self.byte_size, self.region.offset + self.offset)
        if len(data) < self.byte_size:
            raise self._shrunk(f"{len(data)} bytes in the object")
        return data

    def write(self, data: bytes) -> None:
        """Write a tensor's bytes; raise an InvalidRequest if there is no room for them."""
        if len(data) > self.byte_size:
            given, expected = Raw(f"{self.byte_size} bytes"), f"at least {len(data)}"
            raise self._invalid(given, expected, "Give the output more room.")
        size, start = os.fstat(self.region.file).st_size, self.region.offset + self.offset
        if size < start + len(data):  # a write would make the object grow again
            raise self._shrunk(f"an object of {size} bytes")
        try:
            if os.pwrite(self.region.file, data, start) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise self._invalid(Raw(error), "room for it", "Free memory in /dev/shm.") from None

    def _shrunk(self, given: str) -> InvalidRequest:
        expected = f"{self.byte_size} bytes, as when it was registered"
        return self._invalid(Raw(given), expected, "Register the region again, with the object's present size.")

    def _invalid(self, given: Raw, expected: str, fix: str) -> InvalidRequest:
        subject = f"{self.subject} in shared memory region {self.region.name!r}"
        return InvalidRequest(subject, given=given, expected=expected, fix=fix)


class SharedMemory:
    """The regions that clients have registered. Only the event loop uses it. Its errors are RequestErrors."""

    def __init__(self, max_bytes: int, max_tensor_bytes: int, directory: Path = DIRECTORY) -> None:
        self._max_bytes, self._max_tensor_bytes, self._directory = max_bytes, max_tensor_bytes, directory
        self._regions: dict[str, Region] = {}

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Register a part of a shared memory object, its ``key`` with or without a leading slash, as a region."""
        subject = f"shared memory region {name!r}"
        if not 0 < len(name.encode()) <= _MAX_NAME_BYTES:
            expected = f"1 to {_MAX_NAME_BYTES} bytes"
            raise InvalidRequest("shared memory region name", given=name, expected=expected, fix="Choose another name.")
        if name in self._regions:
            fix = "Unregister it first, or choose another name."
            raise AlreadyThere(subject, given=Raw("a name that is taken"), expected="a new one", fix=fix)
        if not byte_size:
            raise InvalidRequest(subject, given=Raw("0 bytes"), expected="1 or more", fix="Give its size.")
        if len(self._regions) >= MAX_REGIONS:
            given = Raw(f"one more than {MAX_REGIONS} regions")
            raise Overloaded(subject, given=given, expected=f"at most {MAX_REGIONS}", fix="Unregister one.")
        used = sum(region.byte_size for region in self._regions.values())
        if used + byte_size > self._max_bytes:
            given = Raw(f"{byte_size} bytes beside {used}")
            fix = "Unregister a region, or start the server with a larger --max-shared-memory-bytes."
            raise Overloaded(subject, given=given, expected=f"at most {self._max_bytes} in all regions", fix=fix)
        file, writable = self._open(f"{subject} key", key)
        region = Region(name, key, offset, byte_size, file, writable)  # which closes the file
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            given, fix = Raw("something other than a regular file"), "Give the key of a shared memory object."
            raise InvalidRequest(f"{subject} key", given=given, expected="a shared memory object", fix=fix)
        if offset + byte_size > status.st_size:
            given, expected = _part(byte_size, offset), f"at most the object's {status.st_size} bytes"
            fix = "Make the object larger, or register a smaller part."
            raise InvalidRequest(subject, given=given, expected=expected, fix=fix)
        self._regions[name] = region

    def unregister(self, name: str = "") -> None:
        """Remove a region, or all of them without a name; an unknown name is no error, as with Triton.

        Requests in progress keep their regions until they end.
        """
        if name:
            self._regions.pop(name, None)
        else:
            self._regions.clear()

    def regions(self, name: str = "") -> list[Region]:
        """Return a region, or all of them without a name."""
        return [self._region(name)] if name else list(self._regions.values())

    def part(self, name: str, offset: int, byte_size: int, subject: str, *, write: bool) -> TensorRegion:
        """Return the part of a region for one tensor, ``subject``; ``write`` says whether it is an output."""
        region = self._region(name)
        if write and not region.writable:
            given = Raw(f"region {name!r}, which the server may only read")
            fix = "Let the server's user write the object, and register it again."
            raise InvalidRequest(subject, given=given, expected="one that it may write", fix=fix)
        subject_there = f"{subject} in shared memory"
        if offset < 0 or byte_size < 1 or offset + byte_size > region.byte_size:
            expected = f"a part of the {region.byte_size} bytes of region {name!r}"
            fix = "Choose an offset and a size inside the region."
            raise InvalidRequest(subject_there, given=_part(byte_size, offset), expected=expected, fix=fix)
        if byte_size > self._max_tensor_bytes:
            given, expected = Raw(f"{byte_size} bytes"), f"at most {self._max_tensor_bytes}"
            fix = "Split the request, or start the server with a larger --max-message-bytes."
            raise InvalidRequest(subject_there, given=given, expected=expected, fix=fix)
        return TensorRegion(region, offset, byte_size, subject)

    def _region(self, name: str) -> Region:
        if name not in self._regions:
            expected = f"one of: {', '.join(sorted(self._regions)) or 'none at all'}"
            fix = "SystemSharedMemoryStatus lists the regions."
            raise NotFound("shared memory region", given=name, expected=expected, fix=fix)
        return self._regions[name]

    def _open(self, subject: str, key: str) -> tuple[int, bool]:
        """Open an object, and return its file and whether it is writable."""
        base = key.removeprefix("/")
        if not 0 < len(base.encode()) <= _MAX_NAME_BYTES or base in (".", "..") or set(base) & {"/", "\0"}:
            fix = "Give the name that the object was created with."
            raise InvalidRequest(subject, given=key, expected="the name of an object, without a path", fix=fix)
        if base.startswith(_RESERVED):
            expected = f"a key that does not begin with {' or '.join(_RESERVED)}"
            raise InvalidRequest(subject, given=key, expected=expected, fix="Choose another key.")
        path = os.fsencode(self._directory) + b"/" + base.encode()
        # A link could lead out of the directory, and opening a pipe would wait for its other end.
        flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            try:
                return os.open(path, os.O_RDWR | flags), True
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EROFS):
                    raise
                return os.open(path, os.O_RDONLY | flags), False  # enough for inputs
        except OSError as error:
            kind = NotFound if error.errno == errno.ENOENT else InvalidRequest
            given, expected = Raw(f"{base!r}: {error.strerror}"), f"an object in {self._directory} of this host"
            fix = "Create the object first, and let the server's user open it."
            raise kind(subject, given=given, expected=expected, fix=fix) from None


def is_shared(parameters: Mapping[str, Any]) -> bool:
    """Return whether the parameters of a tensor refer to shared memory."""
    return bool(parameters) and any(name in parameters for name in _KINDS)  # most tensors have no parameters


def tensor_region(
    parameters: Mapping[str, Any], shared_memory: SharedMemory | None, subject: str, *, write: bool
) -> TensorRegion:
    """Return the part of a region that the parameters of a tensor refer to."""
    if shared_memory is None:
        raise no_shared_memory(subject)
    values: dict[str, Any] = {_OFFSET: 0}
    for name, (kind, fields) in _KINDS.items():
        value = parameters.get(name)
        if type(value) is kind:
            values[name] = value
        elif name in parameters or name != _OFFSET:
            given, expected = Raw(f"{name} as {parameter_kind(value) or 'nothing'}"), " or ".join(fields)
            fix = f"Send {_REGION} and {_BYTE_SIZE}, and {_OFFSET} unless it is 0."
            raise InvalidRequest(f"{subject} in shared memory", given=given, expected=expected, fix=fix)
    return shared_memory.part(values[_REGION], values[_OFFSET], values[_BYTE_SIZE], subject, write=write)


def describe(tensor: pb.ModelInferResponse.InferOutputTensor, part: TensorRegion, byte_size: int) -> None:
    """Add the region, the offset and the size of an output in shared memory to its parameters."""
    tensor.parameters[_REGION].string_param = part.region.name
    tensor.parameters[_BYTE_SIZE].int64_param = byte_size
    if part.offset:
        tensor.parameters[_OFFSET].int64_param = part.offset


def no_shared_memory(subject: str) -> Unsupported:
    """Return the error for shared memory on a server that does not allow it."""
    expected = "none, because the server runs without --allow-shared-memory"
    fix = "Send the tensor in the message, or start the server with that option."
    return Unsupported(subject, given=Raw("shared memory"), expected=expected, fix=fix)


def _part(byte_size: int, offset: int) -> Raw:
    return Raw(f"{byte_size} bytes from {offset} on")
