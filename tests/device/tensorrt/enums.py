"""The enums of TensorRT, with the members and values that the bindings of the chosen version have."""

from __future__ import annotations

import enum
import json
from pathlib import Path
from typing import Any

import numpy as np

from .versions import VERSION, Native

#: The nearest version whose bindings have wheels.
BINDINGS = "10.5.0" if VERSION < (10, 10) else "10.16.1.11" if VERSION < (11,) else "11.4.0.106"
_MEMBERS = json.loads((Path(__file__).parents[1] / "bindings" / f"{BINDINGS}.json").read_text())["enums"]


class _Enum(enum.Enum):
    """An enum of pybind11: it converts to an integer, but is none."""

    def __int__(self) -> int:
        return int(self.value)

    __index__ = __int__

    def __hash__(self) -> int:
        return int(self.value)


_BYTES = {"FLOAT": 4, "HALF": 2, "BF16": 2, "INT32": 4, "INT64": 8, "INT4": 0.5, "FP4": 0.5}


def _enum(name: str) -> Any:
    return _Enum(name.rpartition(".")[2], _MEMBERS[name])  # type: ignore[call-overload]


BuilderFlag = _enum("BuilderFlag")
DataType = _enum("DataType")
DataType.itemsize = property(lambda self: _BYTES.get(self.name, 1))
ExecutionContextAllocationStrategy = _enum("ExecutionContextAllocationStrategy")
GatherMode = _enum("GatherMode")
LayerType = _enum("LayerType")
MemoryPoolType = _enum("MemoryPoolType")
NetworkDefinitionCreationFlag = _enum("NetworkDefinitionCreationFlag")
Severity = _enum("ILogger.Severity")
TensorIOMode = _enum("TensorIOMode")
TensorLocation = _enum("TensorLocation")

_NUMPY = {
    "FLOAT": np.float32,
    "HALF": np.float16,
    "INT8": np.int8,
    "INT32": np.int32,
    "INT64": np.int64,
    "BOOL": np.bool_,
    "UINT8": np.uint8,
}


def nptype(trt_type: Any) -> Any:
    """Return the NumPy type of a data type."""
    return _NUMPY[trt_type.name]


class Dims(Native):
    """The dimensions of a tensor: a sequence that equals the tuple with the same elements."""

    def __init__(self, shape: Any = ()) -> None:
        self._shape = tuple(int(size) for size in shape)

    def __len__(self) -> int:
        return len(self._shape)

    def __getitem__(self, index: Any) -> Any:
        return self._shape[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (Dims, tuple, list)) and tuple(other) == self._shape

    __hash__ = None  # type: ignore[assignment]


class UnknownDims(Dims):
    """What stands for the shape of a tensor where that cannot be inferred: it has -1 dimensions."""

    def __len__(self) -> int:
        return -1
