"""Tensor datatypes of the Open Inference Protocol, with their NumPy and ONNX types."""

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
    **{f"UINT{bits}": np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)},
    **{f"INT{bits}": np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)},
    "FP16": np.dtype(np.float16),
    "FP32": np.dtype(np.float32),
    "FP64": np.dtype(np.float64),
    "BYTES": np.dtype(np.object_),
}

#: NumPy type to protocol name, without BYTES.
DATATYPES = {dtype: name for name, dtype in NUMPY_TYPES.items() if name != "BYTES"}

#: Protocol name to the NumPy type of raw contents, which are little-endian.
WIRE_TYPES = {name: dtype.newbyteorder("<") for name, dtype in NUMPY_TYPES.items()}

#: ONNX Runtime's type strings to protocol names.
ONNX_TYPES: dict[str, str] = {
    **{f"tensor({name.lower()})": name for name in NUMPY_TYPES if name == "BOOL" or "INT" in name},
    "tensor(float16)": "FP16",
    "tensor(float)": "FP32",
    "tensor(double)": "FP64",
    "tensor(string)": "BYTES",
}

TensorName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_.:/-]{0,127}$")]
Dimension = Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)]


class TensorSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Name, datatype and shape of one input or output; the request chooses dimensions of -1."""

    name: TensorName
    datatype: str
    shape: Annotated[tuple[Dimension, ...], msgspec.Meta(min_length=1, max_length=8)]

    def accepts(self, shape: tuple[int, ...]) -> bool:
        """Return whether a shape fits; -1 in the spec accepts any size."""
        return len(shape) == len(self.shape) and all(
            want in (-1, got) for want, got in zip(self.shape, shape, strict=True)
        )


def datatype_of(array: Array) -> str:
    """Return the protocol's name for an array's type; text and byte strings are BYTES. Raise a KeyError for others."""
    if name := DATATYPES.get(array.dtype):
        return name
    return "BYTES" if array.dtype.kind in "SUO" else DATATYPES[array.dtype.newbyteorder("=")]


def byte_size(datatype: str, shape: tuple[int, ...]) -> int:
    """Return the size of a dense tensor in bytes; the product of Python integers cannot overflow."""
    return prod(shape) * NUMPY_TYPES[datatype].itemsize
