"""SQuAD as a task: splits by article, answers as text, and the official metrics, exact match and F1 of tokens."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
from tokenizers import Tokenizer

from edge.datatypes import Array
from edge.errors import UsageError
from export.data.examples import HOLDOUT_SHARE, Examples, drawn
from export.data.squad import LONGEST_QUESTION, Question, Windows, encode_windows, read_splits, split_articles
from export.data.tokens import Rows, sorted_batches
from export.finetune.imported import ImportedTask
from export.finetune.models import Architecture, OpenedModel
from export.finetune.predictions import Predicted
from export.finetune.task import Data, Reader, TextTask
from export.models.heads import Head
from export.models.transformer import TransformerConfig
from export.training.device import model_device

#: Room for the longest question, three special tokens, and 29 tokens of context.
_LEAST_LENGTH = LONGEST_QUESTION + 3 + 29
_BATCH = 16
_PUNCTUATION = str.maketrans("", "", string.punctuation)


class Answers(Predicted, frozen=True):
    """Answers to questions, [n] each.

    Attributes:
        questions: their identifiers.
        exact_match: 0 or 1, from :func:`exact_match`.
        f1: 0 to 1, from :func:`token_f1`.
    """

    questions: Array
    texts: Array
    exact_match: Array
    f1: Array

    @classmethod
    def of(cls, questions: Sequence[Question], texts: Sequence[str]) -> Answers:
        """Return answers with their correctness."""
        right = [[answer.text for answer in question.answers] for question in questions]
        pairs = list(zip(texts, right, strict=True))
        return cls(
            np.array([question.id for question in questions], dtype=np.str_),
            np.array(texts, dtype=np.str_),
            np.array([exact_match(*pair) for pair in pairs]),
            np.array([token_f1(*pair) for pair in pairs]),
        )

    def of_items(self, metric: str) -> Array:
        return np.asarray(getattr(self, metric))


class SquadTask(TextTask, frozen=True, kw_only=True):
    """SQuAD v1.1, or XQuAD's English part, of which a quarter of the articles becomes dev."""

    origin: str = "questions in SQuAD v1.1 JSON"
    metrics: tuple[str, ...] = ("exact_match", "f1")
    headline: str = "f1"

    def prepare(self, data_dir: str | Path, reader: Reader, *, max_length: int, limit: int | None) -> Data:
        """Read the files, hold a tenth of the articles out, and cut contexts into windows that share up to a third."""
        assert isinstance(reader, Tokenizer)
        if max_length < _LEAST_LENGTH:
            fix = "A question of 64 tokens must leave room for some of its context; 384 is usual."
            raise UsageError("--max-length", given=max_length, expected=f"{_LEAST_LENGTH} at least", fix=fix)
        # BERT has 128 of 384; at most half of the context beside a long question.
        stride = min(max_length // 3, (max_length - LONGEST_QUESTION - 3) // 2)
        learning, dev = read_splits(Path(data_dir) / "squad")
        train, holdout = split_articles(learning, HOLDOUT_SHARE)
        chosen = [train[index] for index in drawn([question.id for question in train], limit)]
        rows = (encode_windows(reader, part, max_length=max_length, stride=stride) for part in (chosen, holdout, dev))
        return Data((), next(rows), next(rows), {"dev": next(rows)})

    def architecture(self, transformer: TransformerConfig, labels: tuple[str, ...], max_length: int) -> Architecture:
        return Architecture(task=self.name, transformer=transformer, labels=labels, max_length=max_length)

    def predict(self, model: Head, rows: Rows) -> Answers:
        assert isinstance(rows, Windows)
        return Answers.of(rows.questions, extract(model, rows))


SQUAD = SquadTask(name="SQuAD")


class SquadQuestions(ImportedTask, frozen=True):
    """The task to answer as a run on SQuAD, on the questions that it may learn from."""

    @property
    def origin(self) -> str:
        return SQUAD.origin

    def items(self, data: Path) -> Examples:
        """Return questions with their contexts from a data directory, without targets."""
        texts = tuple((entry.question, entry.context) for entry in read_splits(data / "squad")[0])
        return Examples(texts, np.zeros(len(texts), np.int64))


def as_imported(found: OpenedModel) -> OpenedModel:
    """Return a run on SQuAD described as an imported model that answers questions, and any other one as it is."""
    if found.architecture is None or found.architecture.task != SQUAD.name:
        return found
    described = msgspec.structs.replace(found.architecture, task="question-answering", pair=True)
    return msgspec.structs.replace(found, architecture=described)


def extract(model: Head, windows: Windows, *, n_best: int = 20, longest: int = 30) -> tuple[str, ...]:
    """Return the answer to each question: the best span of all its windows, by the sum of the two logits.

    Args:
        model: of spans.
        n_best: number of first and of last tokens of a window that are combined.
        longest: most tokens of an answer.

    Returns:
        A part of each question's context; empty if no window has a token of it.
    """
    best: list[tuple[float, str]] = [(-np.inf, "")] * len(windows.questions)
    device = model_device(model)
    with torch.inference_mode():
        for indices in sorted_batches(windows.lengths, _BATCH):
            batch = windows.batch(indices).to(device)
            starts, ends = (logits.cpu().numpy() for logits in model(batch.inputs, batch.mask, batch.segments))
            for row, window in enumerate(indices):
                question = windows.question_rows[window]
                score, (begin, stop) = _best_span(starts[row], ends[row], windows.offsets[window], n_best, longest)
                if score > best[question][0]:
                    best[question] = score, windows.questions[question].context[begin:stop]
    return tuple(text for _, text in best)


def exact_match(answer: str, right: Sequence[str]) -> float:
    """Return 1 if an answer is one of the right ones after :func:`normalised`, else 0."""
    return float(normalised(answer) in map(normalised, right))


def token_f1(answer: str, right: Sequence[str]) -> float:
    """Return the largest F1 of an answer's words against a right answer, after :func:`normalised`."""
    words, others = normalised(answer).split(), [normalised(text).split() for text in right]
    shared = [sum((Counter(words) & Counter(other)).values()) for other in others]
    return max(
        2 * both / (len(words) + len(other)) if both else 0.0 for both, other in zip(shared, others, strict=True)
    )


def normalised(text: str) -> str:
    """Return a text in lower case without punctuation, articles and double spaces, as in the official script."""
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_PUNCTUATION)).split())


def _best_span(start: Array, end: Array, offsets: Array, n_best: int, longest: int) -> tuple[float, tuple[int, int]]:
    """Return the largest sum of a first and a last logit, [T] each, in the context, and its characters."""
    context = np.flatnonzero(offsets[:, 0] >= 0)
    firsts, lasts = (context[np.argsort(-logits[context], kind="stable")[:n_best]] for logits in (start, end))
    length = lasts[None, :] - firsts[:, None] + 1
    sums = np.where((length >= 1) & (length <= longest), start[firsts][:, None] + end[lasts][None, :], -np.inf)
    if not np.isfinite(sums).any():
        return -np.inf, (0, 0)
    row, column = np.unravel_index(sums.argmax(), sums.shape)
    return float(sums[row, column]), (int(offsets[firsts[row], 0]), int(offsets[lasts[column], 1]))
