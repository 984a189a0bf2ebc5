"""SQuAD as a task: questions in windows, answers that are kept as text, articles that are never torn apart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from edge.datatypes import Array
from edge.errors import Literally, UsageError
from export.errors import DataError
from export.heads import SpanClassifier
from export.tasks.answers import Answers, extract
from export.tasks.holdout import drawn
from export.tasks.models import Architecture
from export.tasks.objectives import Head
from export.tasks.squad import FIX, LONGEST_QUESTION, Question, Windows, encode_windows, read, split_articles
from export.tasks.task import Data, Reader, TextTask
from export.tasks.tokens import Batch, Rows
from export.transformer import TransformerConfig

#: The official files, and one that is freely had and has no training set of its own.
_TRAIN, _DEV, _ALONE = "train-v1.1.json", "dev-v1.1.json", "xquad.en.json"
_DEV_SHARE, _HOLDOUT_SHARE = 0.25, 0.1
#: Another seed than the hold-out's, so that neither split depends on the other.
_DEV_SEED = 1
#: Tokens of context that a window has room for at least, beside the longest question and three special tokens.
_LEAST_CONTEXT = 29
_LEAST_LENGTH = LONGEST_QUESTION + 3 + _LEAST_CONTEXT


class Asked(msgspec.Struct, frozen=True):
    """Questions and the windows that they are answered from; a row is a window."""

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
            data_dir: holds ``squad/``.
            max_length: tokens of a window; neighbours share up to a third of them.
        """
        assert isinstance(reader, Tokenizer)
        if max_length < _LEAST_LENGTH:
            fix = "A question of 64 tokens must leave room for some of its context; 384 is usual."
            raise UsageError("--max-length", given=max_length, expected=f"{_LEAST_LENGTH} at least", fix=fix)
        # As BERT's 128 of 384, and never more than half of what a long question leaves.
        stride = min(max_length // 3, (max_length - LONGEST_QUESTION - 3) // 2)
        learning, dev = _files(Path(data_dir) / "squad")
        train, holdout = split_articles(learning, _HOLDOUT_SHARE)
        chosen = drawn([question.id for question in train], limit)

        def asked(questions: Sequence[Question]) -> Asked:
            return Asked(tuple(questions), encode_windows(reader, questions, max_length=max_length, stride=stride))

        return Data((), asked([train[index] for index in chosen]), asked(holdout), {"dev": asked(dev)})

    def architecture(self, transformer: TransformerConfig, labels: tuple[str, ...], max_length: int) -> Architecture:
        """Return a model with two logits for each token."""
        return Architecture(task=self.name, transformer=transformer, labels=labels, max_length=max_length)

    def predict(self, model: Head, rows: Rows) -> Answers:
        """Return the answers."""
        assert isinstance(model, SpanClassifier)
        assert isinstance(rows, Asked)
        return Answers.of(rows.questions, extract(model, rows.questions, rows.windows))


SQUAD = SquadTask(name="SQuAD")


def _files(directory: Path) -> tuple[tuple[Question, ...], tuple[Question, ...]]:
    """Return the questions to learn from, and those of dev; no article is in both."""
    if (directory / _TRAIN).exists():
        return _several(directory / _TRAIN), read(directory / _DEV)
    if (directory / _ALONE).exists():
        return split_articles(_several(directory / _ALONE), _DEV_SHARE, _DEV_SEED)
    given = Literally("neither" if directory.is_dir() else "no such directory")
    raise DataError(f"{directory}", given=given, expected=f"{_TRAIN} and {_DEV}, or {_ALONE}", fix=FIX)


def _several(path: Path) -> tuple[Question, ...]:
    """Read a file that is split by its articles: three at least, for training set, hold-out and dev."""
    questions = read(path)
    articles = len({question.title for question in questions})
    if articles < 3:
        raise DataError(f"{path}", given=Literally(f"{articles} articles"), expected="three at least", fix=FIX)
    return questions
