"""SQuAD as a task: questions in windows, answers as text, splits by article."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from edge.datatypes import Array
from edge.errors import Raw, UsageError
from export.data.examples import drawn
from export.data.squad import FIX, LONGEST_QUESTION, Question, Windows, encode_windows, read, split_articles
from export.data.tokens import Batch, Rows
from export.errors import DataError
from export.finetune.models import Architecture
from export.finetune.questions import Answers, extract
from export.finetune.task import Data, Reader, TextTask
from export.models.heads import Head, SpanClassifier
from export.models.transformer import TransformerConfig

#: The official files, and a free one without a training set.
_TRAIN, _DEV, _ALONE = "train-v1.1.json", "dev-v1.1.json", "xquad.en.json"
_DEV_SHARE, _HOLDOUT_SHARE = 0.25, 0.1
#: Another seed than the hold-out's, so that neither split depends on the other.
_DEV_SEED = 1
#: Least tokens of context in a window, beside the longest question and three special tokens.
_LEAST_CONTEXT = 29
_LEAST_LENGTH = LONGEST_QUESTION + 3 + _LEAST_CONTEXT


class QuestionRows(msgspec.Struct, frozen=True):
    """Questions and their windows; a row is a window."""

    questions: tuple[Question, ...]
    windows: Windows

    @property
    def lengths(self) -> Array:
        """The number of tokens of each window, [n]."""
        return self.windows.rows.lengths

    @property
    def targets(self) -> Array:
        """The first and the last token of the answer, [n, 2]."""
        return self.windows.rows.targets

    @property
    def contents(self) -> Iterable[Array]:
        """Those of the windows."""
        return self.windows.rows.contents

    def batch(self, rows: Array) -> Batch:
        """Return windows by their indices."""
        return self.windows.rows.batch(rows)


class SquadTask(TextTask, frozen=True, kw_only=True):
    """SQuAD v1.1, or XQuAD's English part, of which a quarter of the articles becomes dev."""

    origin: str = "questions in SQuAD v1.1 JSON"
    metrics: tuple[str, ...] = ("exact_match", "f1")
    headline: str = "f1"

    def prepare(self, data_dir: str | Path, reader: Reader, *, max_length: int, limit: int | None) -> Data:
        """Read the files, hold a tenth of the training articles out, and cut contexts into windows.

        Args:
            max_length: tokens of a window; neighbours share up to a third of them.
        """
        assert isinstance(reader, Tokenizer)
        if max_length < _LEAST_LENGTH:
            fix = "A question of 64 tokens must leave room for some of its context; 384 is usual."
            raise UsageError("--max-length", given=max_length, expected=f"{_LEAST_LENGTH} at least", fix=fix)
        # BERT has 128 of 384; at most half of the context beside a long question.
        stride = min(max_length // 3, (max_length - LONGEST_QUESTION - 3) // 2)
        learning, dev = _files(Path(data_dir) / "squad")
        train, holdout = split_articles(learning, _HOLDOUT_SHARE)
        chosen = drawn([question.id for question in train], limit)

        def rows_of(questions: Sequence[Question]) -> QuestionRows:
            return QuestionRows(
                tuple(questions), encode_windows(reader, questions, max_length=max_length, stride=stride)
            )

        return Data((), rows_of([train[index] for index in chosen]), rows_of(holdout), {"dev": rows_of(dev)})

    def architecture(self, transformer: TransformerConfig, labels: tuple[str, ...], max_length: int) -> Architecture:
        """Return a model with two logits for each token."""
        return Architecture(task=self.name, transformer=transformer, labels=labels, max_length=max_length)

    def predict(self, model: Head, rows: Rows) -> Answers:
        """Return the answers."""
        assert isinstance(model, SpanClassifier)
        assert isinstance(rows, QuestionRows)
        return Answers.of(rows.questions, extract(model, rows.questions, rows.windows))


SQUAD = SquadTask(name="SQuAD")


def learning_questions(data_dir: str | Path) -> tuple[Question, ...]:
    """Return the questions of training set and hold-out."""
    return _files(Path(data_dir) / "squad")[0]


def _files(directory: Path) -> tuple[tuple[Question, ...], tuple[Question, ...]]:
    """Return the questions for training and of dev, without a common article."""
    if (directory / _TRAIN).exists():
        return _several(directory / _TRAIN), read(directory / _DEV)
    if (directory / _ALONE).exists():
        return split_articles(_several(directory / _ALONE), _DEV_SHARE, _DEV_SEED)
    given = Raw("neither" if directory.is_dir() else "no such directory")
    raise DataError(f"{directory}", given=given, expected=f"{_TRAIN} and {_DEV}, or {_ALONE}", fix=FIX)


def _several(path: Path) -> tuple[Question, ...]:
    """Read a file that is split by articles: at least three, for training set, hold-out and dev."""
    questions = read(path)
    articles = len({question.title for question in questions})
    if articles < 3:
        raise DataError(f"{path}", given=Raw(f"{articles} articles"), expected="three at least", fix=FIX)
    return questions
