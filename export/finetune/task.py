"""The interface of a task: from data to rows, and from predictions to metrics.

GLUE, SQuAD, images and own data each implement :class:`Task`; :mod:`export.finetune.run` lists them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, TypeAlias

import msgspec
from tokenizers import Tokenizer

from edge.errors import Raw, UsageError
from export.data.examples import HOLDOUT
from export.data.images import ImageShape
from export.data.tokens import Rows, load_tokenizer
from export.finetune.models import Architecture, Source
from export.finetune.objectives import Teacher
from export.finetune.predictions import Predicted
from export.models.heads import Head
from export.models.transformer import TransformerConfig
from export.training.runs import OwnData, SplitVersion

#: Tokenizer or image shape of a model.
Reader: TypeAlias = "Tokenizer | ImageShape"


class Data(msgspec.Struct, frozen=True):
    """Data of a task, encoded for a model.

    Attributes:
        dev: splits for published metrics, by name.
        teacher: whose answers are the targets; None for data with labels.
        transfer: unlabelled rows, to which a student learns its teacher's answers.
        transfer_origin: their file with its hash; empty without any.
    """

    labels: tuple[str, ...]
    train: Rows
    holdout: Rows
    dev: dict[str, Rows]
    teacher: Teacher | None = None
    transfer: Rows | None = None
    transfer_origin: str = ""

    @property
    def measured(self) -> dict[str, Rows]:
        """The splits on which a run is measured, by name."""
        return {HOLDOUT: self.holdout, **self.dev}


class Task(Protocol):
    """A task to fine-tune on."""

    @property
    def name(self) -> str:
        """A name in :data:`export.finetune.NAMES`, or of own data."""

    @property
    def own_data(self) -> OwnData | None:
        """A user's own data; None for a task of Fewheads."""

    @property
    def origin(self) -> str:
        """Name of the data in the provenance of weights."""

    @property
    def metrics(self) -> tuple[str, ...]:
        """The official metrics."""

    @property
    def headline(self) -> str:
        """The metric by which the best epoch is chosen."""

    @property
    def split(self) -> SplitVersion:
        """How the hold-out of labelled texts is drawn; other data have one way, version 1."""

    def source(self, model: Path | None, shape: Mapping[str, int]) -> Source:
        """Return the start of a training.

        Args:
            model: a Hugging Face directory, a run, or None.
            shape: of a new model: those of ``dim``, ``depth`` and ``heads`` that were given.
        """

    def reader(self, source: Source) -> Reader:
        """Return the tokenizer or the image shape of a model."""

    def prepare(self, data_dir: str | Path, reader: Reader, *, max_length: int, limit: int | None) -> Data:
        """Read the data; see :func:`export.finetune.run.prepare`."""

    def architecture(self, transformer: TransformerConfig, labels: tuple[str, ...], max_length: int) -> Architecture:
        """Return the description from which a model of the task is rebuilt."""

    def predict(self, model: Head, rows: Rows) -> Predicted:
        """Return the predictions for one of the splits of :attr:`Data.measured`."""


class TextTask(msgspec.Struct, frozen=True, kw_only=True):
    """Base of tasks on text, which start from a trained model and its tokenizer."""

    name: str
    own_data: OwnData | None = None
    split: SplitVersion = 1

    def source(self, model: Path | None, shape: Mapping[str, int]) -> Source:
        if shape:
            option = next(iter(shape))
            fix = f"Leave --{option} out: the model of a text has the shape that it was trained with."
            raise UsageError(f"--{option}", given=shape[option], expected=f"nothing for {self.name}", fix=fix)
        if model is None:
            fix = "Give a Hugging Face directory of BERT, or a run of 'fewheads finetune'."
            raise UsageError("--model", given=Raw("nothing"), expected=f"a model for {self.name}", fix=fix)
        return model

    def reader(self, source: Source) -> Reader:
        assert not isinstance(source, TransformerConfig)
        return load_tokenizer(source)
