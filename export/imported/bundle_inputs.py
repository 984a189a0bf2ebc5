"""What the clients of an imported model send: the step that reads it, golden rows and calibration rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from edge.bundles.image import ImagePreprocessor
from edge.bundles.steps import ImagePreprocess, TokenizerPreprocess
from edge.datatypes import Array
from export.bundle.accuracy import BY_TOKEN
from export.bundle.clients import BATCH_NAMES, GOLDEN_ROWS, TEXTS, columns, text_step
from export.data.examples import Examples, limited, split_holdout
from export.data.unlabelled import read_image, read_pixels, sample_texts
from export.finetune.imported import ImportedTask
from export.importing.image_processor import sample_images
from export.quantize.calibration import CALIBRATION_ROWS
from export.quantize.ranges import Feeds

#: The characters of each token, which the graph reads and returns.
OFFSETS_READ = "token_offsets"
#: Images are large.
_GOLDEN_IMAGES, _CALIBRATION_IMAGES = 8, 64


class ImportedInputs(NamedTuple):
    """Preprocess step, what a client sends and what the graph reads in the golden set, and other rows one by one."""

    step: TokenizerPreprocess | ImagePreprocess
    raw: dict[str, Array]
    golden: dict[str, Array]
    calibration: Sequence[Feeds]
    files: dict[str, bytes]

    @property
    def batch_names(self) -> dict[str, str]:
        """The names of the graph's inputs in :attr:`export.data.tokens.Batch.named`, and of the offsets."""
        return {**BATCH_NAMES, OFFSETS_READ: "offsets", self.step.graph_inputs[0]: "inputs"}


def text_inputs(task: ImportedTask, run: Path, data: Path | None) -> ImportedInputs:
    """Return the inputs of a model of texts, from a file of them or from some of ours."""
    description = task.description
    names = (("question", "context") if description.task == "question-answering" else TEXTS)[: 1 + description.pair]
    config, tokenize, files = text_step(
        run, names, description, offsets=OFFSETS_READ if isinstance(task.original, BY_TOKEN) else None
    )
    if data is None:
        texts = sample_texts(description.pair)
        items = Examples(texts, np.zeros(len(texts), np.int64))
    else:
        items = task.items(data)
    first, others = _split(items, GOLDEN_ROWS, CALIBRATION_ROWS)
    golden, calibration = columns(first), [tokenize(*columns([row])) for row in others]
    raw = {name: column.astype(np.bytes_) for name, column in zip(names, golden, strict=True)}
    return ImportedInputs(config, raw, tokenize(*golden), calibration, files)


def _split(items: Examples, golden: int, calibration: int) -> tuple[tuple[tuple[str, ...], ...], ...]:
    """Return items for the golden set, of the hold-out where it has enough, and others for calibration."""
    train, holdout = split_holdout(items)
    first = limited(holdout if len(holdout.texts) >= golden else items, golden)
    # All items are held out together where they have the same first text.
    return first.texts, limited(train if train.texts else items, calibration).texts


def image_inputs(task: ImportedTask, data: Path | None) -> ImportedInputs:
    """Return the inputs of a model of images, from a directory of them or from some of ours."""
    step = task.description.image
    assert step is not None
    reader = ImagePreprocessor(step)
    if data is None:
        files = sample_images(step)
        golden = calibration = [reader.read(file, "image") for file in files]
    else:
        first, others = _split(task.items(data), _GOLDEN_IMAGES, _CALIBRATION_IMAGES)
        files = [read_image(data / name) for (name,) in first]
        golden, calibration = ([read_pixels(data / name, reader) for (name,) in part] for part in (first, others))
    raw: Array = np.array([[file] for file in files], np.object_)
    feeds = [{step.output: pixels[None]} for pixels in calibration]
    return ImportedInputs(step, {step.input: raw.astype(np.bytes_)}, {step.output: np.stack(golden)}, feeds, {})
