"""Tasks with one class or one value for a sentence or a pair of sentences: the base of GLUE's and of own texts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from tokenizers import Tokenizer

from edge.datatypes import Array
from edge.files import sha256
from export.data.examples import HOLDOUT_SHARE, TRAIN, Examples, Splits, held_out, limited
from export.data.glue import read_glue
from export.data.holdouts import held_phrases, held_sources, held_texts
from export.data.tokens import Rows, encode
from export.finetune.models import Architecture
from export.finetune.predictions import Predictions, predict
from export.finetune.task import Data, Reader, TextTask
from export.finetune.transfer import read_transfer
from export.models.heads import SCORE, Head
from export.models.transformer import TransformerConfig
from export.training.runs import SPLIT, DataFile, SplitVersion


class SentenceTask(TextTask, frozen=True, kw_only=True):
    """Base of these tasks.

    Attributes:
        texts: columns of the sentence, or of both sentences.
        target: column of the class or the value.
        labels: of the classes, in the order of their numbers; empty for values.
        metrics: names of :data:`export.finetune.predictions.METRICS`.
        split: how the hold-out is drawn; a run keeps that of its training, because another one has rows that it learnt.
    """

    texts: tuple[str, ...]
    target: str = "label"
    labels: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ("accuracy",)
    headline: str = "accuracy"
    split: SplitVersion = SPLIT

    @property
    def origin(self) -> str:
        raise NotImplementedError

    @property
    def class_names(self) -> tuple[str, ...]:
        """The labels as a bundle shows them."""
        return self.labels

    @property
    def description(self) -> str:
        """The task and its answers, for people."""
        raise NotImplementedError

    def examples(self, data_dir: str | Path) -> Splits:
        """Read the examples; raise a DataError if a file is missing or malformed."""
        raise NotImplementedError

    def files(self, data_dir: str | Path) -> tuple[DataFile, ...]:
        """Return the files that :meth:`examples` reads, with their hashes."""
        raise NotImplementedError

    def prepare(
        self,
        data_dir: str | Path,
        reader: Reader,
        *,
        max_length: int,
        limit: int | None,
        transfer: Path | None = None,
        most_transfer: int | None = None,
    ) -> Data:
        """Read the data, and a file with unlabelled texts, if one is given; see :func:`.transfer.read_transfer`."""
        assert isinstance(reader, Tokenizer)
        splits = self.examples(data_dir)
        texts = None
        if transfer:
            texts = read_transfer(transfer, len(self.texts) > 1, splits.measured.values(), most_transfer)
        return Data(
            self.labels or (SCORE,),
            encode(reader, limited(splits.train, limit), max_length),
            encode(reader, splits.holdout, max_length),
            {name: encode(reader, examples, max_length) for name, examples in splits.dev.items()},
            transfer=encode(reader, texts, max_length) if texts else None,
            transfer_origin=f"text of {transfer.name} (SHA-256 {sha256(transfer.read_bytes())})" if transfer else "",
        )

    def architecture(self, transformer: TransformerConfig, labels: tuple[str, ...], max_length: int) -> Architecture:
        """Return a classifier or a regression over the mean of the tokens."""
        return Architecture(task=self.name, transformer=transformer, labels=labels, max_length=max_length)

    def predict(self, model: Head, rows: Rows) -> Predictions:
        return predict(model, rows)


def held_rows(examples: Examples, split: SplitVersion, share: float = HOLDOUT_SHARE, seed: int = 0) -> Array:
    """Return the mask of the held-out rows, [n]: the others have no text of theirs; in version 1, no first text."""
    if split == 1:
        return held_out([texts[0] for texts in examples.texts], share, seed)
    return held_texts(examples.texts, share, seed)


#: Names of the class numbers in the files (Wang et al. 2019).
LABELS = {
    "SST-2": ("negative", "positive"),
    "CoLA": ("unacceptable", "acceptable"),
    "MRPC": ("not_equivalent", "equivalent"),
    "WNLI": ("not_entailment", "entailment"),
    "QQP": ("not_duplicate", "duplicate"),
}


class GlueTask(SentenceTask, frozen=True, kw_only=True):
    """A task of GLUE; values are scores from 0 to 5.

    Attributes:
        labels: as in the files.
        headline: the metric in table 1 of Devlin et al. 2019, "BERT".
        header, skips_short_rows: see :func:`export.data.glue.read_glue`.
        held_by: of the functions of :mod:`export.data.holdouts`, which draws the hold-out.
    """

    labels: tuple[str, ...] = ("0", "1")
    dev: tuple[str, ...] = ("dev",)
    header: tuple[str, ...] = ()
    skips_short_rows: bool = False
    held_by: Literal["texts", "phrases", "sources"] = "texts"

    @property
    def origin(self) -> str:
        return f"GLUE {self.name}"

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names instead of the numbers in the files."""
        return LABELS.get(self.name, self.labels)

    @property
    def description(self) -> str:
        return f"{self.name} of GLUE: {' or '.join(self.class_names) or 'a score from 0 to 5'}"

    def examples(self, data_dir: str | Path) -> Splits:
        train = self.read(data_dir, TRAIN)
        held = self._held(train, data_dir)
        return Splits(train.take(~held), train.take(held), {split: self.read(data_dir, split) for split in self.dev})

    def _held(self, rows: Examples, data_dir: str | Path) -> Array:
        """Return the mask of rows to hold out, [n], which have no text of the others."""
        if self.split == 1 or self.held_by == "texts":
            return held_rows(rows, self.split)
        phrases = [text for (text,) in rows.texts]
        if self.held_by == "phrases":
            return held_phrases(phrases)
        return held_sources([source for (source,) in self._read(data_dir, TRAIN, self.header[:1]).texts], phrases)

    def files(self, data_dir: str | Path) -> tuple[DataFile, ...]:
        return tuple(
            DataFile(split, path.name, len(self.read(data_dir, split).texts), sha256(path.read_bytes()))
            for split in (TRAIN, *self.dev)
            for path in [self._path(data_dir, split)]
        )

    def read(self, data_dir: str | Path, split: str) -> Examples:
        """Read one split, ``train`` or one of ``dev``."""
        return self._read(data_dir, split, self.texts)

    def _read(self, data_dir: str | Path, split: str, texts: Sequence[str]) -> Examples:
        columns = (texts, self.target, self.labels)
        path = self._path(data_dir, split)
        return read_glue(path, *columns, header=self.header, skips_short_rows=self.skips_short_rows)

    def _path(self, data_dir: str | Path, split: str) -> Path:
        return Path(data_dir) / "glue" / self.name / f"{split}.tsv"


