"""The steps of a packed model that reads images, or classifies: by an image processor, and by a file of labels."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from edge.bundles.fields import MOST_CHARACTERS
from edge.bundles.image import ImagePreprocessor
from edge.bundles.steps import MOST_LABELS, ImagePreprocess, LabelPostprocess
from edge.datatypes import Array, TensorSpec
from edge.errors import Raw, UsageError
from export.data.unlabelled import find_images, read_image, read_pixels

#: Arrays by the names of inputs.
Arrays = dict[str, Array]


def pixels_step(
    config: Path, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], model: Path
) -> ImagePreprocess:
    """Return the step of an image processor's JSON for a model with one input, of images; else a UsageError."""
    from export.importing.image_processor import read_image_processor  # it imports torch, which no help needs

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
    (file,) = unused([["image"], ["image_file"], ["encoded_image"]], taken, f"--image for {model}")
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
    from export.importing.image_processor import sample_images

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


def unused(choices: Sequence[Sequence[str]], taken: set[str], subject: str) -> Sequence[str]:
    """Return the first choice of names that are not taken; raise a UsageError about ``subject`` if there is none."""
    for names in choices:
        if taken.isdisjoint(names):
            return names
    given = Raw(", ".join(sorted(taken.intersection(chain(*choices)))))
    raise UsageError(
        subject,
        given=given,
        expected=f"a graph without all of these names: {' or '.join(', '.join(names) for names in choices)}",
        fix="Export the model with other names of its inputs and outputs.",
    )


LABELS_FIX = "Write the label of each column in a line of its own, in the order of the columns."


def label_step(path: Path, outputs: Sequence[TensorSpec], model: Path, labelled: str | None = None) -> LabelPostprocess:
    """Return the step that names the largest logit of the one FP32 output with a column for each line of a file.

    Args:
        labelled: name of that output; None for any.
    """
    subject = f"--labels {path}"
    labels = read_labels(path, subject, least=2)
    shapes = {
        spec.name: list(spec.shape) for spec in outputs if spec.datatype == "FP32" and labelled in (None, spec.name)
    }
    fitting = [name for name, shape in shapes.items() if shape == [-1, len(labels)]]
    if len(fitting) != 1:
        given = Raw(f"{len(labels)} lines")
        expected = f"as many as one of the FP32 outputs of {model} has columns, {shapes}"
        raise UsageError(subject, given=given, expected=expected, fix=LABELS_FIX)
    taken = {spec.name for spec in outputs}
    (name,) = unused([["label"], ["predicted_label"]], taken, subject)
    return LabelPostprocess(logits=fitting[0], output=name, labels=labels)


def read_labels(path: Path, subject: str, *, least: int) -> tuple[str, ...]:
    """Return the lines of a file; raise a UsageError about ``subject`` for fewer than ``least``, or other text."""
    lines_expected = f"{least} to {MOST_LABELS} lines of UTF-8"
    try:
        # Excel and Notepad begin UTF-8 with a byte order mark. splitlines would also split at U+2028 and U+0085.
        lines = path.read_bytes().decode("utf-8-sig").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        given = Raw(error.strerror if isinstance(error, OSError) else error)
        raise UsageError(subject, given=given, expected=lines_expected, fix=LABELS_FIX) from None
    labels = [line.rstrip("\r") for line in lines]
    for number, label in enumerate(labels, 1):
        if not label.strip() or len(label) > MOST_CHARACTERS:
            expected = f"a label of 1 to {MOST_CHARACTERS} characters, not only spaces"
            raise UsageError(f"{subject} line {number}", given=label, expected=expected, fix=LABELS_FIX)
    if not least <= len(labels) <= MOST_LABELS:
        raise UsageError(subject, given=Raw(f"{len(labels)} lines"), expected=lines_expected, fix=LABELS_FIX)
    return tuple(labels)
