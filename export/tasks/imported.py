"""The task of an imported model: to answer as it does, on texts or images without labels.

The answers of the original are the targets, so that a smaller model is measured by its agreement with the original.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from edge.bundles.manifest import Measure
from edge.datatypes import Array
from edge.errors import Raw, UsageError
from export.data.examples import Examples, limited, split_holdout
from export.data.tokens import Batch, Encoded, Rows, encode, load_tokenizer
from export.data.unlabelled import ImageFiles, find_images, read_texts
from export.finetune import IMPORTED
from export.finetune.models import Architecture, OpenedModel, Source, open_model
from export.finetune.objectives import Head, Outputs, outputs_by_row
from export.finetune.predictions import Predicted, Predictions
from export.finetune.task import Data, ImageShape, Reader
from export.models.heads import NO_LABEL, SentenceEmbedder, SequenceClassifier, SpanClassifier, TokenClassifier
from export.models.transformer import TransformerConfig
from export.training.intervals import mean_measure

#: Most texts or images of the hold-out.
MOST_HELD_OUT = 1000


class Agreement(Predicted, frozen=True):
    """Agreement with the original on each text or image, ``values`` [n].

    It is 1 or 0 for a class or a span, the share of equal tokens for labels of tokens, and the cosine for embeddings.
    """

    values: Array

    def score(self, metric: str) -> float:
        """Return the mean."""
        return float(self.values.mean())

    def measures(self, metrics: Sequence[str], split: str) -> tuple[Measure, ...]:
        """Return the mean with its interval."""
        return tuple(mean_measure(metric, split, self.values) for metric in metrics)


class LabelledTokens(Encoded, frozen=True):
    """A tokenised data set whose targets are a class for each token, [n, T].

    Special tokens and padding have :data:`NO_LABEL`.
    """

    def batch(self, rows: Array) -> Batch:
        """Return rows, padded to the longest of them."""
        batch = super().batch(rows)
        return batch._replace(targets=batch.targets[:, : batch.inputs.shape[1]])


class ImportedTask(msgspec.Struct, frozen=True):
    """A :class:`export.finetune.task.Task`: to answer as ``original``.

    Attributes:
        on_rows: called with the number of rows that the original has answered, and of all.
    """

    description: Architecture
    original: Head
    on_rows: Callable[[int, int], None] = lambda done, rows: None

    @property
    def name(self) -> str:
        """A name in :data:`export.finetune.IMPORTED`."""
        return self.description.task

    @property
    def own_data(self) -> None:
        """None: what a user gives has no labels."""

    @property
    def origin(self) -> str:
        """See :class:`export.finetune.task.Task`, as for the following."""
        return "answers of the imported model"

    @property
    def metrics(self) -> tuple[str, ...]:
        """Pearson's correlation of scores, the cosine of embeddings, or the share of equal answers."""
        if isinstance(self.original, SequenceClassifier) and self.original.regression:
            return ("pearson",)
        return ("cosine",) if isinstance(self.original, SentenceEmbedder) else ("agreement",)

    @property
    def headline(self) -> str:
        """The only metric."""
        return self.metrics[0]

    def source(self, model: Path | None, shape: Mapping[str, int]) -> Source:
        """Return the directory of a model.

        Raises:
            UsageError: it is not a run with the inputs and outputs of the original.
        """
        fix = "Give --model alone, an imported run or one that was reduced from it."
        if model is None or shape:
            raise UsageError("--model", given=Raw(model or "nothing"), expected="a run", fix=fix)
        check_alike(f"--model {model}", open_model(model), self.description, "the teacher", fix)
        return model

    def reader(self, source: Source) -> Reader:
        """Return the tokenizer of a run, or the shape of its images."""
        assert not isinstance(source, TransformerConfig)
        if self.description.image is None:
            return load_tokenizer(source)
        return ImageShape(self.description.image.size, self.description.image.channels)

    def prepare(self, data_dir: str | Path, reader: Reader, *, max_length: int, limit: int | None) -> Data:
        """Read texts or images, hold a tenth of them out by their hash, and let the original answer all of them.

        Args:
            data_dir: a file of texts, as :func:`export.data.unlabelled.read_texts` reads it, or a directory of images.

        Raises:
            UsageError: the original reads fewer tokens.
        """
        longest = self.description.max_length
        if max_length > longest:
            expected, fix = f"{longest} at most, the tokens that the imported model reads", "Leave it out."
            raise UsageError("--max-length", given=max_length, expected=expected, fix=fix)
        data = Path(data_dir)
        train, holdout = split_holdout(self.items(data))
        parts = limited(train, limit), limited(holdout, MOST_HELD_OUT)
        first, second = (self.answered(part, data, reader, max_length) for part in parts)
        return Data(self.description.labels, first, second, {})

    def items(self, data: Path) -> Examples:
        """Return the texts of a file, or the names of the images in a directory, without targets."""
        if self.description.image is None:
            items = read_texts(data, self.description.pair)
        else:
            items = tuple((str(path.relative_to(data)),) for path in find_images(data))
        return Examples(items, np.zeros(len(items), np.int64))

    def answered(self, items: Examples, data: Path, reader: Reader, max_length: int) -> Rows:
        """Return rows of texts, or of images below ``data``, with the answers of the original as their targets."""
        rows = self._rows(items, data, reader, max_length)
        targets = answers(self.original, rows, self.on_rows)
        if isinstance(rows, ImageFiles):
            return ImageFiles(rows.paths, rows.step, targets)
        assert isinstance(rows, Encoded)
        if not isinstance(self.original, TokenClassifier):
            return Encoded(rows.tokens, rows.segments, targets)
        assert isinstance(reader, Tokenizer)
        around = reader.encode("").ids  # special tokens before and after a text, whose labels nobody reads
        for classes, tokens in zip(targets, rows.tokens, strict=True):
            classes[: len(tokens)][np.isin(tokens, around)] = NO_LABEL
        return LabelledTokens(rows.tokens, rows.segments, targets)

    def _rows(self, items: Examples, data: Path, reader: Reader, max_length: int) -> Rows:
        if self.description.image is not None:
            return ImageFiles([data / name for (name,) in items.texts], self.description.image)
        assert isinstance(reader, Tokenizer)
        return encode(reader, items, max_length)

    def architecture(self, transformer: TransformerConfig, labels: tuple[str, ...], max_length: int) -> Architecture:
        """Return the original's, with another transformer."""
        return msgspec.structs.replace(self.description, transformer=transformer)

    def predict(self, model: Head, rows: Rows) -> Predicted:
        """Return the agreement with the targets of rows; of scores, both."""
        return self.compared([one.outputs for one in outputs_by_row(model, rows)], rows.targets)

    def compared(self, outputs: Sequence[Outputs], theirs: Array) -> Predicted:
        """Return the agreement of the outputs for each row, without padding, with answers of the original."""
        model, ours = self.original, answers_of(self.original, outputs)
        if isinstance(model, SequenceClassifier) and model.regression:
            return Predictions(ours[:, None], theirs)
        if isinstance(model, SentenceEmbedder):
            lengths = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
            return Agreement((ours * theirs).sum(axis=1) / lengths)
        equal, counted = ours == theirs, theirs != NO_LABEL
        if equal.ndim == 1:
            return Agreement(equal.astype(np.float64))
        if isinstance(model, SpanClassifier):
            return Agreement(equal.all(axis=1).astype(np.float64))
        tokens = counted.sum(axis=1)
        return Agreement(np.where(tokens, (equal & counted).sum(axis=1) / np.maximum(tokens, 1), 1.0))