_PAIR = ("sentence1", "sentence2")
_ENTAILMENT = ("entailment", "not_entailment")

TASKS = {
    task.name: task
    for task in (
        GlueTask(name="SST-2", texts=("sentence",), held_by="phrases"),
        GlueTask(
            name="CoLA",
            texts=("sentence",),
            metrics=("matthews",),
            headline="matthews",
            header=("source", "label", "author's label", "sentence"),
            held_by="sources",
        ),
        GlueTask(
            name="STS-B", texts=_PAIR, target="score", labels=(), metrics=("pearson", "spearman"), headline="spearman"
        ),
        GlueTask(
            name="MRPC", texts=("#1 String", "#2 String"), target="Quality", metrics=("accuracy", "f1"), headline="f1"
        ),
        GlueTask(name="RTE", texts=_PAIR, labels=_ENTAILMENT),
        GlueTask(name="WNLI", texts=_PAIR),
        GlueTask(name="QNLI", texts=("question", "sentence"), labels=_ENTAILMENT),
        GlueTask(
            name="MNLI",
            texts=_PAIR,
            target="gold_label",
            labels=("entailment", "neutral", "contradiction"),
            dev=("dev_matched", "dev_mismatched"),
        ),
        GlueTask(
            name="QQP",
            texts=("question1", "question2"),
            target="is_duplicate",
            metrics=("accuracy", "f1"),
            headline="f1",
            skips_short_rows=True,
        ),
    )
}
