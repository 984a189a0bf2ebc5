"""Result of an export."""

from __future__ import annotations

import msgspec

#: Runtimes whose files a tier of fine-tuned runs has.
RUNTIMES = ("onnxruntime", "tensorrt")


#: Name of the tier that is the full model.
FULL = "x1"


class Exported(msgspec.Struct, frozen=True):
    """A bundle that was written.

    Attributes:
        bundle: path of its directory.
        largest_difference: between the outputs of its ONNX files and torch's, absolute.
        onnx_bytes: size of these files together.
    """

    bundle: str
    largest_difference: float
    onnx_bytes: int
