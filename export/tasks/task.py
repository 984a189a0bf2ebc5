"""The interface of a task: from data to rows, and from predictions to metrics.

GLUE, SQuAD and images each implement :class:`Task` in a file of their own; :mod:`export.tasks.registry` lists them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, TypeAlias

import msgspec
from tokenizers import Tokenizer

from edge.errors import Literally, UsageError
from export.tasks.models import Architecture, Source
from export.tasks.objectives import Head
from export.tasks.predictions import Predicted
from export.tasks.tokens import Rows, load_tokenizer
from export.transformer import TransformerConfig

HOLDOUT = "holdout"


class ImageShape(msgspec.Struct, frozen=True):
    """The images that a model reads: pixels of a side, and colours."""

    size: int
    channels: int

    def __str__(self) -> str:
        return f"{self.size} x {self.size} pixels of {self.channels} colours"


#: What a model reads its inputs through.
Reader: TypeAlias = "Tokenizer | ImageShape"


class Data(msgspec.Struct, frozen=True):
    """A task's data as a model reads them.

    Attributes:
        labels: of the classes, as :class:`export.tasks.models.Architecture` has them.
        train: what is learnt from.
        holdout: what choices are made on.
        dev: the splits that figures are published of, by name.
    """

    labels: tuple[str, ...]
    train: Rows
    holdout: Rows
    dev: dict[str, Rows]

    @property
    def measured(self) -> dict[str, Rows]:
        """The splits that a run is measured on, by name."""
        return {HOLDOUT: self.holdout, **self.dev}


class Task(Protocol):
    """One task to fine-tune on."""

    @property
    def name(self) -> str:
        """A name in :data:`export.tasks.NAMES`."""

    @property
    def origin(self) -> str:
        """Name of the data in the provenance of weights."""

    @property
    def metrics(self) -> tuple[str, ...]:
        """The official ones."""

    @property
    def headline(self) -> str:
        """The metric by which the best epoch is chosen."""

    def source(self, model: Path | None, shape: Mapping[str, int]) -> Source:
        """Return what to start from.

        Args:
            model: what was asked for: a Hugging Face directory, a run, or None.
            shape: of a new model: ``dim``, ``depth`` and ``heads``, as far as they were asked for.

        Raises:
            UsageError: the task cannot start from that.
        """

    def reader(self, source: Source) -> Reader:
        """Return what a model reads through.

        Raises:
            CheckpointError: it is missing or malformed.
            UsageError: the model is of another kind than the task.
        """

    def prepare(self, data_dir: str | Path, reader: Reader, *, max_length: int, limit: int | None) -> Data:
        """Read the data; see :func:`export.tasks.run.prepare`."""

    def architecture(self, transformer: TransformerConfig, labels: tuple[str, ...], max_length: int) -> Architecture:
        """Return what a model of the task is rebuilt from.

        Args:
            max_length: tokens that texts were cut to.
        """

    def predict(self, model: Head, rows: Rows) -> Predicted:
        """Return what a model says of one of the splits of :attr:`Data.measured`."""


class TextTask(msgspec.Struct, frozen=True, kw_only=True):
    """Base of tasks on text, which start from a trained model and its tokenizer."""

    name: str

    def source(self, model: Path | None, shape: Mapping[str, int]) -> Source:
        """Return the directory of a model; see :meth:`Task.source`."""
        if shape:
            option = next(iter(shape))
            fix = f"Leave --{option} out: the model of a text has the shape that it was trained with."
            raise UsageError(f"--{option}", given=shape[option], expected=f"nothing for {self.name}", fix=fix)
        if model is None:
            fix = "Give a Hugging Face directory of BERT, or a run of 'fewheads finetune'."
            raise UsageError("--model", given=Literally("nothing"), expected=f"a model for {self.name}", fix=fix)
        return model

    def reader(self, source: Source) -> Reader:
        """Return the tokenizer of a model; see :meth:`Task.reader`."""
        assert not isinstance(source, TransformerConfig)
        return load_tokenizer(source)
