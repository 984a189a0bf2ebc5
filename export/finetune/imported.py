"""The task of an imported model: to answer as it does, on texts or images without labels.

The answers of the original are the targets, so that a smaller model is measured by its agreement with the original.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
from tokenizers import Tokenizer

from edge.datatypes import Array
from edge.errors import Raw, UsageError
from export.data.examples import Examples, limited, split_holdout
from export.data.images import ImageShape
from export.data.tokens import Batch, Encoded, Rows, encode, load_tokenizer
from export.data.unlabelled import ImageFiles, find_images, read_texts
from export.finetune import IMPORTED
from export.finetune.models import Architecture, OpenedModel, Source, open_model
from export.finetune.objectives import Teacher, corresponding_layers, outputs_by_row
from export.finetune.predictions import Predicted, Predictions
from export.finetune.task import Data, Reader
from export.models.heads import NO_LABEL, Head, Outputs
from export.models.transformer import TransformerConfig
from export.training.recipe import Precision
from export.training.runs import SplitVersion, read_config

#: Most texts or images of the hold-out.
MOST_HELD_OUT = 1000


class Agreement(Predicted, frozen=True):
    """Agreement with the original on each text or image, ``values`` [n], by :meth:`Head.agreements`."""

    values: Array

    def of_items(self, metric: str) -> Array:
        return self.values


class LabelledTokens(Encoded, frozen=True):
    """A tokenised data set with a class for each token, [n, T]; special tokens and padding have :data:`NO_LABEL`."""

    def batch(self, rows: Array) -> Batch:
        batch = super().batch(rows)
        return batch._replace(targets=batch.targets[:, : batch.inputs.shape[1]])


class ImportedTask(msgspec.Struct, frozen=True):
    """A :class:`export.finetune.task.Task`: to answer as ``original``, with embeddings of its ``space``, if any."""

    description: Architecture
    original: Head
    space: str | None = None

    @property
    def name(self) -> str:
        return self.description.task

    @property
    def own_data(self) -> None:
        """None: what a user gives has no labels."""

    @property
    def split(self) -> SplitVersion:
        """Version 1: a tenth of the texts or images by their hash."""
        return 1

    @property
    def origin(self) -> str:
        return "answers of the imported model"

    @property
    def metrics(self) -> tuple[str, ...]:
        """Pearson's correlation of scores, the cosine of embeddings, or the share of equal answers."""
        return (self.original.agreement,)

    @property
    def headline(self) -> str:
        return self.original.agreement

    def source(self, model: Path | None, shape: Mapping[str, int]) -> Source:
        """Return the directory of a model; a UsageError refuses other inputs or outputs than the original's."""
        fix = "Give --model alone, an imported run or one that was reduced from it."
        if model is None or shape:
            raise UsageError("--model", given=Raw(model or "nothing"), expected="a run", fix=fix)
        check_alike(f"--model {model}", open_model(model), self.description, "the teacher", fix)
        return model

    def imitated_by(self, student: Path) -> list[int]:
        """Return the layers whose hidden states a run imitates; a UsageError refuses one of another width."""
        config = read_config(student)
        shape = msgspec.convert(config.arguments["transformer"], TransformerConfig)
        return corresponding_layers(shape, self.original.transformer.config, config.planned)[1]

    def reader(self, source: Source) -> Reader:
        assert not isinstance(source, TransformerConfig)
        if self.description.image is None:
            return load_tokenizer(source)
        return ImageShape(self.description.image.size, self.description.image.channels)

    def prepare(
        self,
        data_dir: str | Path,
        reader: Reader,
        *,
        max_length: int,
        limit: int | None,
        items: Examples | None = None,
        layers: Sequence[int] = (),
        precision: Precision = "fp32",
        on_rows: Callable[[int, int], None] = lambda done, rows: None,
    ) -> Data:
        """Read texts or images, hold a tenth of them out by their hash, and let the original answer all of them.

        Args:
            data_dir: a file of texts, as :func:`export.data.unlabelled.read_texts` reads it, or a directory of images.
            items: texts to use in place of those of the file.
            layers: of the original, whose hidden states will be imitated, too.
            precision: of the original's multiplications on the training set.
            on_rows: called with the number of rows that the original has answered, and of all of the training set.

        Raises:
            UsageError: the original reads fewer tokens.
        """
        longest = self.description.max_length
        if max_length > longest:
            expected, fix = f"{longest} at most, the tokens that the imported model reads", "Leave it out."
            raise UsageError("--max-length", given=max_length, expected=expected, fix=fix)
        data = Path(data_dir)
        train, holdout = split_holdout(items or self.items(data))
        rows = self._rows(limited(train, limit), data, reader, max_length)
        teacher = Teacher(self.original, rows, layers, precision, on_rows=on_rows)
        learnt = self._with_targets(rows, self.original.answers(teacher.outputs(rows)), reader)
        measured = self.answered(limited(holdout, MOST_HELD_OUT), data, reader, max_length)
        return Data(self.description.labels, learnt, measured, {}, teacher)

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
        return self._with_targets(rows, answers(self.original, rows), reader)

    def _with_targets(self, rows: Rows, targets: Array, reader: Reader) -> Rows:
        if isinstance(rows, ImageFiles):
            return ImageFiles(rows.paths, rows.step, targets)
        assert isinstance(rows, Encoded)
        if not self.description.per_token:
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
        return self.compared([row.outputs for row in outputs_by_row(model, rows)], rows.targets)

    def compared(self, outputs: Sequence[Outputs], wanted: Array) -> Predicted:
        """Return the agreement of the outputs for each row, without padding, with answers of the original."""
        given = self.original.answers(outputs)
        if self.headline == "pearson":
            return Predictions(given[:, None], wanted)
        return Agreement(self.original.agreements(given, wanted))


def check_alike(subject: str, found: OpenedModel, original: Architecture, which: object, fix: str) -> None:
    """Raise a UsageError unless a model was imported, or made of such one, with inputs and outputs of ``which``."""
    given = found.architecture
    if given is None or given.task not in IMPORTED:
        expected = "an imported run, or one made of it"
        raise UsageError(subject, given=Raw("another model"), expected=expected, fix=fix)
    same = msgspec.structs.replace(given, transformer=original.transformer)
    if same != original or given.transformer.vocab_size != original.transformer.vocab_size:
        described = Raw(f"{given.task}, {len(given.labels)} labels, at most {given.max_length} tokens")
        raise UsageError(subject, given=described, expected=f"the inputs and outputs of {which}", fix=fix)


def answers(model: Head, rows: Rows) -> Array:
    """Return the answers of a model to rows; see :meth:`export.models.heads.Head.answers`."""
    return model.answers([row.outputs for row in outputs_by_row(model, rows)])
