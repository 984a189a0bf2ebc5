"""Evaluation of the stack calculator and its baselines: the share of right answers, and relative errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from edge.bundles.manifest import Measure
from edge.datatypes import Array
from export.papers.calculator.stack.data import Split
from export.training.intervals import mean_measure

#: Above it, FP32 holds no halves, so that rounding an answer changes nothing.
_LARGEST_ROUNDED = 2.0**23
_RIGHT_WITHIN = 1e-5
_ROWS = 250


def evaluate(predict: Callable[[Tensor, Tensor], Tensor], splits: Mapping[str, Split]) -> tuple[Measure, ...]:
    """Measure a predictor on every split but ``train``.

    Metrics: ``right``, see :func:`is_right`, with Wilson's interval; ``median_relative_error`` and
    ``largest_relative_error``, of abs(answer - truth) / max(1, abs(truth)).

    Args:
        predict: maps kinds [n, 64] of int64 and values [n, 64] of float32 to answers [n, 1] or [n].
    """
    measures: list[Measure] = []
    for name, split in splits.items():
        if name == "train":
            continue
        answers = answers_of(predict, split)
        right, errors = is_right(answers, split), relative_errors(answers, split.truth)
        median, largest = (
            Measure(metric=f"{which}_relative_error", split=name, value=float(value), n=len(right))
            for which, value in (("median", np.median(errors)), ("largest", errors.max()))
        )
        measures += [mean_measure("right", name, right), median, largest]
    return tuple(measures)


def answers_of(predict: Callable[[Tensor, Tensor], Tensor], split: Split) -> Array:
    """Return the answers to a split, [n] of float64."""
    with torch.no_grad():
        parts = [
            predict(
                torch.from_numpy(split.kinds[first : first + _ROWS]),
                torch.from_numpy(split.values[first : first + _ROWS]),
            )
            for first in range(0, len(split.truth), _ROWS)
        ]
    answers: Array = torch.cat(parts).reshape(-1).double().numpy()
    return answers


def is_right(answers: Array, split: Split) -> Array:
    """Return which answers are right, [n] of bool.

    If all operands are whole and the truth is at most 2²³, the answer must round to the truth. Every other answer must
    be within 1e-5 of the truth, relative to the truth or to 1, whichever is larger.
    """
    rounds = split.is_whole() & (np.abs(split.truth) <= _LARGEST_ROUNDED)
    near = relative_errors(answers, split.truth) <= _RIGHT_WITHIN
    found: Array = np.where(rounds, np.rint(answers) == split.truth, near)
    return found


def relative_errors(answers: Array, truth: Array) -> Array:
    """Return abs(answer - truth) / max(1, abs(truth)), [n]."""
    errors: Array = np.abs(answers - truth) / np.maximum(1, np.abs(truth))
    return errors
