"""Options of ``fewheads pack``."""

from __future__ import annotations

from pathlib import Path

import msgspec

from export.bundle.pack.profiles import Shapes


class PackOptions(msgspec.Struct, frozen=True):
    """Options of a bundle of an ONNX file.

    Attributes:
        max_batch_size: most rows of a run; 0 without a batch dimension; None takes it from the graph.
        shapes: of each input with a dynamic dimension other than the batch.
        inputs: an ``.npz`` with golden inputs; None for random ones.
        image: an image processor's JSON, for a model that clients send JPEG and PNG files; ``inputs`` and
            ``calibration`` are then directories of images.
        labels: a file with the label of each logit in a line.
        fp16: whether TensorRT gets a file in FP16.
        int8: whether there is a tier in INT8.
        calibration: an ``.npz`` with inputs that calibrate INT8; None for the golden inputs.
    """

    max_batch_size: int | None = None
    shapes: Shapes = msgspec.field(default_factory=dict)
    inputs: Path | None = None
    image: Path | None = None
    labels: Path | None = None
    fp16: bool = False
    int8: bool = False
    calibration: Path | None = None

    def absent(self, *names: str) -> list[str]:
        """Return those of some options that are not given, as on the command line."""
        return [f"--{name}" for name in names if getattr(self, name) is None]
