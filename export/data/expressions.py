"""The calculator's data, exactly as the public data of paper 000 are drawn: NumPy's legacy generator, seed 42.

===============  ======  =====================================================================================
split            items   what
===============  ======  =====================================================================================
train            1,907   of 2,543 distinct ``a op b op c`` with operands -5 … 4, three quarters at random
val              636     the other quarter; every choice during training is made on it
in_range         1,457   the expressions of that kind that were never drawn
out_of_range     2,048   all ``a op b op c`` with operands -8 … -5 and 5 … 8
long             700     100 each of 2, 3, … 8 terms, in that order, with operands -5 … 5: 5 is new, and some of
                         those with 2 or 3 terms are not longer, or even in train
===============  ======  =====================================================================================

The original keeps its 2,543 items in the order of a Python set, which differs from process to process. Here they are
sorted as text (by code point) before the same generator permutes them; the first 1,907 train.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import product

import msgspec
import numpy as np

from edge.bundles.expression import evaluate, tokenize
from edge.datatypes import Array
from export.errors import DataError

DESCRIPTION = "paper 000's arithmetic expressions: NumPy legacy seed 42, sorted as text, then permuted"
SIZES = {"train": 1907, "val": 636, "in_range": 1457, "out_of_range": 2048, "long": 700}
UNSEEN_OPERAND = 5
#: Operands of the training items.
IN_RANGE = range(-5, 5)
#: Numbers of terms of the long items.
LONG_TERMS = range(2, 9)

_DRAWS = 4000
_OUT_OF_RANGE = (*range(-8, -4), *range(5, 9))
_LONG_PER_LENGTH = 100


class Split(msgspec.Struct, frozen=True):
    """A part of the data: expressions, their tokens [n, 15] and their true values [n], both float32."""

    name: str
    expressions: tuple[str, ...]
    tokens: Array
    truth: Array

    def resampled(self, seed: int) -> Split:
        """Return a bootstrap resample of the items."""
        rows = np.random.default_rng(seed).integers(0, len(self.truth), len(self.truth))
        return Split(self.name, tuple(self.expressions[row] for row in rows), self.tokens[rows], self.truth[rows])

    @property
    def terms(self) -> Array:
        """The number of terms of each expression, [n]."""
        return np.array([(len(text.split()) + 1) // 2 for text in self.expressions])

    @property
    def has_unseen_operand(self) -> Array:
        """Whether each expression holds the operand 5, which no training item does, [n] of bool."""
        return np.array([str(UNSEEN_OPERAND) in text.split() for text in self.expressions])


@cache
def load() -> dict[str, Split]:
    """Return all splits by name; the same at every call and on every machine.

    Raises:
        DataError: the legacy generator of the installed NumPy gives other numbers.
    """
    random = np.random.RandomState(42)
    drawn = sorted(_draw_three_terms(random))
    long = [_random_expression(random, terms) for terms in LONG_TERMS for _ in range(_LONG_PER_LENGTH)]
    order = random.permutation(len(drawn))
    train = order[: SIZES["train"]]
    val = order[SIZES["train"] :]
    known = set(drawn)
    texts: dict[str, Iterable[str]] = {
        "train": (drawn[index] for index in train),
        "val": (drawn[index] for index in val),
        "in_range": (text for text in _three_terms(IN_RANGE) if text not in known),
        "out_of_range": _three_terms(_OUT_OF_RANGE),
        "long": long,
    }
    splits = {name: _split(name, tuple(items)) for name, items in texts.items()}
    sizes = {name: len(split.expressions) for name, split in splits.items()}
    if sizes != SIZES:
        fix = f"Install another NumPy: the legacy generator of {np.__version__} is not the documented one."
        raise DataError("sizes of the calculator's splits", given=sizes, expected=str(SIZES), fix=fix)
    return splits


def _draw_three_terms(random: np.random.RandomState) -> set[str]:
    operands = [(random.rand(_DRAWS) * 10).astype(int) - 5 for _ in range(3)]
    return {_join(items, _operators(random.rand(1)[0])) for items in zip(*operands, strict=True)}


def _operators(uniform: float) -> str:
    # The bounds, <= in the third among them, are the original's.
    if uniform < 0.25:
        return "++"
    if uniform < 0.5:
        return "+-"
    return "--" if uniform <= 0.75 else "-+"


def _random_expression(random: np.random.RandomState, terms: int) -> str:
    pairs = [(random.randint(-5, 6), str(random.choice(["+", "-"]))) for _ in range(terms - 1)]
    operands = [*(operand for operand, _ in pairs), random.randint(-5, 6)]
    return _join(operands, "".join(operator for _, operator in pairs))


def _three_terms(operands: Sequence[int]) -> Iterable[str]:
    triples = product(operands, repeat=3)
    return (_join(items, pair) for items, pair in product(triples, ("++", "+-", "--", "-+")))


def _join(operands: Iterable[int], operators: Iterable[str]) -> str:
    first, *rest = operands
    return " ".join([str(first), *(f"{operator} {operand}" for operator, operand in zip(operators, rest, strict=True))])


def _split(name: str, expressions: tuple[str, ...]) -> Split:
    truth = np.array([evaluate(text) for text in expressions], dtype=np.float32)
    return Split(name, expressions, tokenize(expressions), truth)
