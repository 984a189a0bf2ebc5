"""The plan with the least loss among those that are fast enough.

The loss of a layer is the change of the model's outputs when only that layer is reduced. Losses are assumed to add up
over layers and over the two halves of a layer; times are those of whole layers, and add up over these. A layer may also
be left out, with its normalisations. Dynamic programming over time then finds the least sum, as in SPDY and ZipLM
(arXiv 2302.04089).
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from edge.datatypes import Array
from edge.errors import Raw
from export.data.tokens import Batch
from export.errors import PlanError
from export.finetune.objectives import outputs_of
from export.models.heads import Head
from export.models.transformer import LayerShape
from export.reduce.calibration import attention_statistics, feed_forward_statistics
from export.reduce.grid import Grid, Times
from export.reduce.states import after_attention, after_feed_forward, layers_of
from export.reduce.sublayers import AttentionReducer, FeedForwardReducer, with_attention, with_feed_forward

_BINS = 4000


class Losses(NamedTuple):
    """Losses of each option for the halves of a layer, which add up, and of leaving the layer out."""

    attention: list[float]
    feed_forward: list[float]
    layer: float = math.inf

    def of(self, grid: Grid, shape: LayerShape | None) -> float:
        """Return the loss of a shape; None leaves the layer out."""
        if shape is None:
            return self.layer
        attention, feed_forward = grid.find(shape)
        return self.attention[attention] + self.feed_forward[feed_forward]


class LossMeter:
    """Measures the losses of one layer after the other, from the first on.

    Args:
        states: input of the first layer, from :func:`export.reduce.states.embedded`.
    """

    def __init__(self, model: Head, batches: Sequence[Batch], states: list[Tensor], grid: Grid) -> None:
        self._batches, self._states, self._grid = batches, states, grid
        self._layers, self._shapes = layers_of(model.transformer), model.transformer.config.layers
        with torch.no_grad():
            self._wanted = [outputs_of(model, batch) for batch in batches]
        # The same head and later layers, after layers with known outputs.
        self._known = _Known()
        self._tail = copy.deepcopy(model).eval()

    def measure(self, number: int) -> Losses:
        """Return the losses of each option for layer ``number``, and advance the states to the next layer.

        The loss of a shape that the layer does not fit into is infinite.
        """
        layer, shape = self._layers[number], self._shapes[number]
        self._tail.transformer.layers = nn.ModuleList([self._known, *self._layers[number + 1 :]])
        after = after_attention(layer, self._states, self._batches)
        own = self._grid.find(shape)
        attention_losses, feed_forward_losses = (
            [0.0 if option == index else math.inf for option in range(len(options))]
            for index, options in zip(own, self._grid, strict=True)
        )
        if layer.attention is not None:
            statistics, _ = attention_statistics(layer, self._states, self._batches)
            attention = AttentionReducer(layer.attention, statistics)
            for option, (heads, rank) in enumerate(self._grid.attention):
                if option != own[0] and heads <= shape.num_heads and rank <= shape.head_dim:
                    smaller = with_attention(layer, attention.reduced(heads, rank))
                    halfway = after_attention(smaller, self._states, self._batches)
                    attention_losses[option] = self._loss(after_feed_forward(smaller, halfway))
        if layer.feed_forward is not None:
            feed_forward = FeedForwardReducer(layer.feed_forward, feed_forward_statistics(layer, after, self._batches))
            for option, units in enumerate(self._grid.feed_forward):
                if units < shape.ffn_dim:
                    smaller = with_feed_forward(layer, feed_forward.reduced(units))
                    feed_forward_losses[option] = self._loss(after_feed_forward(smaller, after))
        left_out = self._loss(self._states)
        self._states = after_feed_forward(layer, after)
        return Losses(attention_losses, feed_forward_losses, left_out)

    def skip(self, number: int) -> None:
        """Advance the states beyond layer ``number`` without measuring it."""
        layer = self._layers[number]
        self._states = after_feed_forward(layer, after_attention(layer, self._states, self._batches))

    def _loss(self, states: Sequence[Tensor]) -> float:
        """Return the divergence of the outputs from the original's, a mean over inputs."""
        total = 0.0
        with torch.no_grad():
            for state, batch, wanted in zip(states, self._batches, self._wanted, strict=True):
                self._known.state = state
                outputs = outputs_of(self._tail, batch)
                total += len(state) * float(self._tail.imitation(outputs, wanted, temperature=1.0))
        return total / sum(len(state) for state in states)


class _Known(nn.Module):
    """Stands for layers with known output."""

    state: Tensor

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return self.state


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


def words_of(shapes: Sequence[LayerShape | None]) -> str:
    """Return a plan in words, equal shapes together."""
    counts = Counter(shapes)
    return ", ".join(f"{number} layer{'s' * (number > 1)} {_words(shape)}" for shape, number in counts.items())


def _words(shape: LayerShape | None) -> str:
    if shape is None:
        return "left out"
    return f"of {shape.num_heads} heads of {shape.head_dim} and {shape.ffn_dim} hidden units"
