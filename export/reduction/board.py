"""Times of the options of a layer on a Jetson, predicted: kernels by the structure of the graph, work by the sizes.

A half that shrinks keeps its kernels, and one that goes saves them. So the kernels of four structures are counted, each
behind a dense layer, in an engine or else as usual, and the work of each shape follows from its sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from torch import nn

from edge.bundles.manifest import Profile
from edge.files import sha256, write_whole
from export.convert import dynamic_of, to_onnx
from export.estimate.devices import BoardMode
from export.estimate.model import how_counted, kernels
from export.estimate.operations import Work, work_of
from export.estimate.roofline import Prediction, predict
from export.points import MAX_BATCH_SIZE, Point
from export.precision import half
from export.quantization.ranges import Scheme, input_ranges
from export.quantization.static import static_int8
from export.reduction.grid import Grid, Times, widest
from export.reduction.latency import feeds_of, without_layers
from export.tasks.objectives import Head
from export.transformer import Layer, LayerShape, TransformerConfig

_BYTES = {"fp16": 2, "int8": 1}


class Structure(NamedTuple):
    """Which halves a layer has."""

    attention: bool
    feed_forward: bool

    @classmethod
    def of(cls, shape: LayerShape) -> Structure:
        """Return that of a shape."""
        return cls(shape.num_heads > 0, shape.ffn_dim > 0)

    @property
    def name(self) -> str:
        """The halves in a word."""
        return "-".join(half for half, there in zip(self._fields, self, strict=True) if there) or "none"

    def reduced(self, dense: LayerShape) -> LayerShape:
        """Return a layer's shape without the missing halves."""
        heads, rank = (dense.num_heads, dense.head_dim) if self.attention else (0, 0)
        return LayerShape(heads, rank, dense.ffn_dim if self.feed_forward else 0)


_DENSE = Structure(attention=True, feed_forward=True)
#: Where no engine can be compiled: kernels of TensorRT-RTX 1.7 for these graphs in FP16, behind another layer.
_USUAL = {_DENSE: 10, Structure(True, False): 7, Structure(False, True): 3, Structure(False, False): 0}
_USUAL_REST = 7


class Counted(NamedTuple):
    """Kernels of a model.

    Attributes:
        layers: of a layer of each structure, after another one.
        rest: of the embeddings and the task head.
        rest_model: their ONNX file.
        how: how they were counted, for people.
    """

    precision: str
    layers: dict[Structure, int]
    rest: int
    rest_model: bytes
    how: str


def count_kernels(model: Head, precision: str = "fp16", cache: Path | None = None) -> Counted:
    """Count the kernels of a model's structures: in engines for its embeddings and head with one and two layers.

    Args:
        model: with layers of its sizes; their weights are not used.
        precision: ``fp16`` or ``int8``.
        cache: a JSON file of counts; those of other graphs or another TensorRT-RTX are replaced.
    """
    config = model.transformer.config
    dense = widest(config)

    def counted(*shapes: LayerShape) -> int | None:
        names = kernels(_file(model, shapes, precision), _profile(config))
        return None if names is None else len(names)

    rest_model, one_layer = _file(model, (), precision), _file(model, [dense], precision)
    key = sha256(one_layer + how_counted(True).encode())
    engines = _read(cache, key)
    if engines is None:
        one = kernels(one_layer, _profile(config))
        if one is None:
            return Counted(precision, _USUAL, _USUAL_REST, rest_model, how_counted(False))
        behind = {structure.name: counted(dense, structure.reduced(dense)) for structure in _USUAL}
        engines = _Engines(key, len(one), {name: number for name, number in behind.items() if number is not None})
        if cache:
            write_whole(cache, msgspec.json.encode(engines))
    layers = {
        structure: engines.two_layers.get(structure.name, engines.one_layer + usual) - engines.one_layer
        for structure, usual in _USUAL.items()
    }
    return Counted(precision, layers, engines.one_layer - layers[_DENSE], rest_model, how_counted(True))


