"""Memory of the host that the library owns and lends out."""

from __future__ import annotations

from typing import Any

from .enums import DataType


class IHostMemory(bytes):
    """A buffer: ``bytes``, ``memoryview`` and files take it, but it has no length and no elements of its own.

    ``bytes`` is its base because only types written in C offer the buffer protocol before Python 3.12.
    """

    nbytes = property(lambda self: bytes.__len__(self))
    dtype = property(lambda self: DataType.INT8)

    def _refuse(self, *arguments: object) -> Any:
        raise TypeError("'IHostMemory' object is a buffer; take bytes() or memoryview() of it")

    __len__ = __getitem__ = __iter__ = __contains__ = __add__ = _refuse
    __hash__ = object.__hash__
    __repr__ = object.__repr__

    def __eq__(self, other: object) -> bool:
        return self is other

    def __bool__(self) -> bool:
        return True
