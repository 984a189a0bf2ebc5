"""The plan with the least loss among those that are fast enough.

The loss of a layer is the change of the model's outputs when only that layer is reduced. Losses are assumed to add up
over layers and over the two halves of a layer, and so are times. Dynamic programming over time then finds the least
sum, as in SPDY and ZipLM (arXiv 2302.04089).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from edge.datatypes import Array
from edge.errors import Literally
from export.errors import PlanError
from export.reduction.calibration import attention_statistics, feed_forward_statistics
from export.reduction.states import after_attention, after_feed_forward, layers_of
from export.reduction.sublayers import AttentionReducer, FeedForwardReducer, with_attention, with_feed_forward
from export.tasks.objectives import Head, imitation_loss, outputs_of
from export.tasks.tokens import Batch
from export.transformer import LayerShape, TransformerConfig

#: Widths of heads that TensorRT fuses in FP16 and in INT8.
_RANKS = (16, 32, 64)
#: Hidden units come in multiples of this.
_UNITS = 64
_HEAD_STEPS, _UNIT_STEPS = 6, 12
_BINS = 4000
#: The least time of a layer, in units of a dense one: without heads and units, its normalisations remain.
_LEAST_TIME = 0.01


class Grid(NamedTuple):
    """Options for the shape of a layer.

    Attributes:
        attention: heads and their width, h and r; (0, 0) is none. The widest comes first.
        feed_forward: hidden units, f. The widest comes first.
    """

    attention: tuple[tuple[int, int], ...]
    feed_forward: tuple[int, ...]

    def shape(self, attention: int, feed_forward: int, original: LayerShape) -> LayerShape:
        """Return the shape of two options, by their indices, of a layer with this original shape."""
        heads, rank = self.attention[attention]
        scale = original.scale if rank == original.head_dim else None  # W_Q of a new width is made for the usual scale
        return LayerShape(heads, rank, self.feed_forward[feed_forward], scale)

    def find(self, shape: LayerShape) -> tuple[int, int]:
        """Return the indices of the options of a shape."""
        return self.attention.index((shape.num_heads, shape.head_dim)), self.feed_forward.index(shape.ffn_dim)

    def beside(self, dense: LayerShape) -> Beside:
        """Return the shape of each option beside the dense other half of the layer."""
        return Beside(
            [self.shape(option, 0, dense) for option in range(len(self.attention))],
            [self.shape(0, option, dense) for option in range(len(self.feed_forward))],
        )


class Beside(NamedTuple):
    """Shapes of the options of a grid, each beside the dense other half of the layer."""

    attention: list[LayerShape]
    feed_forward: list[LayerShape]

    def all(self) -> list[LayerShape]:
        """Return each distinct shape once, the dense one first."""
        return list(dict.fromkeys([*self.attention, *self.feed_forward]))


class Costs(NamedTuple):
    """A quantity that adds up over the halves of a layer, loss or time: its value for each option of the grid."""

    attention: list[float]
    feed_forward: list[float]


def widest(config: TransformerConfig) -> LayerShape:
    """Return the shape that all layers of a model fit into: that of every layer, unless the model is reduced."""
    layers = config.layers
    if len(set(layers)) == 1:
        return layers[0]
    rank, units = max(layer.head_dim for layer in layers), max(layer.ffn_dim for layer in layers)
    return LayerShape(max(layer.num_heads for layer in layers), rank, units)


def grid_of(config: TransformerConfig) -> Grid:
    """Return the options for a layer: sixths of the heads, widths that TensorRT fuses, and twelfths of the units.

    Of a reduced model they are those of its widest layer, and the shapes of all layers.
    """
    dense = widest(config)
    heads = {round(dense.num_heads * step / _HEAD_STEPS) for step in range(1, _HEAD_STEPS + 1)} - {0}
    ranks = {dense.head_dim, *(rank for rank in _RANKS if rank < dense.head_dim)}
    units = {-(-dense.ffn_dim * step // (_UNIT_STEPS * _UNITS)) * _UNITS for step in range(_UNIT_STEPS)}
    attention = {(h, r) for h in heads for r in ranks} | {
        (s.num_heads, s.head_dim) for s in config.layers if s.num_heads
    }
    feed_forward = {unit for unit in units if unit < dense.ffn_dim} | {layer.ffn_dim for layer in config.layers}
    return Grid((*sorted(attention, reverse=True), (0, 0)), tuple(sorted(feed_forward, reverse=True)))


class LossMeter:
    """Measures the losses of one layer after the other, from the first on.

    Args:
        states: input of the first layer, from :func:`export.reduction.states.embedded`.
    """

    def __init__(self, model: Head, batches: Sequence[Batch], states: list[Tensor], grid: Grid) -> None:
        self._batches, self._states, self._grid = batches, states, grid
        self._layers, self._shapes = layers_of(model.transformer), model.transformer.config.layers
        with torch.no_grad():
            self._wanted = [outputs_of(model, batch) for batch in batches]
        # The same head and later layers, after layers with known outputs.
        self._known = _Known()
        self._tail = copy.deepcopy(model).eval()

    def measure(self, number: int) -> Costs:
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
        self._states = after_feed_forward(layer, after)
        return Costs(attention_losses, feed_forward_losses)

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
                total += len(state) * float(imitation_loss(self._tail, outputs, wanted, temperature=1.0))
        return total / sum(len(state) for state in states)


class _Known(nn.Module):
    """Stands for layers with known output."""

    state: Tensor

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return self.state


def choose_shapes(
    originals: Sequence[LayerShape],
    grid: Grid,
    losses: Sequence[Costs],
    times: Costs,
    rest: float,
    target_speedup: float,
    subject: str = "target speed-up",
) -> list[LayerShape]:
    """Return the best shape of each layer.

    Args:
        originals: the shape of each layer before the reduction.
        rest: the time of embeddings and task head, in units of a dense layer, like ``times``.

    Raises:
        PlanError: no plan is that fast; the message has the fastest one and its speed-up.
    """
    options = [(a, f) for a in range(len(grid.attention)) for f in range(len(grid.feed_forward))]
    time = np.array([max(times.attention[a] + times.feed_forward[f], _LEAST_TIME) for a, f in options])
    table = np.array([[layer.attention[a] + layer.feed_forward[f] for a, f in options] for layer in losses])
    before = time_of(originals, grid, times, rest)
    fastest = [int(np.where(np.isfinite(row), time, np.inf).argmin()) for row in table]
    most = before / (rest + time[fastest].sum())
    if target_speedup > most:
        shapes = [grid.shape(*options[index], layer) for index, layer in zip(fastest, originals, strict=True)]
        given = Literally(f"{target_speedup:g}x")
        expected = f"at most {most:.2f}x, with {len(losses)} layers of {_words(shapes[0])}"
        raise PlanError(subject, given=given, expected=expected, fix="Ask for less, or start from less.")
    chosen = least_loss(table, time, before / target_speedup - rest) or fastest
    return [grid.shape(*options[index], layer) for index, layer in zip(chosen, originals, strict=True)]


def time_of(shapes: Sequence[LayerShape], grid: Grid, times: Costs, rest: float) -> float:
    """Return the time of a whole model whose layers have these shapes; see :func:`choose_shapes`.

    Between two numbers of hidden units of the grid, the time is interpolated.
    """
    attention = [times.attention[grid.attention.index((shape.num_heads, shape.head_dim))] for shape in shapes]
    units = [shape.ffn_dim for shape in shapes]
    feed_forward = np.interp(units, grid.feed_forward[::-1], times.feed_forward[::-1])
    return rest + float(np.maximum(attention + feed_forward, _LEAST_TIME).sum())


def least_loss(losses: Array, times: Array, budget: float, bins: int = _BINS) -> list[int] | None:
    """Return one option for each layer, with the least sum of losses within a budget of time.

    It is None if the fastest options fit, but not when every time is rounded up to a bin.

    Args:
        losses: [layers, options].
        times: [options], the same for every layer.
        budget: at least layers times the least time.
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


def _words(shape: LayerShape) -> str:
    return f"{shape.num_heads} heads of {shape.head_dim} and {shape.ffn_dim} hidden units"
