"""The plan with the least loss among those that are fast enough.

The loss of a layer is the change of the model's outputs when only that layer is reduced. Losses are assumed to add up
over layers and over the two halves of a layer; times are those of whole layers, and add up over these. A layer may also
be left out, with its normalisations. Dynamic programming over time then finds the least sum, as in SPDY and ZipLM
(arXiv 2302.04089).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from edge.datatypes import Array
from edge.errors import Raw
from export.errors import PlanError
from export.models.transformer import LayerShape
from export.reduce.grid import Times
from export.reduce.losses import Losses
from export.reduce.plan import words_of

_BINS = 4000


def choose_shapes(
    originals: Sequence[LayerShape],
    losses: Sequence[Losses],
    times: Times,
    target_speedup: float,
    subject: str = "target speed-up",
) -> list[LayerShape | None]:
    """Return the best shape of each layer; None leaves it out, but at least one stays.

    Args:
        originals: the shape of each layer before the reduction.
        times: of the options.
        subject: of the error.

    Raises:
        PlanError: no plan is that fast; the message has the fastest one and its speed-up.
    """
    grid = times.grid
    pairs = [(a, f) for a in range(len(grid.attention)) for f in range(len(grid.feed_forward))]
    time = np.append(times.layers.flatten(), 0.0)
    table = np.array([[*(one.attention[a] + one.feed_forward[f] for a, f in pairs), one.layer] for one in losses])

    def shapes_of(chosen: Sequence[int]) -> list[LayerShape | None]:
        return [
            grid.shape(*pairs[option], layer) if option < len(pairs) else None
            for option, layer in zip(chosen, originals, strict=True)
        ]

    before = times.of(originals)
    fastest = _fastest(table, time)
    most = before / times.of(shapes_of(fastest))
    if target_speedup > most:
        given = Raw(f"{target_speedup:g}x")
        expected = f"at most {most:.2f}x, with {words_of(shapes_of(fastest))}"
        raise PlanError(subject, given=given, expected=expected, fix="Ask for less, or start from less.")
    return shapes_of(_chosen(table, time, before / target_speedup - times.rest) or fastest)


def check_target(
    originals: Sequence[LayerShape], times: Times, target_speedup: float, subject: str = "target speed-up"
) -> None:
    """Raise the PlanError of :func:`choose_shapes` for any losses, before they are measured, which takes minutes."""
    grid = times.grid
    possible = [
        Losses(
            [0.0 if heads <= one.num_heads and rank <= one.head_dim else math.inf for heads, rank in grid.attention],
            [0.0 if units <= one.ffn_dim else math.inf for units in grid.feed_forward],
            0.0,
        )
        for one in originals
    ]
    choose_shapes(originals, possible, times, target_speedup, subject)


def _fastest(table: Array, time: Array) -> list[int]:
    """Return the fastest possible option of each layer; one layer stays, where that costs the least time."""
    possible = np.where(np.isfinite(table), time, np.inf)
    chosen = possible.argmin(axis=1)
    if (chosen == len(time) - 1).all():
        layer, option = np.unravel_index(possible[:, :-1].argmin(), possible[:, :-1].shape)
        chosen[layer] = option
    return [int(option) for option in chosen]


def _chosen(table: Array, time: Array, budget: float) -> list[int] | None:
    """Return :func:`least_loss`, of the plans with a layer at least."""
    left_out = len(time) - 1
    chosen = least_loss(table, time, budget)
    if chosen is None or any(option != left_out for option in chosen):
        return chosen
    kept = []
    for layer in range(len(table)):
        one = table.copy()
        one[layer, left_out] = np.inf
        kept.append(least_loss(one, time, budget))
    return min(filter(None, kept), key=lambda plan: sum(table[range(len(plan)), plan]), default=None)


def least_loss(losses: Array, times: Array, budget: float, bins: int = _BINS) -> list[int] | None:
    """Return one option for each layer, with the least sum of losses within a budget of time.

    It is None if the fastest options fit, but not when every time is rounded up to a bin.

    Args:
        losses: [layers, options].
        times: [options], the same for every layer.
        budget: at least the sum of the least times.
        bins: resolution of the budget; times are rounded up to a bin.
    """
    layers, options = losses.shape
    # The tolerance keeps a time that is a whole number of bins from being rounded up to the next.
    cost = np.ceil(times * bins / budget - 1e-6).astype(int)
    best = np.zeros(bins + 1)  # the least loss of the layers so far, within each number of bins
    choices = np.zeros((layers, bins + 1), dtype=int)
    for layer in range(layers):
        within = np.full((options, bins + 1), np.inf)
        for option in range(options):
            if cost[option] <= bins:
                within[option, cost[option] :] = best[: bins + 1 - cost[option]] + losses[layer, option]
        choices[layer], best = within.argmin(axis=0), within.min(axis=0)
    if not np.isfinite(best[bins]):
        return None
    chosen, left = [], bins
    for layer in reversed(range(layers)):
        chosen.append(int(choices[layer, left]))
        left -= cost[chosen[-1]]
    return chosen[::-1]
