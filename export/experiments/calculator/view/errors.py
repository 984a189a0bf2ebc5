"""Errors of a calculator: by two operands, and by the number of terms."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from edge.bundles.expression import MAX_TERMS, evaluate, tokenize
from edge.bundles.manifest import Measure
from edge.datatypes import Array
from export.papers.calculator.data import IN_RANGE, join, load
from export.training.intervals import interval, mean

Predict = Callable[[Array], Array]

#: Both operands of a grid, and the third one where there is one.
OPERANDS = range(-10, 11)
THIRD = 2
FORMS = ("a + b", "a - b", *(f"a {first} b {second} {THIRD}" for first in "+-" for second in "+-"))


class Grid(msgspec.Struct, frozen=True):
    """Answers less truths of a form, such as ``a - b``: row for a, column for b, both from -10 to 10."""

    form: str
    errors: list[list[float]]

    @property
    def array(self) -> Array:
        """The errors, [21, 21]."""
        return np.array(self.errors)


def grids(predict: Predict) -> tuple[Grid, ...]:
    """Return the errors of a predictor for every form."""
    found = []
    for form in FORMS:
        texts = [form.replace("a", str(a)).replace("b", str(b)) for a in OPERANDS for b in OPERANDS]
        errors = _errors(predict, texts).reshape(len(OPERANDS), len(OPERANDS))
        found.append(Grid(form, errors.round(5).tolist()))
    return tuple(found)


def by_terms(predict: Predict, *, items: int, seed: int) -> tuple[Measure, ...]:
    """Return the mean absolute error of expressions of 1 to 8 terms, each with its bootstrap interval.

    Args:
        items: at most so many of each length; there are fewer of 1 and 2 terms.
        seed: of their choice.
    """
    measures = []
    for terms in range(1, MAX_TERMS + 1):
        errors = np.abs(_errors(predict, new_expressions(terms, items, seed)))
        bounds = interval(mean, errors)
        measures.append(Measure("mae", f"terms/{terms}", float(errors.mean()), n=len(errors), interval=bounds))
    return tuple(measures)


def new_expressions(terms: int, items: int, seed: int) -> list[str]:
    """Return different expressions of whole operands from -5 to 4 that neither ``train`` nor ``val`` holds.

    Args:
        items: their number; all of them where there are no more.
    """
    generator = np.random.default_rng((seed, terms))
    splits = load()
    known = {text for name in ("train", "val") for text in splits[name].expressions}
    every = len(IN_RANGE) ** terms * 2 ** (terms - 1) - sum((text.count(" ") // 2 + 1) == terms for text in known)
    texts: dict[str, None] = {}
    while len(texts) < min(items, every):
        operands = generator.integers(IN_RANGE.start, IN_RANGE.stop, terms)
        text = join(operands, generator.choice(["+", "-"], terms - 1))
        if text not in known:
            texts[text] = None
    return list(texts)


def _errors(predict: Predict, texts: list[str]) -> Array:
    truth = np.array([evaluate(text) for text in texts])
    errors: Array = predict(tokenize(texts))[:, 0].astype(np.float64) - truth
    return errors
