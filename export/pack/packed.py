"""What ``fewheads pack`` reports: the bundle, and each of its files."""

from __future__ import annotations

import msgspec

from edge.bundles.manifest import Artifact
from export.bundle.pack.variants import Variant


class PackedFile(msgspec.Struct, frozen=True):
    """One ONNX file of the bundle.

    Attributes:
        runtime: that reads it: ``any``, ``onnxruntime`` or ``tensorrt``.
        rms_error: largest RMS error of an output against the golden outputs, as a share of their spread; None for the
            given file, which made them, and where no output is a floating-point number.
        largest_error: as ``rms_error``, the largest absolute error.
    """

    tier: str
    file: str
    runtime: str
    precision: str
    size_bytes: int
    rms_error: float | None = None
    largest_error: float | None = None


class Packed(msgspec.Struct, frozen=True):
    """A bundle that was written from an ONNX file.

    Attributes:
        max_batch_size: most rows of a run; 0 without a batch dimension.
        golden: source of the golden inputs.
        only_onnxruntime: why TensorRT cannot run the model; empty if no known reason forbids it.
        calibration_items: inputs that set the scales of INT8; None without INT8.
    """

    bundle: str
    max_batch_size: int
    golden: str
    golden_rows: int
    only_onnxruntime: str
    files: list[PackedFile]
    calibration_items: int | None = None


def packed_file(tier: str, artifact: Artifact, data: bytes, variant: Variant | None = None) -> PackedFile:
    """Return the record of a file; without a variant, of the given one."""
    errors = variant.errors if variant else []
    return PackedFile(
        tier,
        artifact.file,
        artifact.runtime,
        artifact.precision,
        len(data),
        max((error.rms for error in errors), default=None),
        max((error.largest for error in errors), default=None),
    )