def check_alike(subject: str, found: OpenedModel, original: Architecture, which: object, fix: str) -> None:
    """Raise a UsageError unless a model was imported, or made of one that was, with the inputs and outputs of another.

    Args:
        original, which: that other model, and its name in the message.
    """
    other = found.architecture
    if other is None or other.task not in IMPORTED:
        given, expected = Raw("another model"), "an imported run, or one made of it"
        raise UsageError(subject, given=given, expected=expected, fix=fix)
    same = msgspec.structs.replace(other, transformer=original.transformer)
    if same != original or other.transformer.vocab_size != original.transformer.vocab_size:
        given = Raw(f"{other.task}, {len(other.labels)} labels, at most {other.max_length} tokens")
        raise UsageError(subject, given=given, expected=f"the inputs and outputs of {which}", fix=fix)


def answers(model: Head, rows: Rows, on_rows: Callable[[int, int], None] = lambda done, rows: None) -> Array:
    """Return the answers of a model to rows; see :func:`answers_of`, and :class:`ImportedTask` for ``on_rows``."""
    return answers_of(model, [one.outputs for one in outputs_by_row(model, rows, on_rows=on_rows)])


def answers_of(model: Head, outputs: Sequence[Outputs]) -> Array:
    """Return the answers that are the outputs of a head for each row, without padding.

    Returns:
        Classes [n] or [n, T] with :data:`NO_LABEL` for padding, scores [n], embeddings [n, width], or first and last
        tokens [n, 2].
    """
    if isinstance(model, SpanClassifier):
        return np.array([[int(logits.argmax()) for logits in cast(tuple[Tensor, Tensor], one)] for one in outputs])
    tensors = cast(Sequence[Tensor], outputs)
    if isinstance(model, TokenClassifier):
        return pad_sequence([one.argmax(dim=1) for one in tensors], True, NO_LABEL).numpy()
    stacked = torch.stack(list(tensors))
    if isinstance(model, SentenceEmbedder):
        return stacked.numpy()
    return (stacked[:, 0] if model.regression else stacked.argmax(dim=1)).numpy()
