"""Times of the options of a layer on a Jetson, predicted: kernels by the structure of the graph, work by the sizes.

A half that shrinks keeps its kernels, and one that goes saves them. So the kernels of four structures are counted, each
behind a dense layer, in an engine or else in the graph, and the work of each shape follows from its sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import torch
from torch import nn

from edge.bundles.manifest import Profile
from edge.files import sha256, write_whole
from export.bundle.tier_files import export_tier
from export.estimate.devices import BoardMode
from export.estimate.model import RUNTIME, how_counted, kernels
from export.estimate.operations import work_of
from export.estimate.roofline import Prediction, Regime, predict, summed
from export.estimate.work import Work, layer_kernels
from export.models.convert import golden_of
from export.models.heads import Head
from export.models.transformer import Layer, LayerShape, TransformerConfig
from export.quantize.ranges import Scheme
from export.reduce.grid import Grid, Times, widest
from export.reduce.latency import feeds_of, without_layers
from export.training.points import MAX_BATCH_SIZE, Point


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

    def of_dense(self, dense: LayerShape) -> LayerShape:
        """Return a layer's shape without the missing halves."""
        heads, rank = (dense.num_heads, dense.head_dim) if self.attention else (0, 0)
        return LayerShape(heads, rank, dense.ffn_dim if self.feed_forward else 0)


_DENSE = Structure(attention=True, feed_forward=True)
_STRUCTURES = [Structure(attention, feed_forward) for attention in (True, False) for feed_forward in (True, False)]


class Counted(NamedTuple):
    """Kernels of a model.

    Attributes:
        layers: of a layer of each structure, after another one.
        one_layer: of embeddings, one dense layer and task head.
        one_layer_model: their ONNX file.
        first_tokens: whether the feed-forwards behind the last attention compute only the first token of each row.
        how: how they were counted, for people.
    """

    precision: str
    layers: dict[Structure, int]
    one_layer: int
    one_layer_model: bytes
    first_tokens: bool
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
    one_layer = _file(model, [dense], precision)
    key = sha256(one_layer + how_counted(True).encode())
    found = _read(cache, key)
    if found is None:
        one, in_engine = _count(one_layer, config)
        pairs = {each.name: _file(model, [dense, each.of_dense(dense)], precision) for each in _STRUCTURES}
        found = _Found(key, one, {name: _count(file, config)[0] for name, file in pairs.items()}, in_engine)
        if cache and in_engine:
            write_whole(cache, msgspec.json.encode(found))
    layers = {structure: found.two_layers[structure.name] - found.one_layer for structure in _STRUCTURES}
    first_tokens = getattr(model, "pooling", None) == "summary"
    return Counted(precision, layers, found.one_layer, one_layer, first_tokens, how_counted(found.in_engine))


def _count(model: bytes, config: TransformerConfig) -> tuple[int, bool]:
    """Return the number of kernels, and whether they were counted in an engine."""
    names = kernels(model, _profile(config))
    if names is not None:
        return len(names), True
    shapes = {name: array.shape for name, array in feeds_of(config, min(32, config.max_positions)).items()}
    work = work_of(model, shapes, "layers")
    return len(work.kernels) + work.others, False


class _Found(msgspec.Struct, frozen=True):
    """Kernels of one layer, and of two by the structure of the second, with embeddings and head."""

    key: str
    one_layer: int
    two_layers: dict[str, int]
    in_engine: bool


def _read(cache: Path | None, key: str) -> _Found | None:
    with suppress(OSError, msgspec.DecodeError):
        if cache and (found := msgspec.json.decode(cache.read_bytes(), type=_Found)).key == key:
            return found
    return None


