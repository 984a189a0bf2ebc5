"""Options for the shape of a layer, and the time of each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from edge.datatypes import Array
from export.models.transformer import LayerShape, TransformerConfig

#: Widths of heads that TensorRT fuses in FP16 and in INT8.
_RANKS = (16, 32, 64)
#: Hidden units come in multiples of this.
UNITS = 64
_HEAD_STEPS, _UNIT_STEPS = 6, 12


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

    def beside(self, dense: LayerShape) -> tuple[list[LayerShape], list[LayerShape]]:
        """Return the shape of each option of attention and feed-forward beside the dense other half of the layer."""
        attention = [self.shape(option, 0, dense) for option in range(len(self.attention))]
        return attention, [self.shape(0, option, dense) for option in range(len(self.feed_forward))]

    def shapes(self, dense: LayerShape) -> list[LayerShape]:
        """Return each of these shapes once, the dense one first."""
        return list(dict.fromkeys(chain(*self.beside(dense))))


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
    units = {-(-dense.ffn_dim * step // (_UNIT_STEPS * UNITS)) * UNITS for step in range(_UNIT_STEPS)}
    attention = {(h, r) for h in heads for r in ranks} | {
        (s.num_heads, s.head_dim) for s in config.layers if s.num_heads
    }
    feed_forward = {unit for unit in units if unit < dense.ffn_dim} | {layer.ffn_dim for layer in config.layers}
    return Grid((*sorted(attention, reverse=True), (0, 0)), tuple(sorted(feed_forward, reverse=True)))


def kept_layers(shapes: Iterable[LayerShape | None]) -> list[tuple[LayerShape, bool]]:
    """Return the layers that stay, and whether each is the last one with attention or behind that."""
    kept = [shape for shape in shapes if shape]
    last = max((number for number, shape in enumerate(kept) if shape.num_heads), default=len(kept))
    return [(shape, number >= last) for number, shape in enumerate(kept)]


class Times(NamedTuple):
    """Milliseconds of the parts of a model, in one run; a layer that is left out takes none.

    Attributes:
        layers: of each pair of options, [attention, feed-forward], as one layer.
        rest: of the embeddings and the task head.
        last: of the last layer with attention and of those behind it, where they are other than ``layers``.
    """

    grid: Grid
    layers: Array
    rest: float
    last: Array | None = None

    @classmethod
    def mean(cls, times: Sequence[Times], weights: Sequence[float]) -> Times:
        """Return the weighted mean of times at several operating points, of one grid."""
        layers = np.average([one.layers for one in times], axis=0, weights=weights)
        last = np.average([one.of_last for one in times], axis=0, weights=weights)
        return cls(times[0].grid, layers, float(np.average([one.rest for one in times], weights=weights)), last)

    @property
    def of_last(self) -> Array:
        """``last``, or else ``layers``."""
        return self.layers if self.last is None else self.last

    def of(self, shapes: Iterable[LayerShape | None]) -> float:
        """Return the milliseconds of a model whose layers have these shapes; None is left out.

        Between two numbers of hidden units of the grid, the time is interpolated; none at all is an option of its own,
        which has fewer kernels.
        """
        return self.rest + sum(self._layer(*layer) for layer in kept_layers(shapes))

    def speedup(self, before: Iterable[LayerShape | None], after: Iterable[LayerShape | None]) -> float:
        """Return the time of a model before a reduction over that after it."""
        return self.of(before) / self.of(after)

    def _layer(self, shape: LayerShape, is_last: bool) -> float:
        times = self.of_last if is_last else self.layers
        row, units = times[self.grid.attention.index((shape.num_heads, shape.head_dim))], self.grid.feed_forward
        if shape.ffn_dim in units:
            return float(row[units.index(shape.ffn_dim)])
        some = [option for option, number in enumerate(units) if number][::-1]
        return float(np.interp(shape.ffn_dim, [units[option] for option in some], row[some]))
