"""The data of the stack calculator, random expressions from fixed seeds, the same on every machine, and evaluation.

Training expressions have 1 to 4 operands from -5 to 4, of which three in ten have one decimal digit, and parentheses at
most 2 deep. ``val`` has others of the same kind; every choice during training is made on it. Test splits leave that
range by more operands, by deeper parentheses around 8 operands, by larger operands, more digits, or products of 8.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import cache

import msgspec
import numpy as np
import torch
from torch import Tensor

from edge.bundles.arithmetic import evaluate as value_of
from edge.bundles.arithmetic import tokenize
from edge.bundles.manifest import Measure
from edge.datatypes import Array
from edge.errors import InvalidRequest
from export.data import expressions as paper
from export.training.intervals import mean_measure

DESCRIPTION = "random expressions of 1 to 4 operands from -5 to 4 with + - * and parentheses at most 2 deep"
TRAIN_OPERANDS, TRAIN_DEPTH = 4, 2
SIZES = {"train": 10_000, "val": 2_000}
TEST_ITEMS = 500
#: The lengths and depths of the test splits ``operands/N`` and ``depth/N``.
OPERANDS = (4, 5, 6, 8, 12, 16, 24, 32)
DEPTHS = (1, 2, 3, 4, 5, 6, 7)
_DEPTH_OPERANDS = 8
_SECOND_GROUP, _NEGATED_GROUP = 0.3, 0.15
#: Above it, FP32 holds no halves, so that rounding an answer changes nothing.
_LARGEST_ROUNDED = 2.0**23
_RIGHT_WITHIN = 1e-5
_ROWS = 250

#: Draws the text of an operand.
_Operand = Callable[[np.random.Generator], str]


class StackSplit(msgspec.Struct, frozen=True):
    """A part of the data: expressions, kinds and values of their tokens [n, 64], and true values [n] of float64."""

    name: str
    expressions: tuple[str, ...]
    kinds: Array
    values: Array
    truth: Array

    def is_whole(self) -> Array:
        """Return whether each expression has only whole operands, [n] of bool."""
        return np.array(["." not in text for text in self.expressions])


def _whole(low: int, high: int) -> _Operand:
    return lambda random: str(random.integers(low, high + 1))


def _decimal(low: int, high: int, digits: int) -> _Operand:
    scale = 10**digits
    return lambda random: f"{random.integers(low * scale, high * scale + 1) / scale:.{digits}f}"


def _mixed(first: _Operand, second: _Operand, share: float) -> _Operand:
    return lambda random: (second if random.random() < share else first)(random)


_USUAL = _mixed(_whole(-5, 4), _decimal(-5, 4, 1), 0.3)


@cache
def load() -> dict[str, StackSplit]:
    """Return all splits by name."""
    random = np.random.default_rng(0)
    published = {f"paper/{name}": paper.load()[name].expressions for name in ("in_range", "out_of_range", "long")}
    known = {text for texts in published.values() for text in texts}
    operands, depths = range(1, TRAIN_OPERANDS + 1), range(TRAIN_DEPTH + 1)
    drawn = _distinct(random, sum(SIZES.values()), operands, depths, known=known)
    texts = {"train": drawn[: SIZES["train"]], "val": drawn[SIZES["train"] :], **published, **_tests(set(drawn))}
    return {name: split(name, each) for name, each in texts.items()}


def split(name: str, expressions: Collection[str]) -> StackSplit:
    """Return expressions with their tokens and true values."""
    kinds, values = tokenize(tuple(expressions))
    return StackSplit(name, tuple(expressions), kinds, values, np.array([value_of(text) for text in expressions]))


def _tests(known: Collection[str]) -> dict[str, list[str]]:
    def drawn(seed: int, operands: int, depths: range, operand: _Operand = _USUAL, operators: str = "+-*") -> list[str]:
        random = np.random.default_rng(seed)
        return _distinct(random, TEST_ITEMS, range(operands, operands + 1), depths, operand, operators, known)

    flat, nested = range(1), range(TRAIN_DEPTH + 1)
    nonzero = _mixed(_whole(-5, -1), _whole(1, 4), 0.5)
    return {
        **{f"operands/{count}": drawn(100 + count, count, nested) for count in OPERANDS},
        **{f"depth/{depth}": drawn(200 + depth, _DEPTH_OPERANDS, range(depth, depth + 1)) for depth in DEPTHS},
        "operands to 100": drawn(301, TRAIN_OPERANDS, nested, _whole(-100, 100)),
        "3 decimal digits": drawn(302, TRAIN_OPERANDS, nested, _decimal(-5, 4, 3)),
        "products of 8": drawn(303, 8, flat, nonzero, "*"),
    }


def _distinct(
    random: np.random.Generator,
    items: int,
    operands: range,
    depths: range,
    operand: _Operand = _USUAL,
    operators: str = "+-*",
    known: Collection[str] = (),
) -> list[str]:
    """Return distinct expressions that the tokenizer accepts, none of them ``known``, as they are drawn."""
    texts: dict[str, None] = {}
    while len(texts) < items:
        text = _drawn(random, int(random.choice(operands)), int(random.choice(depths)), operand, operators)
        if text in known:
            continue
        try:
            tokenize([text])
        except InvalidRequest:  # some with many operands have too many tokens
            continue
        texts[text] = None
    return list(texts)


def _drawn(random: np.random.Generator, operands: int, depth: int, operand: _Operand, operators: str) -> str:
    """Return an expression with this number of operands whose parentheses are nested exactly ``depth`` deep."""

    def flat(count: int) -> list[str]:
        return [operand(random) for _ in range(count)]

    def joined(items: list[str]) -> str:
        first, *rest = items
        return " ".join([first, *(f"{random.choice(list(operators))} {item}" for item in rest)])

    def group(count: int, depth: int) -> str:
        sign = "-" if random.random() < _NEGATED_GROUP else ""
        return f"{sign}({expression(count, depth)})"

    def expression(count: int, depth: int) -> str:
        if depth == 0:
            return joined(flat(count))
        inside = int(random.integers(min(2, count), count + 1))
        items = flat(count - inside)
        if len(items) >= 2 and random.random() < _SECOND_GROUP:
            items = [*items[2:], group(2, int(random.integers(depth)))]
        items.insert(int(random.integers(len(items) + 1)), group(inside, depth - 1))
        return joined(items)

    return expression(operands, depth)


def evaluate(predict: Callable[[Tensor, Tensor], Tensor], splits: Mapping[str, StackSplit]) -> tuple[Measure, ...]:
    """Measure a predictor on every split but ``train``.

    Metrics: ``right`` with Wilson's interval, see :func:`is_right`; ``median_relative_error`` and
    ``largest_relative_error``, of abs(answer - truth) / max(1, abs(truth)).

    Args:
        predict: maps kinds [n, 64] of int64 and values [n, 64] of float32 to answers [n, 1] or [n].
    """
    measures: list[Measure] = []
    for name, part in splits.items():
        if name == "train":
            continue
        rows = range(0, len(part.truth), _ROWS)
        with torch.no_grad():
            tokens = ([torch.from_numpy(of[row : row + _ROWS]) for of in (part.kinds, part.values)] for row in rows)
            answers: Array = torch.cat([predict(*both) for both in tokens]).reshape(-1).double().numpy()
        right, errors = is_right(answers, part), _relative_errors(answers, part.truth)
        of_errors = {"median": np.median(errors), "largest": errors.max()}
        measures.append(mean_measure("right", name, right))
        measures += [
            Measure(metric=f"{which}_relative_error", split=name, value=float(value), n=len(right))
            for which, value in of_errors.items()
        ]
    return tuple(measures)


def is_right(answers: Array, part: StackSplit) -> Array:
    """Return which answers are right, [n] of bool.

    If all operands are whole and the truth is at most 2²³, the answer must round to the truth. Every other answer must
    be within 1e-5 of the truth, relative to the truth or to 1, whichever is larger.
    """
    rounds = part.is_whole() & (np.abs(part.truth) <= _LARGEST_ROUNDED)
    near = _relative_errors(answers, part.truth) <= _RIGHT_WITHIN
    right: Array = np.where(rounds, np.rint(answers) == part.truth, near)
    return right


def _relative_errors(answers: Array, truth: Array) -> Array:
    errors: Array = np.abs(answers - truth) / np.maximum(1, np.abs(truth))
    return errors
