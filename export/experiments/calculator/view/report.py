"""Everything that is shown of one run."""

from __future__ import annotations

import msgspec

from edge.bundles.expression import tokenize
from edge.bundles.manifest import Measure
from export.papers.calculator.networks import Regressor
from export.papers.calculator.view.attention import Attention, attention_of
from export.papers.calculator.view.errors import Grid, by_terms, grids


class View(msgspec.Struct, frozen=True):
    """What a network does.

    Attributes:
        by_terms: the mean absolute error of expressions of 1 to 8 terms.
        seed: of those expressions.
        answer: to ``expression``.
        attention: in ``expression``; None for a network without attention.
    """

    run: str
    model: str
    grids: tuple[Grid, ...]
    by_terms: tuple[Measure, ...]
    seed: int
    expression: str
    answer: float
    attention: Attention | None


def view_of(run: str, name: str, model: Regressor, expression: str, *, items: int, seed: int) -> View:
    """Return the view of a network; ``items`` and ``seed`` are those of :func:`by_terms`."""
    return View(
        run,
        name,
        grids(model.predict),
        by_terms(model.predict, items=items, seed=seed),
        seed,
        expression,
        float(model.predict(tokenize([expression]))[0, 0]),
        attention_of(model, expression),
    )
