"""The tensor datatypes of the Open Inference Protocol, and what NumPy and ONNX call them."""

from __future__ import annotations

from math import prod
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

#: Protocol name to NumPy type. BYTES is an array of Python ``bytes``. BF16 has no NumPy type and is not served.
NUMPY_TYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype(np.uint8),
    "UINT16": np.dtype(np.uint16),
    "UINT32": np.dtype(np.uint32),
    "UINT64": np.dtype(np.uint64),
    "INT8": np.dtype(np.int8),
    "INT16": np.dtype(np.int16),
    "INT32": np.dtype(np.int32),
    "INT64": np.dtype(np.int64),
    "FP16": np.dtype(np.float16),
    "FP32": np.dtype(np.float32),
    "FP64": np.dtype(np.float64),
    "BYTES": np.dtype(np.object_),
}

#: NumPy type to protocol name, but for text.
DATATYPES = {dtype: name for name, dtype in NUMPY_TYPES.items() if name != "BYTES"}

#: The same as raw contents hold them: little-endian.
WIRE_TYPES = {name: dtype.newbyteorder("<") for name, dtype in NUMPY_TYPES.items()}

#: ONNX Runtime's type strings to protocol names.
ONNX_TYPES: dict[str, str] = {
    "tensor(bool)": "BOOL",
    "tensor(uint8)": "UINT8",
    "tensor(uint16)": "UINT16",
    "tensor(uint32)": "UINT32",
    "tensor(uint64)": "UINT64",
    "tensor(int8)": "INT8",
    "tensor(int16)": "INT16",
    "tensor(int32)": "INT32",
    "tensor(int64)": "INT64",
    "tensor(float16)": "FP16",
    "tensor(float)": "FP32",
    "tensor(double)": "FP64",
    "tensor(string)": "BYTES",
}

TensorName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_.:/-]{0,127}$")]
Dimension = Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)]


class TensorSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Name, datatype and shape of one input or output; -1 is a dimension that a request chooses."""

    name: TensorName
    datatype: str
    shape: Annotated[tuple[Dimension, ...], msgspec.Meta(min_length=1, max_length=8)]

    def accepts(self, shape: tuple[int, ...]) -> bool:
        """Say whether a tensor of ``shape`` fits, -1 standing for any size."""
        return len(shape) == len(self.shape) and all(
            want in (-1, got) for want, got in zip(self.shape, shape, strict=True)
        )


def datatype_of(array: Array) -> str:
    """Return the protocol's name for an array's type; text and byte strings are BYTES.

    Raises:
        KeyError: the type has no protocol name.
    """
    name = DATATYPES.get(array.dtype)
    if name:
        return name
    return "BYTES" if array.dtype.kind in "SUO" else DATATYPES[array.dtype.newbyteorder("=")]


def byte_size(datatype: str, shape: tuple[int, ...]) -> int:
    """Return the bytes of a dense tensor. Python integers, so no shape can overflow it."""
    return prod(shape) * NUMPY_TYPES[datatype].itemsize
