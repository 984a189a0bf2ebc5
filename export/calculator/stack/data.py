"""The data of the stack calculator: random expressions from fixed seeds, the same on every machine.

Training expressions have 1 to 4 operands from -5 to 4, of which three in ten have one decimal digit, and parentheses at
most 2 deep. ``val`` has others of the same kind; every choice during training is made on it. Test splits leave that
range by more operands, by deeper parentheses around 8 operands, by larger operands, more digits, or products of 8.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache

import msgspec
import numpy as np

from edge.bundles.arithmetic import evaluate, tokenize
from edge.datatypes import Array
from edge.errors import InvalidRequest
from export.papers.calculator import data as paper
from export.papers.calculator.stack.expressions import Operand, decimal, draw, mixed, whole

DESCRIPTION = "random expressions of 1 to 4 operands from -5 to 4 with + - * and parentheses at most 2 deep"
TRAIN_OPERANDS, TRAIN_DEPTH = 4, 2
SIZES = {"train": 10_000, "val": 2_000}
TEST_ITEMS = 500

#: The lengths and depths of the test splits ``operands/N`` and ``depth/N``.
OPERANDS = (4, 5, 6, 8, 12, 16, 24, 32)
DEPTHS = (1, 2, 3, 4, 5, 6, 7)
_DEPTH_OPERANDS = 8
_USUAL = mixed(whole(-5, 4), decimal(-5, 4, 1), 0.3)


class Split(msgspec.Struct, frozen=True):
    """A part of the data: expressions, kinds and values of their tokens [n, 64], and true values [n] of float64."""

    name: str
    expressions: tuple[str, ...]
    kinds: Array
    values: Array
    truth: Array

    def is_whole(self) -> Array:
        """Return whether each expression has only whole operands, [n] of bool."""
        return np.array(["." not in text for text in self.expressions])


@cache
def load() -> dict[str, Split]:
    """Return all splits by name."""
    random = np.random.default_rng(0)
    published = {f"paper/{name}": paper.load()[name].expressions for name in ("in_range", "out_of_range", "long")}
    known = {text for texts in published.values() for text in texts}
    operands, depths = range(1, TRAIN_OPERANDS + 1), range(TRAIN_DEPTH + 1)
    drawn = _distinct(random, sum(SIZES.values()), operands, depths, known=known)
    texts = {"train": drawn[: SIZES["train"]], "val": drawn[SIZES["train"] :], **published, **_tests(set(drawn))}
    return {name: split(name, each) for name, each in texts.items()}


def split(name: str, expressions: Collection[str]) -> Split:
    """Return expressions with their tokens and true values."""
    kinds, values = tokenize(tuple(expressions))
    return Split(name, tuple(expressions), kinds, values, np.array([evaluate(text) for text in expressions]))


def _tests(known: Collection[str]) -> dict[str, list[str]]:
    def drawn(seed: int, operands: int, depths: range, operand: Operand = _USUAL, operators: str = "+-*") -> list[str]:
        random = np.random.default_rng(seed)
        return _distinct(random, TEST_ITEMS, range(operands, operands + 1), depths, operand, operators, known)

    flat, nested = range(1), range(TRAIN_DEPTH + 1)
    nonzero = mixed(whole(-5, -1), whole(1, 4), 0.5)
    return {
        **{f"operands/{count}": drawn(100 + count, count, nested) for count in OPERANDS},
        **{f"depth/{depth}": drawn(200 + depth, _DEPTH_OPERANDS, range(depth, depth + 1)) for depth in DEPTHS},
        "operands to 100": drawn(301, TRAIN_OPERANDS, nested, whole(-100, 100)),
        "3 decimal digits": drawn(302, TRAIN_OPERANDS, nested, decimal(-5, 4, 3)),
        "products of 8": drawn(303, 8, flat, nonzero, "*"),
    }


def _distinct(
    random: np.random.Generator,
    items: int,
    operands: range,
    depths: range,
    operand: Operand = _USUAL,
    operators: str = "+-*",
    known: Collection[str] = (),
) -> list[str]:
    """Return distinct expressions, none of them ``known``, in the order in which they are drawn."""
    found: dict[str, None] = {}
    while len(found) < items:
        text = draw(random, int(random.choice(operands)), int(random.choice(depths)), operand, operators)
        if text not in known and _fits(text):
            found[text] = None
    return list(found)


def _fits(text: str) -> bool:
    """Return whether the tokenizer accepts an expression: some with many operands have too many tokens."""
    try:
        tokenize([text])
    except InvalidRequest:
        return False
    return True