class Predicted(NamedTuple):
    """The parts of predicted times at an operating point, which add up.

    Attributes:
        qualities: regimes of the error band besides what binds a run.
    """

    launch: Times
    compute: Times
    memory: Times
    qualities: tuple[Regime, ...]

    @property
    def times(self) -> Times:
        """Their sum."""
        launch, compute, memory = self.launch, self.compute, self.memory
        layers, rest = launch.layers + compute.layers + memory.layers, launch.rest + compute.rest + memory.rest
        return Times(launch.grid, layers, rest, launch.of_last + compute.of_last + memory.of_last)

    def of(self, shapes: Sequence[LayerShape | None]) -> Prediction:
        """Return the prediction of a model with layers of these shapes, without operations and kernels."""
        launch_ms, compute_ms, memory_ms = (part.of(shapes) for part in (self.launch, self.compute, self.memory))
        return summed(launch_ms, compute_ms, memory_ms, 0.0, 0, self.qualities)


def predict_times(
    counted: Counted, config: TransformerConfig, grid: Grid, points: Sequence[Point], target: BoardMode
) -> list[Predicted]:
    """Predict the times of a layer's options, and of embeddings and task head, at each operating point."""
    return [_predicted(counted, config, grid, point, target) for point in points]


def _predicted(counted: Counted, config: TransformerConfig, grid: Grid, point: Point, target: BoardMode) -> Predicted:
    def layer(shape: LayerShape, *, is_last: bool) -> Prediction:
        work = layer_work(config, shape, point, counted.precision, first_tokens=is_last and counted.first_tokens)
        return predict(work, counted.layers[Structure.of(shape)], target.mode)

    options = [[LayerShape(*option, units) for units in grid.feed_forward] for option in grid.attention]
    layers, last = ([[layer(shape, is_last=place) for shape in row] for row in options] for place in (False, True))
    sizes = {name: array.shape for name, array in feeds_of(config, point.tokens, point.batch).items()}
    one = predict(work_of(counted.one_layer_model, sizes, "one layer"), counted.one_layer, target.mode)
    dense = layer(widest(config), is_last=True)

    def part(name: Literal["launch_ms", "compute_ms", "memory_ms"]) -> Times:
        of_layers, of_last = (
            np.array([[getattr(each, name) for each in row] for row in times]) for times in (layers, last)
        )
        return Times(grid, of_layers, getattr(one, name) - getattr(dense, name), of_last)

    qualities = tuple(regime for regime in layers[0][0].regimes if regime in ("int8", "batch", "narrow"))
    return Predicted(part("launch_ms"), part("compute_ms"), part("memory_ms"), qualities)


def layer_work(
    config: TransformerConfig, shape: LayerShape, point: Point, precision: str, *, first_tokens: bool = False
) -> Work:
    """Return the work of one layer, as in its graph for TensorRT, without other kernels than products and attention.

    Args:
        first_tokens: as :func:`export.estimate.work.layer_kernels` has it.
    """
    fp16 = Scheme().fp16 if precision == "int8" else ()
    found = layer_kernels(config.dim, shape, point.tokens, point.batch, precision, fp16, first_tokens=first_tokens)
    return Work(tuple(found), others=0, batch=point.batch)


def _file(model: Head, shapes: Sequence[LayerShape], precision: str) -> bytes:
    """Return the file that an export makes for TensorRT of a model's embeddings and head around new layers."""
    new = without_layers(model)
    config = model.transformer.config
    with torch.random.fork_rng():
        torch.manual_seed(0)  # so that the same graph is the same file
        new.transformer.layers = nn.ModuleList(Layer(config, shape) for shape in shapes)
    feeds = feeds_of(config, min(16, config.max_positions), 2)
    golden = golden_of(new, feeds, model.outputs)
    (made,) = export_tier(new, golden, [feeds], runtimes=[RUNTIME], precisions=[precision])
    return made.data


def _profile(config: TransformerConfig) -> dict[str, Profile]:
    low, usual, high = (
        {name: array.shape for name, array in feeds_of(config, tokens, batch).items()}
        for tokens, batch in ((1, 1), (min(32, config.max_positions), 1), (config.max_positions, MAX_BATCH_SIZE))
    )
    return {name: Profile(min=low[name], opt=usual[name], max=high[name]) for name in low}
