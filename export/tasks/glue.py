"""GLUE in its official TSV layout: no quoting, a header except for CoLA, lines that end at a line feed.

Wang et al. 2019, "GLUE: A Multi-Task Benchmark and Analysis Platform for Natural Language Understanding".
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from edge.errors import Raw
from edge.files import sha256
from export.data.examples import Examples, split_holdout
from export.errors import DataError
from export.finetune.text_tasks import TRAIN, SentenceTask, Splits
from export.training.runs import DataFile

_FIX = "Get the task's files from gluebenchmark.com/tasks, and name the directory above glue/ with --data-dir."
_LARGEST_SCORE = 5.0


#: Names of the class numbers in the files (Wang et al. 2019).
LABELS = {
    "SST-2": ("negative", "positive"),
    "CoLA": ("unacceptable", "acceptable"),
    "MRPC": ("not_equivalent", "equivalent"),
    "WNLI": ("not_entailment", "entailment"),
    "QQP": ("not_duplicate", "duplicate"),
}


class GlueTask(SentenceTask, frozen=True, kw_only=True):
    """A task of GLUE; its metrics are the official ones, and values are scores from 0 to 5.

    Attributes:
        labels: as in the files.
        headline: the metric in table 1 of Devlin et al. 2019, "BERT".
        header: the columns of files without a header; empty if the first line has them.
        skips_short_rows: whether rows that lack columns are left out; the official QQP has some two dozen.
    """

    labels: tuple[str, ...] = ("0", "1")
    dev: tuple[str, ...] = ("dev",)
    header: tuple[str, ...] = ()
    skips_short_rows: bool = False

    @property
    def origin(self) -> str:
        """See :class:`export.finetune.text_tasks.SentenceTask`, as for the following."""
        return f"GLUE {self.name}"

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names instead of the numbers in the files."""
        return LABELS.get(self.name, self.labels)

    @property
    def description(self) -> str:
        """The task and its answers."""
        return f"{self.name} of GLUE: {' or '.join(self.class_names) or 'a score from 0 to 5'}"

    def examples(self, data_dir: str | Path) -> Splits:
        """Read the task's files, and hold a part of the training set out."""
        train, holdout = split_holdout(read(self, data_dir, "train"))
        return Splits(train, holdout, {split: read(self, data_dir, split) for split in self.dev})

    def files(self, data_dir: str | Path) -> tuple[DataFile, ...]:
        """Return the file of each split."""
        return tuple(
            DataFile(split, path.name, len(read(self, data_dir, split).texts), sha256(path.read_bytes()))
            for split in (TRAIN, *self.dev)
            for path in [_path(self, data_dir, split)]
        )


_PAIR = ("sentence1", "sentence2")
_ENTAILMENT = ("entailment", "not_entailment")

TASKS = {
    task.name: task
    for task in (
        GlueTask(name="SST-2", texts=("sentence",)),
        GlueTask(
            name="CoLA",
            texts=("sentence",),
            metrics=("matthews",),
            headline="matthews",
            header=("source", "label", "author's label", "sentence"),
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


def read(task: GlueTask, data_dir: str | Path, split: str) -> Examples:
    """Read one split of a task.

    Args:
        split: ``train``, or one of ``task.dev``.

    Raises:
        DataError: the file is missing, is not UTF-8, or has a malformed line.
    """
    path = _path(task, data_dir, split)
    lines = _lines(path)
    columns: Sequence[str] = task.header
    first_line = 1
    if not columns:
        columns, lines, first_line = lines[0].split("\t"), lines[1:], 2
    try:
        text_columns = [columns.index(name) for name in task.texts]
        target_column = columns.index(task.target)
    except ValueError:
        expected = f"a header with {', '.join((*task.texts, task.target))}"
        raise DataError(f"{path} line 1", given=Raw(", ".join(columns)), expected=expected, fix=_FIX) from None
    texts: list[tuple[str, ...]] = []
    targets: list[float] = []
    for number, line in enumerate(lines, first_line):
        cells = line.split("\t")
        if len(cells) < len(columns) and task.skips_short_rows:
            continue
        if len(cells) != len(columns):
            given = Raw(f"{len(cells)} columns")
            raise DataError(f"{path} line {number}", given=given, expected=f"{len(columns)} columns", fix=_FIX)
        texts.append(tuple(cells[column].strip() for column in text_columns))
        targets.append(_target(task, cells[target_column], f"{path} line {number}"))
    if not texts:
        raise DataError(f"{path}", given=Raw("no examples"), expected="one on each line", fix=_FIX)
    return Examples(tuple(texts), np.array(targets, dtype=np.int64 if task.labels else np.float32))


def _path(task: GlueTask, data_dir: str | Path, split: str) -> Path:
    return Path(data_dir) / "glue" / task.name / f"{split}.tsv"


def _lines(path: Path) -> list[str]:
    try:
        # utf-8-sig: MRPC begins with a byte order mark. Bytes, because text mode would take a lone "\r" for an end.
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise DataError(f"{path}", given=Raw(error.strerror), expected="a file of GLUE", fix=_FIX) from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}", given=Raw(error), expected="UTF-8", fix=_FIX) from None
    # Not splitlines(): texts hold characters such as U+2028 that it would split at.
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    while len(lines) > 1 and not lines[-1]:
        lines.pop()
    return lines


def _target(task: GlueTask, cell: str, subject: str) -> float:
    if task.labels:
        if cell not in task.labels:
            expected = f"{task.target} one of {', '.join(task.labels)}"
            raise DataError(subject, given=cell, expected=expected, fix=_FIX)
        return task.labels.index(cell)
    try:
        score = float(cell)
    except ValueError:
        score = float("nan")
    if not 0 <= score <= _LARGEST_SCORE:  # false for NaN too
        expected = f"{task.target} from 0 to {_LARGEST_SCORE:g}"
        raise DataError(subject, given=cell, expected=expected, fix=_FIX)
    return score
