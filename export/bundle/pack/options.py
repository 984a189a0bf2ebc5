"""Options of ``fewheads pack``, and those that a Hugging Face directory adds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace as replaced

from edge.errors import Raw, UsageError
from export.bundle.pack.profiles import Shapes
from export.bundle.pack.texts import POOLINGS, read_directory
from export.training.runs import TOKENIZER

if TYPE_CHECKING:
    from export.bundle.pack.nodes import Pooling

#: Options with files that are read.
READ = ("inputs", "calibration", "image", "labels")


class PackOptions(msgspec.Struct, frozen=True):
    """Options of a bundle of an ONNX file, by the names and with the help of the command's.

    Attributes:
        shapes: of each input with a dynamic dimension other than the batch.
        labelled: the output of ``labels``, which only Triton's configurations name; None for the only one that fits.
    """

    max_batch_size: int | None = None
    shapes: Shapes = msgspec.field(default_factory=dict)
    inputs: Path | None = None
    image: Path | None = None
    labels: Path | None = None
    labelled: str | None = None
    detect: str | None = None
    threshold: float | None = None
    top_k: int | None = None
    tokenizer: Path | None = None
    pooling: Pooling | None = None
    normalize: bool = False
    max_length: int | None = None
    fp16: bool = False
    int8: bool = False
    calibration: Path | None = None

    def absent(self, *names: str) -> list[str]:
        """Return those of some options that are not given, as on the command line."""
        return [f"--{name}" for name in names if getattr(self, name) is None]

    def check(self) -> None:
        """Raise a UsageError for an option without another one that it needs, or beside one that excludes it."""
        if self.calibration and not self.int8:
            fix = "Add --int8, or leave --calibration out."
            raise UsageError("--calibration", given=str(self.calibration), expected="--int8 with it", fix=fix)
        of_texts = {"--pooling": self.pooling, "--normalize": self.normalize or None, "--max-length": self.max_length}
        of_boxes = {"--threshold": self.threshold, "--top-k": self.top_k}
        for other, example, is_given, those in (
            ("--tokenizer", "--tokenizer DIR", self.tokenizer, of_texts),
            ("--detect", "--detect FAMILY", self.detect, of_boxes),
            ("--image", "--image JSON", self.image, {"--detect": self.detect}),
        ):
            for option, value in those.items():
                if value is not None and not is_given:
                    fix = f"Add {example}, or leave {option} out."
                    raise UsageError(option, given=value, expected=f"{other} with it", fix=fix)
        if self.tokenizer and (self.image or self.max_batch_size == 0):
            other = "--image" if self.image else "--max-batch-size 0"
            fix = "Leave one of them out."
            raise UsageError("--tokenizer", given=Raw(f"{other} beside it"), expected="a batch of texts", fix=fix)


def in_directory(directory: Path, options: PackOptions) -> tuple[Path, PackOptions]:
    """Return the ONNX file of a Hugging Face directory, and options with its tokenizer, pooling and normalisation."""
    path, embedder = read_directory(directory)
    place = embedder.transformer if embedder else directory
    if options.tokenizer is None and (place / TOKENIZER).is_file():
        options = replaced(options, tokenizer=place)
    if embedder:
        options = replaced(
            options,
            pooling=options.pooling or POOLINGS[embedder.pooling],
            normalize=options.normalize or embedder.embedding.normalised,
            max_length=options.max_length or embedder.max_length,
        )
    return path, options
