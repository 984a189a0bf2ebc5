"""Further training data, which share no item with the validation split or with the splits that networks are tested on.

==================  ======  ================================================================================
data                items   what
==================  ======  ================================================================================
floats              1,907   ``a op b op c`` with operands U(-5, 5), rounded to two decimals
dev, out of range   192     of all 256 ``a op b op c`` with the operands -10, -9, 9 and 10; ``out_of_range``
                            has none of them
dev, long           375     of 500, 100 each of 4, 5, … 8 terms with operands -5 … 5, none of them in ``long``
==================  ======  ================================================================================

The other quarter of each dev split chooses the epoch of a run that learns from the three.
"""

from __future__ import annotations

from functools import cache

import msgspec
import numpy as np

from export.papers.calculator.data import SIZES, Split, load, random_expression, split_of, three_terms

_SEED = 7
_DEV_OPERANDS = (-10, -9, 9, 10)
_DEV_TERMS = range(4, 9)
_DEV_PER_LENGTH = 100


class Dev(msgspec.Struct, frozen=True):
    """Splits beside those that the paper trains on: ``learnt`` to learn from, ``choice`` to choose the epoch by."""

    learnt: dict[str, Split]
    choice: dict[str, Split]


@cache
def floats() -> Split:
    """Return expressions of three terms with operands that are no whole numbers, or seldom."""
    generator = np.random.default_rng(_SEED)
    operands = generator.uniform(-5, 5, (SIZES["train"], 3))
    operators = generator.choice(["+", "-"], (SIZES["train"], 2))
    return split_of(
        "floats",
        tuple(f"{a:.2f} {o} {b:.2f} {p} {c:.2f}" for (a, b, c), (o, p) in zip(operands, operators, strict=True)),
    )


@cache
def dev() -> Dev:
    """Return the dev splits ``out_of_range`` and ``long``."""
    random = np.random.RandomState(_SEED)
    known = {*load()["long"].expressions}
    long: dict[str, None] = {}
    for terms in _DEV_TERMS:
        wanted = len(long) + _DEV_PER_LENGTH
        while len(long) < wanted:
            text = random_expression(random, terms)
            if text not in known:
                long[text] = None
    found = {"out_of_range": list(three_terms(_DEV_OPERANDS)), "long": list(long)}
    learnt, choice = {}, {}
    for name, texts in found.items():
        order = random.permutation(len(texts))
        quarter = len(texts) // 4
        choice[name] = split_of(f"{name} dev, choice", tuple(texts[row] for row in order[:quarter]))
        learnt[name] = split_of(f"{name} dev", tuple(texts[row] for row in order[quarter:]))
    return Dev(learnt, choice)
