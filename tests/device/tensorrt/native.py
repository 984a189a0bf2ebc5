"""The version that the double stands for, the rules of classes that pybind11 defines, the enums, and loggers."""

import enum
import json
import os
from pathlib import Path

import numpy as np

VERSION_TEXT = os.environ.get("SOFTWARE_TENSORRT_VERSION", "10.16.2.10")
VERSION = tuple(int(part) for part in VERSION_TEXT.split("."))

#: The first number of an engine's header. NVIDIA raises it with the format, not with every release; 10.3's is known
#: from bug reports (239), the others are only distinct.
SERIALIZATION_VERSION = 239 if VERSION < (10, 4) else 242 if VERSION < (11,) else 250


class Native:
    """Base of the classes that pybind11 defines: no attributes other than those of the class, and no constructor.

    The double makes its objects with :meth:`_make`, as the library makes its own.
    """

    def __init__(self):
        raise TypeError(f"{type(self).__module__}.{type(self).__name__}: No constructor defined!")

    @classmethod
    def _make(cls, **values):
        created = cls.__new__(cls)
        for name, value in values.items():
            object.__setattr__(created, name, value)
        return created

    def __setattr__(self, name, value):
        if not name.startswith("_") and not hasattr(type(self), name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        object.__setattr__(self, name, value)


class setting:
    """A property that keeps the value it was given, if pybind11 would convert it to the type of the default."""

    def __init__(self, default, kind=None):
        self.default = default
        self.kind = type(default) if kind is None else kind

    def __set_name__(self, owner, name):
        self.name = "_" + name

    def __get__(self, instance, owner=None):
        return self if instance is None else instance.__dict__.get(self.name, self.default)

    def __set__(self, instance, value):
        if not isinstance(value, self.kind):
            raise TypeError(f"incompatible function arguments: {type(value).__name__} for {self.name[1:]}")
        instance.__dict__[self.name] = value


def integer(value):
    """Convert as pybind11 does for an integer parameter: floats are refused, ``__int__`` is accepted."""
    if isinstance(value, (float, str, bytes)) or not hasattr(value, "__int__"):
        raise TypeError(f"incompatible function arguments: {type(value).__name__}")
    return int(value)


def instance(value, kind):
    if not isinstance(value, kind):
        raise TypeError(f"incompatible function arguments: {type(value).__name__}, expected {kind}")
    return value


#: The nearest version whose bindings have wheels.
BINDINGS = "10.5.0" if VERSION < (10, 10) else "10.16.1.11" if VERSION < (11,) else "11.4.0.106"
_MEMBERS = json.loads((Path(__file__).parents[1] / "bindings" / f"{BINDINGS}.json").read_text())["enums"]


class _Enum(enum.Enum):
    """An enum of pybind11: it converts to an integer, but is none."""

    def __int__(self):
        return int(self.value)

    __index__ = __int__

    def __hash__(self):
        return int(self.value)


_BYTES = {"FLOAT": 4, "HALF": 2, "BF16": 2, "INT32": 4, "INT64": 8, "INT4": 0.5, "FP4": 0.5}


def _enum(name):
    return _Enum(name.rpartition(".")[2], _MEMBERS[name])


BuilderFlag, DataType, GatherMode = map(_enum, ("BuilderFlag", "DataType", "GatherMode"))
LayerType, MemoryPoolType, Severity = map(_enum, ("LayerType", "MemoryPoolType", "ILogger.Severity"))
TensorIOMode, TensorLocation = map(_enum, ("TensorIOMode", "TensorLocation"))
ExecutionContextAllocationStrategy = _enum("ExecutionContextAllocationStrategy")
NetworkDefinitionCreationFlag = _enum("NetworkDefinitionCreationFlag")
DataType.itemsize = property(lambda self: _BYTES.get(self.name, 1))
_NUMPY = {"FLOAT": np.float32, "HALF": np.float16, "INT8": np.int8, "INT32": np.int32, "INT64": np.int64}
_NUMPY |= {"BOOL": np.bool_, "UINT8": np.uint8}


def nptype(trt_type):
    return _NUMPY[trt_type.name]


class Dims(Native):
    """The dimensions of a tensor: a sequence that equals the tuple with the same elements."""

    def __init__(self, shape=()):
        self._shape = tuple(int(size) for size in shape)

    def __len__(self):
        return len(self._shape)

    def __getitem__(self, index):
        return self._shape[index]

    def __eq__(self, other):
        return isinstance(other, (Dims, tuple, list)) and tuple(other) == self._shape

    __hash__ = None


class UnknownDims(Dims):
    """What stands for the shape of a tensor where that cannot be inferred: it has -1 dimensions."""

    def __len__(self):
        return -1


class ILogger(Native):
    Severity = Severity
    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = Severity

    def __init__(self):
        object.__setattr__(self, "_constructed", True)

    # pybind11 keeps the attributes of Python subclasses.
    def __setattr__(self, name, value):
        object.__setattr__(self, name, value)

    def log(self, severity, msg):
        raise RuntimeError('Tried to call pure virtual function "nvinfer1::ILogger::log"')


def checked(logger):
    """Return the logger, if its class and its constructor are right."""
    instance(logger, ILogger)
    if not getattr(logger, "_constructed", False):
        raise TypeError("tensorrt.ILogger.__init__() must be called when overriding __init__")
    return logger


class Log:
    """Writes to a logger in the words of TensorRT."""

    def __init__(self, logger):
        self.logger = logger

    def error(self, function, code, kind, reason):
        self.logger.log(Severity.ERROR, f"{function}: Error Code {code}: {kind} ({reason})")

    def usage(self, function, reason):
        self.error(function, 3, "API Usage Error", f"Parameter check failed, {reason}")

    def cuda(self, function, reason):
        self.error(function, 1, "Cuda Runtime", reason)

    def warning(self, message):
        self.logger.log(Severity.WARNING, message)
