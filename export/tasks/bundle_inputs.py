"""What the clients of a classifier send, texts or images: the step that reads it, golden rows and calibration rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from edge.bundles.image import ImagePreprocessor
from edge.bundles.manifest import Profile
from edge.bundles.preprocess import TokenizerPreprocessor
from edge.bundles.steps import ImagePreprocess, TokenizerPreprocess
from edge.datatypes import Array, TensorSpec
from export.data.examples import drawn, limited
from export.data.images import ImageFolder, Images, ImageShape, image_step
from export.data.tokens import load_tokenizer
from export.data.unlabelled import MAX_TEXT_BYTES
from export.finetune.image_tasks import ImageTask
from export.finetune.models import Architecture
from export.finetune.text_tasks import SentenceTask
from export.quantize.calibration import CALIBRATION_ROWS
from export.quantize.ranges import Feeds
from export.training.runs import TOKENIZER

MAX_BATCH_SIZE = 32
GOLDEN_ROWS = 32
PAD_ID = 0
TEXTS = ("text", "text_pair")
IDS, MASK, SEGMENTS = "input_ids", "attention_mask", "token_type_ids"
#: Their names in :attr:`export.data.tokens.Batch.named`.
BATCH_NAMES = {IDS: "inputs", MASK: "mask", SEGMENTS: "segments"}
#: Usual tokens of a text, which runtimes tune for.
USUAL_TOKENS = 32
#: Class names in the description of a bundle, at most.
_NAMED_CLASSES = 12


class BundleInputs(NamedTuple):
    """The inputs of a bundle.

    Attributes:
        files: that the step reads.
        raw: golden rows as clients send them, by the name of the input.
        golden: what the step computes of these.
        calibration: other rows, as the graph reads them, one at a time: padding must not enter the ranges.
        tensors: inputs of the graph, all with the same profile.
        batch_names: of these in :attr:`export.data.tokens.Batch.named`.
        labels: names of the classes; empty for a regression.
    """

    preprocess: TokenizerPreprocess | ImagePreprocess
    files: dict[str, bytes]
    raw: dict[str, Array]
    golden: dict[str, Array]
    calibration: Sequence[Feeds]
    tensors: tuple[TensorSpec, ...]
    batch_names: dict[str, str]
    profile: Profile
    labels: tuple[str, ...]
    description: str


def text_inputs(task: SentenceTask, run: Path, architecture: Architecture, data_dir: str | Path) -> BundleInputs:
    """Return the inputs of a model of texts or of pairs of texts, with the tokenizer of its run."""
    splits, names = task.examples(data_dir), TEXTS[: len(task.texts)]
    every = (splits.train, *splits.measured.values())
    longest = max(len(text.encode()) for examples in every for texts in examples.texts for text in texts)
    config, tokenize, files = text_step(run, names, architecture, max_text_bytes=max(MAX_TEXT_BYTES, longest))
    texts = columns(limited(splits.holdout, GOLDEN_ROWS).texts)
    usual = min(USUAL_TOKENS * len(task.texts), config.max_length)
    return BundleInputs(
        preprocess=config,
        files=files,
        raw={name: column.astype(np.bytes_) for name, column in zip(names, texts, strict=True)},
        golden=tokenize(*texts),
        calibration=[tokenize(*columns([row])) for row in limited(splits.train, CALIBRATION_ROWS).texts],
        tensors=tuple(TensorSpec(tensor, "INT64", (-1, -1)) for tensor in config.graph_inputs),
        batch_names=BATCH_NAMES,
        profile=Profile(min=(1, 1), opt=(1, usual), max=(MAX_BATCH_SIZE, config.max_length)),
        labels=task.class_names,
        description=task.description,
    )


class TextStep(NamedTuple):
    """A preprocess step for texts, the function that it computes, and the files that it reads."""

    config: TokenizerPreprocess
    tokenize: TokenizerPreprocessor
    files: dict[str, bytes]


def text_step(
    run: Path,
    names: Sequence[str],
    architecture: Architecture,
    *,
    max_text_bytes: int = MAX_TEXT_BYTES,
    offsets: str | None = None,
) -> TextStep:
    """Return the step of a run's tokenizer.

    Args:
        names: of the inputs: a text, or the two texts of a pair.
        offsets: name of the characters of each token, if the graph reads them.
    """
    pair = names[1] if len(names) == 2 else None
    config = TokenizerPreprocess(
        input=names[0],
        file=TOKENIZER,
        ids=IDS,
        mask=MASK,
        max_length=architecture.max_length,
        pad_id=PAD_ID,
        max_text_bytes=max_text_bytes,
        pair=pair,
        # The only segment of a single text, or of a model such as RoBERTa, is a constant of the graph.
        segments=SEGMENTS if pair and architecture.transformer.segments > 1 else None,
        offsets=offsets,
    )
    definition = load_tokenizer(run).to_str().encode()
    return TextStep(config, TokenizerPreprocessor(config, definition, str(run / TOKENIZER)), {TOKENIZER: definition})


def image_inputs(task: ImageTask, architecture: Architecture, data_dir: str | Path) -> BundleInputs:
    """Return the inputs of a model of images; golden images are held-out ones, as files."""
    transformer, labels = architecture.transformer, architecture.labels
    shape = ImageShape(transformer.image_size, transformer.channels)
    data = task.prepare(data_dir, shape, max_length=architecture.max_length, limit=None)
    train, holdout = data.train, data.holdout
    assert isinstance(train, Images | ImageFolder)
    assert isinstance(holdout, Images | ImageFolder)
    config = image_step(shape.size, shape.channels)
    files: Array = np.array([[one] for one in holdout.files(drawn(holdout.keys, GOLDEN_ROWS))], np.object_)
    calibration = train.batch(drawn(train.keys, CALIBRATION_ROWS)).inputs.numpy()
    sizes = (shape.channels, shape.size, shape.size)
    classes = ", ".join(labels) if len(labels) <= _NAMED_CLASSES else f"{len(labels)} classes"
    return BundleInputs(
        preprocess=config,
        files={},
        raw={config.input: files.astype(np.bytes_)},
        golden=ImagePreprocessor(config)(files),
        calibration=[{config.output: row[None]} for row in calibration],
        tensors=(TensorSpec(config.output, "FP32", (-1, *sizes)),),
        batch_names={config.output: "inputs"},
        profile=Profile(min=(1, *sizes), opt=(1, *sizes), max=(MAX_BATCH_SIZE, *sizes)),
        labels=labels,
        description=f"{task.name if task.own_data else task.origin}: {classes}",
    )


def columns(rows: Sequence[tuple[str, ...]]) -> list[Array]:
    """Return the first texts of all rows, and of pairs the second ones, as BYTES [rows, 1]."""
    return [np.array([[text.encode()] for text in column], np.object_) for column in zip(*rows, strict=True)]
