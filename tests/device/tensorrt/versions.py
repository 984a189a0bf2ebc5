"""The version that the double stands for, and the rules of classes that pybind11 defines."""

from __future__ import annotations

import os
from typing import Any

VERSION_TEXT = os.environ.get("SOFTWARE_TENSORRT_VERSION", "10.16.2.10")
VERSION = tuple(int(part) for part in VERSION_TEXT.split("."))

#: The first number of an engine's header. NVIDIA raises it with the format, not with every release; 10.3's is known
#: from bug reports (239), the others are only distinct.
SERIALIZATION_VERSION = 239 if VERSION < (10, 4) else 242 if VERSION < (11,) else 250


class Native:
    """Base of the classes that pybind11 defines: no attributes other than those of the class, and no constructor.

    The double makes its objects with :meth:`_make`, as the library makes its own.
    """

    def __init__(self) -> None:
        raise TypeError(f"{type(self).__module__}.{type(self).__name__}: No constructor defined!")

    @classmethod
    def _make(cls, **values: Any) -> Any:
        created = cls.__new__(cls)
        for name, value in values.items():
            object.__setattr__(created, name, value)
        return created

    def __setattr__(self, name: str, value: object) -> None:
        if not name.startswith("_") and not hasattr(type(self), name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        object.__setattr__(self, name, value)


class setting:
    """A property that keeps the value it was given, if pybind11 would convert it to the type of the default."""

    def __init__(self, default: Any, kind: type | tuple[type, ...] | None = None) -> None:
        self.default = default
        self.kind = type(default) if kind is None else kind

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = "_" + name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else instance.__dict__.get(self.name, self.default)

    def __set__(self, instance: Any, value: Any) -> None:
        if not isinstance(value, self.kind):
            raise TypeError(f"incompatible function arguments: {type(value).__name__} for {self.name[1:]}")
        instance.__dict__[self.name] = value


def integer(value: Any) -> int:
    """Convert as pybind11 does for an integer parameter: floats are refused, ``__int__`` is accepted."""
    if isinstance(value, (float, str, bytes)) or not hasattr(value, "__int__"):
        raise TypeError(f"incompatible function arguments: {type(value).__name__}")
    return int(value)


def instance(value: Any, kind: type | tuple[type, ...]) -> Any:
    """Check the class of a parameter as pybind11 does."""
    if not isinstance(value, kind):
        raise TypeError(f"incompatible function arguments: {type(value).__name__}, expected {kind}")
    return value
