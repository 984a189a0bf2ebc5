"""Result of an export."""

from __future__ import annotations

import msgspec

#: Runtimes for which a tier of fine-tuned runs has files.
RUNTIMES = ("onnxruntime", "tensorrt")
#: Name of the tier with the full model.
FULL = "x1"


class Exported(msgspec.Struct, frozen=True):
    """A bundle's directory, the largest absolute difference of its ONNX outputs to torch's, and its ONNX bytes."""

    bundle: str
    largest_difference: float
    onnx_bytes: int
