"""Texts to rows of tokens, and rows to batches with little padding."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, count, islice
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from edge.datatypes import Array
from edge.errors import Raw
from export.data.examples import Examples
from export.errors import CheckpointError
from export.training.runs import TOKENIZER

#: Batches of a bucket that is sorted by length; more of them have less padding, and mix the lengths less.
_BATCHES_PER_BUCKET = 32


class Batch(NamedTuple):
    """Inputs of one forward pass, and the targets.

    Attributes:
        inputs: token ids [N, T], int64, or pixels [N, channels, size, size].
        mask: [N, T], 1 for tokens and 0 for padding; None for pixels.
        segments: [N, T]; None for pixels.
        targets: classes [N], scores [N], or first and last tokens of answers [N, 2].
    """

    inputs: Tensor
    mask: Tensor | None
    segments: Tensor | None
    targets: Tensor

    @property
    def named(self) -> dict[str, Tensor]:
        """The inputs by the names of the exported model; absent ones are left out."""
        given = {"inputs": self.inputs, "mask": self.mask, "segments": self.segments}
        return {name: tensor for name, tensor in given.items() if tensor is not None}

    def to(self, device: torch.device) -> Batch:
        """Return the batch on a device."""
        return Batch(*(None if tensor is None else tensor.to(device, non_blocking=True) for tensor in self))  # type: ignore[arg-type]


class Rows(Protocol):
    """A data set to train on."""

    @property
    def lengths(self) -> Array:
        """The number of tokens of each row, [n]."""

    @property
    def targets(self) -> Array:
        """Of each row, [n] or [n, 2]."""

    @property
    def contents(self) -> Iterable[Array]:
        """All that the rows consist of, to hash."""

    def batch(self, rows: Array) -> Batch:
        """Return rows by their indices."""


class Encoded(msgspec.Struct, frozen=True):
    """A tokenised data set: tokens and segments of each row, [T] of int32, and the targets [n] or [n, 2]."""

    tokens: tuple[Array, ...]
    segments: tuple[Array, ...]
    targets: Array

    @property
    def lengths(self) -> Array:
        return np.array([len(row) for row in self.tokens])

    @property
    def contents(self) -> Iterable[Array]:
        return self.lengths, *self.tokens, *self.segments, self.targets

    def first(self, number: int) -> Encoded:
        """Return the first rows."""
        return Encoded(self.tokens[:number], self.segments[:number], self.targets[:number])

    def batch(self, rows: Array) -> Batch:
        """Return rows, padded with zeros to the longest of them."""
        longest = max(len(self.tokens[row]) for row in rows)
        inputs, mask, segments = np.zeros((3, len(rows), longest), np.int64)
        for place, row in enumerate(rows):
            length = len(self.tokens[row])
            inputs[place, :length], mask[place, :length] = self.tokens[row], 1
            segments[place, :length] = self.segments[row]
        tensors = (torch.from_numpy(array) for array in (inputs, mask, segments, self.targets[rows]))
        return Batch(*tensors)


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """Read the tokenizer of a Hugging Face directory or of a run, without padding or truncation."""
    path = Path(directory) / TOKENIZER
    fix = "Give a directory of a model as Hugging Face's fast tokenizers save it, or a run of 'fewheads finetune'."
    if not path.is_file():
        raise CheckpointError(f"{path}", given=Raw("nothing there"), expected="a tokenizer", fix=fix)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing narrower
        raise CheckpointError(f"{path}", given=Raw(error), expected="a tokenizer", fix=fix) from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def encode(tokenizer: Tokenizer, examples: Examples, max_length: int) -> Encoded:
    """Tokenise examples with at most ``max_length`` tokens, special ones included; the longer text of a pair is cut
    first.
    """
    tokenizer.enable_truncation(max_length, strategy="longest_first")
    texts = [text if len(text) > 1 else text[0] for text in examples.texts]
    encodings = tokenizer.encode_batch(texts)
    tokenizer.no_truncation()
    return Encoded(
        tuple(np.array(encoding.ids, dtype=np.int32) for encoding in encodings),
        tuple(np.array(encoding.type_ids, dtype=np.int32) for encoding in encodings),
        examples.targets,
    )


def sorted_batches(lengths: Array, batch_size: int) -> list[Array]:
    """Return the indices of all rows, longest first, in batches: least padding, for evaluation."""
    return _cut(np.argsort(-lengths, kind="stable"), batch_size)


def shuffled_batches(lengths: Array, batch_size: int, *, seed: int, epoch: int) -> list[Array]:
    """Return the indices of all rows in batches of similar length and random order, for one epoch of training.

    The rows are permuted, cut into buckets, and sorted by length within each; then the batches are permuted. The order
    depends on the arguments alone, so that an interrupted run can resume within an epoch.
    """
    random = np.random.default_rng((seed, epoch))
    batches = [
        batch
        for bucket in _cut(random.permutation(len(lengths)), batch_size * _BATCHES_PER_BUCKET)
        for batch in _cut(bucket[np.argsort(lengths[bucket], kind="stable")], batch_size)
    ]
    return [batches[index] for index in random.permutation(len(batches))]


def batches_of_passes(lengths: Array, batch_size: int, *, seed: int, first: int) -> Iterator[Array]:
    """Yield :func:`shuffled_batches` of one pass over the rows after the other, without end, from ``first`` on."""
    number, step = divmod(first, math.ceil(len(lengths) / batch_size))
    passes = (shuffled_batches(lengths, batch_size, seed=seed, epoch=number) for number in count(number))
    return islice(chain.from_iterable(passes), step, None)


def _cut(rows: Sequence[int] | Array, size: int) -> list[Array]:
    return [np.asarray(rows[start : start + size]) for start in range(0, len(rows), size)]
