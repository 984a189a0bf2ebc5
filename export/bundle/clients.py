"""Texts and images that clients of a classifier send: the step that reads them, and golden and calibration rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from edge.bundles.image import ImagePreprocessor
from edge.bundles.manifest import Profile
from edge.bundles.preprocess import TokenizerPreprocessor
from edge.bundles.steps import ImagePreprocess, TokenizerPreprocess, WindowShape
from edge.datatypes import Array, TensorSpec, datatype_of
from export.data.tokens import load_tokenizer
from export.data.unlabelled import MAX_TEXT_BYTES
from export.finetune.models import Architecture
from export.quantize.ranges import Feeds
from export.training.runs import TOKENIZER

GOLDEN_ROWS = 32
IDS, MASK, SEGMENTS, OFFSETS = "input_ids", "attention_mask", "token_type_ids", "token_offsets"
#: Their names in :attr:`export.data.tokens.Batch.named`, and of the offsets, which a graph reads and returns.
_BATCH_NAMES = {IDS: "inputs", MASK: "mask", SEGMENTS: "segments", OFFSETS: "offsets"}
_PAD_ID = 0
#: Usual tokens of a text, which runtimes tune for.
_USUAL_TOKENS = 32

Texts = Sequence[tuple[str, ...]]


class ClientInputs(NamedTuple):
    """The inputs of a bundle.

    Attributes:
        step: what the server does with what a client sends.
        files: that the step reads.
        raw: golden rows as clients send them, by the name of the input.
        golden: what the step computes of these.
        calibration: other rows, as the graph reads them, one at a time: padding must not enter the ranges.
    """

    step: TokenizerPreprocess | ImagePreprocess
    files: dict[str, bytes]
    raw: dict[str, Array]
    golden: dict[str, Array]
    calibration: Sequence[Feeds]

    @property
    def batch_names(self) -> dict[str, str]:
        """The names of the graph's inputs in :attr:`export.data.tokens.Batch.named`."""
        return {**_BATCH_NAMES, self.step.graph_inputs[0]: "inputs"}


def text_inputs(
    run: Path,
    names: Sequence[str],
    architecture: Architecture,
    golden: Texts,
    calibration: Texts,
    *,
    max_text_bytes: int = MAX_TEXT_BYTES,
    by_token: bool = False,
    windows: WindowShape | None = None,
) -> ClientInputs:
    """Return a text or a pair, by their ``names``, of a run's tokenizer; with ``by_token`` characters of each token.

    With ``windows``, golden and calibration rows are the first windows of their pairs.
    """
    pair = names[1] if len(names) == 2 else None
    step = TokenizerPreprocess(
        input=names[0],
        file=TOKENIZER,
        ids=IDS,
        mask=MASK,
        max_length=architecture.max_length,
        pad_id=_PAD_ID,
        max_text_bytes=max_text_bytes,
        pair=pair,
        # The only segment of a single text, or of a model such as RoBERTa, is a constant of the graph.
        segments=SEGMENTS if pair and architecture.transformer.segments > 1 else None,
        offsets=OFFSETS if by_token else None,
        windows=windows,
    )
    definition = load_tokenizer(run).to_str().encode()
    tokenize = TokenizerPreprocessor(step, definition, str(run / TOKENIZER))
    columns = _columns(golden)
    return ClientInputs(
        step,
        {TOKENIZER: definition},
        {name: column.astype(np.bytes_) for name, column in zip(names, columns, strict=True)},
        tokenize(*columns),
        [tokenize(*_columns([row])) for row in calibration],
    )


def image_inputs(step: ImagePreprocess, golden: Sequence[bytes], calibration: Sequence[Array]) -> ClientInputs:
    """Return the inputs of a model of images, from files for the golden set, and pixels to calibrate with."""
    files: Array = np.array([[file] for file in golden], np.object_)
    feeds = [{step.output: pixels[None]} for pixels in calibration]
    return ClientInputs(step, {}, {step.input: files.astype(np.bytes_)}, ImagePreprocessor(step)(files), feeds)


def specs_of(tensors: Mapping[str, Array], *, by_token: bool) -> tuple[TensorSpec, ...]:
    """Return the specs of golden tensors, whose rows are dynamic, and with ``by_token`` their second dimension, too."""
    dynamic = (-1, -1) if by_token else (-1,)
    return tuple(
        TensorSpec(name, datatype_of(array), (*dynamic, *array.shape[len(dynamic) :]))
        for name, array in tensors.items()
    )


def profiles_of(inputs: ClientInputs, max_batch_size: int) -> dict[str, Profile]:
    """Return the least, usual and largest shape of each input of the graph."""
    step, found = inputs.step, {}
    for name, array in inputs.golden.items():
        if isinstance(step, ImagePreprocess):
            shapes: Sequence[tuple[int, ...]] = ((1,), (1,), (max_batch_size,))
        else:
            usual = min(_USUAL_TOKENS * len(step.inputs), step.max_length)
            shapes = ((1, 1), (1, usual), (max_batch_size, step.max_length))
        least, tuned, largest = ((*shape, *array.shape[len(shape) :]) for shape in shapes)
        found[name] = Profile(min=least, opt=tuned, max=largest)
    return found


def _columns(rows: Texts) -> list[Array]:
    """Return the first texts of all rows, and of pairs the second ones, as BYTES [rows, 1]."""
    return [np.array([[text.encode()] for text in column], np.object_) for column in zip(*rows, strict=True)]
