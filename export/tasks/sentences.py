"""Tasks with one class or one value for a sentence or a pair of sentences: GLUE's, and those of one's own files."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

from export.data.examples import Examples, limited
from export.data.tokens import Rows, encode
from export.finetune.models import SCORE, Architecture
from export.finetune.predictions import Predictions, predict
from export.finetune.task import HOLDOUT, Data, Reader, TextTask
from export.models.heads import Head
from export.models.transformer import TransformerConfig
from export.training.runs import DataFile, SplitRows

#: Name of the split to train on.
TRAIN = "train"


class Splits(NamedTuple):
    """Examples to train on, those held out for choices, and those for published metrics, by the name of the split."""

    train: Examples
    holdout: Examples
    dev: dict[str, Examples]

    @property
    def measured(self) -> dict[str, Examples]:
        """The splits on which a run is measured, by name."""
        return {HOLDOUT: self.holdout, **self.dev}

    @property
    def rows(self) -> tuple[SplitRows, ...]:
        """The size of each split, and how many of its texts are in the training set, too."""
        known = set(self.train.texts)
        return (
            SplitRows(TRAIN, len(self.train.texts)),
            *(
                SplitRows(name, len(one.texts), sum(texts in known for texts in one.texts))
                for name, one in self.measured.items()
            ),
        )


class SentenceTask(TextTask, frozen=True, kw_only=True):
    """Base of these tasks.

    Attributes:
        texts: columns of the sentence, or of both sentences.
        target: column of the class or the value.
        labels: of the classes, in the order of their numbers; empty for values.
        metrics: names of :data:`export.finetune.predictions.METRICS`.
    """

    texts: tuple[str, ...]
    target: str = "label"
    labels: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ("accuracy",)
    headline: str = "accuracy"

    @property
    def origin(self) -> str:
        """See :class:`export.finetune.task.Task`."""
        raise NotImplementedError

    @property
    def class_names(self) -> tuple[str, ...]:
        """The labels as a bundle shows them."""
        return self.labels

    @property
    def description(self) -> str:
        """What a model of the task answers, for people."""
        raise NotImplementedError

    def examples(self, data_dir: str | Path) -> Splits:
        """Read the examples.

        Raises:
            DataError: a file is missing or malformed.
        """
        raise NotImplementedError

    def files(self, data_dir: str | Path) -> tuple[DataFile, ...]:
        """Return the files that :meth:`examples` reads, with their hashes."""
        raise NotImplementedError

    def prepare(self, data_dir: str | Path, reader: Reader, *, max_length: int, limit: int | None) -> Data:
        """Read and tokenise training set, hold-out and dev."""
        assert isinstance(reader, Tokenizer)
        splits = self.examples(data_dir)
        return Data(
            self.labels or (SCORE,),
            encode(reader, limited(splits.train, limit), max_length),
            encode(reader, splits.holdout, max_length),
            {name: encode(reader, examples, max_length) for name, examples in splits.dev.items()},
        )

    def architecture(self, transformer: TransformerConfig, labels: tuple[str, ...], max_length: int) -> Architecture:
        """Return a classifier or a regression over the mean of the tokens."""
        return Architecture(task=self.name, transformer=transformer, labels=labels, max_length=max_length)

    def predict(self, model: Head, rows: Rows) -> Predictions:
        """Return the logits."""
        return predict(model, rows)
