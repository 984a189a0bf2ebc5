"""Result of an export."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from edge.bundles.bundle import Bundle

#: Runtimes for which a tier of fine-tuned runs has files.
RUNTIMES = ("onnxruntime", "tensorrt")
#: Name of the tier with the full model.
FULL = "x1"


def int8_tier(name: str) -> str:
    """Return the name of the tier in INT8 beside a tier."""
    return f"{name}-int8"


class Exported(msgspec.Struct, frozen=True):
    """A bundle's directory, the largest absolute difference of its ONNX outputs to torch's, and its ONNX bytes."""

    bundle: str
    largest_difference: float
    onnx_bytes: int

    @classmethod
    def of(cls, bundle: Bundle, largest_difference: float) -> Exported:
        """Return the result of an export from the bundle that it has written."""
        files = bundle.manifest.files.items()
        onnx_bytes = sum(record.size_bytes for name, record in files if name.endswith(".onnx"))
        return cls(str(bundle.path), largest_difference, onnx_bytes)
