"""Answers of a model to questions, and the official metrics of SQuAD v1.1: exact match and F1 of tokens."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

from edge.bundles.manifest import Measure
from edge.datatypes import Array
from export.data.squad import Question, Windows
from export.data.tokens import sorted_batches
from export.finetune.predictions import Predicted
from export.models.heads import SpanClassifier
from export.training.device import model_device
from export.training.intervals import mean_measure

_BATCH = 16
_PUNCTUATION = str.maketrans("", "", string.punctuation)


class Answers(Predicted, frozen=True):
    """Answers to questions, and their correctness.

    Attributes:
        exact_match: 0 or 1 for each, from :func:`exact_match`.
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

    def score(self, metric: str) -> float:
        """Return the mean of ``exact_match`` or ``f1``, 0 to 1."""
        return float(getattr(self, metric).mean())

    def measures(self, metrics: Sequence[str], split: str) -> tuple[Measure, ...]:
        """Return means with their intervals."""
        return tuple(mean_measure(metric, split, getattr(self, metric)) for metric in metrics)


def extract(
    model: SpanClassifier, questions: Sequence[Question], windows: Windows, *, n_best: int = 20, longest: int = 30
) -> tuple[str, ...]:
    """Return the answer to each question: the best span of all its windows, by the sum of the two logits.

    Args:
        n_best: number of first and of last tokens of a window that are combined.
        longest: most tokens of an answer.

    Returns:
        A part of each question's context; empty if no window has a token of it.
    """
    best: list[tuple[float, str]] = [(-np.inf, "")] * len(questions)
    device = model_device(model)
    with torch.inference_mode():
        for indices in sorted_batches(windows.rows.lengths, _BATCH):
            batch = windows.rows.batch(indices).to(device)
            logits = model(batch.inputs, batch.mask, batch.segments)
            for place, window in enumerate(indices):
                start, end = (one[place].cpu().numpy() for one in logits)
                question = windows.questions[window]
                score, (begin, stop) = _best_span(start, end, windows.offsets[window], n_best, longest)
                if score > best[question][0]:
                    best[question] = score, questions[question].context[begin:stop]
    return tuple(text for _, text in best)


def exact_match(answer: str, right: Sequence[str]) -> float:
    """Return 1 if an answer is one of the right ones after :func:`normalised`, else 0."""
    return float(any(normalised(answer) == normalised(one) for one in right))


def token_f1(answer: str, right: Sequence[str]) -> float:
    """Return the largest F1 of an answer's words against a right answer, after :func:`normalised`."""
    return max(_f1(normalised(answer).split(), normalised(one).split()) for one in right)


def normalised(text: str) -> str:
    """Return a text in lower case without punctuation, articles and double spaces, as in the official script."""
    words = re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_PUNCTUATION))
    return " ".join(words.split())


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


def _f1(words: Sequence[str], right: Sequence[str]) -> float:
    shared = sum((Counter(words) & Counter(right)).values())
    return 2 * shared / (len(words) + len(right)) if shared else 0.0
