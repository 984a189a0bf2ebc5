"""What an export tells, whatever it exported."""

from __future__ import annotations

import msgspec

#: Of every bundle that is exported: nothing here counts how often a model was.
VERSION = 1


class Exported(msgspec.Struct, frozen=True):
    """A bundle that was written.

    Attributes:
        bundle: where it stands.
        largest_difference: of its ONNX files' outputs to torch's, absolute.
        onnx_bytes: of these files together.
    """

    bundle: str
    largest_difference: float
    onnx_bytes: int