class _Engines(msgspec.Struct, frozen=True):
    """Kernels of engines for one layer, and for two by the structure of the second."""

    key: str
    one_layer: int
    two_layers: dict[str, int]


def _read(cache: Path | None, key: str) -> _Engines | None:
    with suppress(OSError, msgspec.DecodeError):
        if cache and (found := msgspec.json.decode(cache.read_bytes(), type=_Engines)).key == key:
            return found
    return None


class Predicted(NamedTuple):
    """Predicted times at an operating point; the error band as shares of them."""

    times: Times
    low: float
    high: float


def predict_times(
    counted: Counted, config: TransformerConfig, grid: Grid, points: Sequence[Point], target: BoardMode
) -> list[Predicted]:
    """Predict the times of a layer's options, and of embeddings and task head, at each operating point."""
    return [_predicted(counted, config, grid, point, target) for point in points]


def _predicted(counted: Counted, config: TransformerConfig, grid: Grid, point: Point, target: BoardMode) -> Predicted:
    def layer(heads: int, rank: int, units: int) -> Prediction:
        shape = LayerShape(heads, rank, units)
        work = layer_work(config, shape, point, counted.precision)
        return predict(work, counted.layers[Structure.of(shape)], target.mode)

    layers = [[layer(*option, units) for units in grid.feed_forward] for option in grid.attention]
    feeds = feeds_of(config, point.tokens, point.batch)
    shapes = {name: array.shape for name, array in feeds.items()}
    rest = predict(work_of(counted.rest_model, shapes, "embeddings and head"), counted.rest, target.mode)
    dense = layers[0][0]
    return Predicted(
        Times(grid, np.array([[one.milliseconds for one in row] for row in layers]), rest.milliseconds),
        dense.low_ms / dense.milliseconds,
        dense.high_ms / dense.milliseconds,
    )


def layer_work(config: TransformerConfig, shape: LayerShape, point: Point, precision: str) -> Work:
    """Return the work of one layer, as in its graph for TensorRT; products of activations are in FP16."""
    width, dim, rows = shape.num_heads * shape.head_dim, config.dim, point.batch * point.tokens
    weights = 4 * dim * width + 2 * dim * shape.ffn_dim
    attention = 2e-9 * rows * 2 * point.tokens * width
    gflop = {"fp16": attention}
    gflop[precision] = gflop.get(precision, 0.0) + 2e-9 * rows * weights
    vectors = 3 * width + shape.ffn_dim + 6 * dim  # biases and normalisations
    structure = Structure.of(shape)
    products = 4 * structure.attention + 2 * structure.feed_forward
    return Work(gflop, _BYTES[precision] * weights + _BYTES["fp16"] * vectors, products, int(structure.attention))


def _file(model: Head, shapes: Sequence[LayerShape], precision: str) -> bytes:
    """Return the file for TensorRT of a model's embeddings and head around new layers."""
    new = without_layers(model)
    config = model.transformer.config
    with torch.random.fork_rng():
        torch.manual_seed(0)  # so that the same graph is the same file
        new.transformer.layers = nn.ModuleList(Layer(config, shape) for shape in shapes)
    feeds = feeds_of(config, min(16, config.max_positions), 2)
    plain = to_onnx(new, {n: torch.from_numpy(a) for n, a in feeds.items()}, model.outputs, dynamic_of(feeds))
    if precision == "fp16" or not shapes:
        return half(plain)
    return static_int8(plain, input_ranges(plain, [feeds], Scheme()))


def _profile(config: TransformerConfig) -> dict[str, Profile]:
    low, usual, high = (
        {name: array.shape for name, array in feeds_of(config, tokens, batch).items()}
        for tokens, batch in ((1, 1), (min(32, config.max_positions), 1), (config.max_positions, MAX_BATCH_SIZE))
    )
    return {name: Profile(min=low[name], opt=usual[name], max=high[name]) for name in low}
