"""Images for a packed model: the step that reads them, and golden and calibration images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from edge.bundles.image import ImagePreprocessor
from edge.bundles.steps import ImagePreprocess
from edge.datatypes import Array, TensorSpec
from edge.errors import Raw, UsageError
from export.data.unlabelled import find_images, read_image, read_pixels
from export.importing.image_processor import read_image_processor, sample_images

#: Arrays by the names of inputs.
Arrays = dict[str, Array]


def image_step(
    config: Path, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], model: Path
) -> ImagePreprocess:
    """Return the step of an image processor's JSON for a model with one input of images.

    Raises:
        UsageError: the model has other inputs.
        CheckpointError: the JSON cannot be read, or makes other images than the model reads.
    """
    shape = inputs[0].shape
    channels, size = shape[1:3] if len(shape) == 4 else (0, 0)
    fits = channels in (1, 3) and size >= 1 and shape == (-1, channels, size, size)
    if len(inputs) > 1 or inputs[0].datatype != "FP32" or not fits:
        raise UsageError(
            f"--image for {model}",
            given=Raw(", ".join(f"{spec.name} {spec.datatype} {list(spec.shape)}" for spec in inputs)),
            expected="one FP32 input [-1, 1 or 3, size, size], a batch of images of one size",
            fix="Export the model with a dynamic batch as the only dynamic dimension, or leave --image out.",
        )
    taken = {spec.name for spec in (*inputs, *outputs)}
    file = next(name for name in ("image", "image_file", "encoded_image") if name not in taken)
    return replace(read_image_processor(config, size, channels), input=file, output=inputs[0].name)


def read_images(option: str, directory: Path | None, step: ImagePreprocess) -> tuple[Arrays, Arrays]:
    """Return the images below a directory as files [N, 1] and as pixels [N, C, size, size], by their inputs' names.

    Args:
        option: that names the directory, for errors.
        directory: None for a few artificial images.

    Raises:
        UsageError: there is no such directory.
        DataError: it has fewer than two images, or the step refuses one.
    """
    reader = ImagePreprocessor(step)
    if directory is None:
        files = sample_images(step)
        pixels = [reader.read(file, "image") for file in files]
    elif directory.is_dir():
        paths = find_images(directory)
        files, pixels = [read_image(path) for path in paths], [read_pixels(path, reader) for path in paths]
    else:
        fix = "Give the directory that holds them, or leave --image out."
        expected = "a directory of JPEG and PNG files, because --image is given"
        raise UsageError(option, given=str(directory), expected=expected, fix=fix)
    raw: Array = np.array([[file] for file in files], np.object_)
    return {step.input: raw.astype(np.bytes_)}, {step.output: np.stack(pixels)}
