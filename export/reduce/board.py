"""Times of the options of a layer on a Jetson, predicted: kernels by the structure of the graph, work by the sizes.

A half that shrinks keeps its kernels, and one that goes saves them. So the kernels of four structures are counted, each
behind a dense layer, in an engine or else in the graph, and the work of each shape follows from its sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from torch import nn

from edge.bundles.manifest import Profile
from edge.files import sha256, write_whole
from export.bundle.fewest_kernels import fewest_kernels
from export.bundle.tier_files import static_int8
from export.estimate.devices import BoardMode
from export.estimate.model import how_counted, kernels
from export.estimate.operations import work_of
from export.estimate.roofline import Prediction, predict, total
from export.estimate.work import Work, layer_kernels
from export.models.convert import dynamic_of, to_onnx
from export.models.heads import Head
from export.models.transformer import Layer, LayerShape, TransformerConfig
from export.quantize.precision import half
from export.quantize.ranges import Scheme, input_ranges
from export.reduce.grid import Grid, Times, kept_layers, widest
from export.reduce.latency import feeds_of, without_layers
from export.training.points import MAX_BATCH_SIZE, Point

#: Whether a layer has attention, and whether it has hidden units.
Halves = tuple[bool, bool]
_ALL: dict[str, Halves] = {
    "attention-feed_forward": (True, True),
    "attention": (True, False),
    "feed_forward": (False, True),
    "none": (False, False),
}


class Counted(NamedTuple):
    """Kernels of a model.

    Attributes:
        layers: of a layer with these halves, after another one.
        one_layer: of embeddings, one dense layer and task head.
        one_layer_model: their ONNX file.
        first_tokens: whether the feed-forwards behind the last attention compute only the first token of each row.
        how: how they were counted, for people.
    """

    precision: str
    layers: dict[Halves, int]
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
        pairs = {name: _file(model, [dense, _with_halves(dense, halves)], precision) for name, halves in _ALL.items()}
        found = _Found(key, one, {name: _count(file, config)[0] for name, file in pairs.items()}, in_engine)
        if cache and in_engine:
            write_whole(cache, msgspec.json.encode(found))
    layers = {halves: found.two_layers[name] - found.one_layer for name, halves in _ALL.items()}
    first_tokens = getattr(model, "pooling", None) == "summary"
    return Counted(precision, layers, found.one_layer, one_layer, first_tokens, how_counted(found.in_engine))


def _with_halves(dense: LayerShape, halves: Halves) -> LayerShape:
    heads, rank = (dense.num_heads, dense.head_dim) if halves[0] else (0, 0)
    return LayerShape(heads, rank, dense.ffn_dim if halves[1] else 0)


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


class PredictedTimes(NamedTuple):
    """Predicted times at an operating point.

    Attributes:
        layer: of a layer of a shape, and whether it is the last one with attention or behind that.
        rest: of the embeddings and the task head, as a one-layer model's without its layer.
    """

    times: Times
    layer: Callable[[LayerShape, bool], Prediction]
    rest: tuple[tuple[float, Prediction], ...]

    def of(self, shapes: Sequence[LayerShape | None]) -> Prediction:
        """Return the prediction of a model with layers of these shapes, which adds up."""
        return total([*self.rest, *((1.0, self.layer(*layer)) for layer in kept_layers(shapes))])


def predict_times(
    counted: Counted, config: TransformerConfig, grid: Grid, points: Sequence[Point], target: BoardMode
) -> list[PredictedTimes]:
    """Predict the times of a layer's options, and of embeddings and task head, at each operating point."""
    return [_predicted(counted, config, grid, point, target) for point in points]


def _predicted(
    counted: Counted, config: TransformerConfig, grid: Grid, point: Point, target: BoardMode
) -> PredictedTimes:
    def layer(shape: LayerShape, is_last: bool) -> Prediction:
        work = layer_work(config, shape, point, counted.precision, first_tokens=is_last and counted.first_tokens)
        return predict(work, counted.layers[shape.num_heads > 0, shape.ffn_dim > 0], target.mode)

    layers, last = (
        np.array(
            [
                [layer(LayerShape(*option, units), is_last).milliseconds for units in grid.feed_forward]
                for option in grid.attention
            ]
        )
        for is_last in (False, True)
    )
    sizes = {name: array.shape for name, array in feeds_of(config, point.tokens, point.batch).items()}
    whole = predict(work_of(counted.one_layer_model, sizes, "one layer"), counted.one_layer, target.mode)
    dense = layer(widest(config), True)
    times = Times(grid, layers, whole.milliseconds - dense.milliseconds, last)
    return PredictedTimes(times, layer, ((1.0, whole), (-1.0, dense)))


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
    """Return the file that an export makes for TensorRT of a model's embeddings and head around new layers.

    Nobody serves it, so it is not checked: the answers of untrained layers may hardly differ between two inputs.
    """
    new = without_layers(model)
    config = model.transformer.config
    with torch.random.fork_rng():
        torch.manual_seed(0)  # so that the same graph is the same file
        new.transformer.layers = nn.ModuleList(Layer(config, shape) for shape in shapes)
    feeds = feeds_of(config, min(16, config.max_positions), 2)
    examples = {name: torch.from_numpy(array) for name, array in feeds.items()}
    plain = to_onnx(new.eval(), examples, model.outputs, dynamic_of(feeds))
    if precision == "int8":
        return static_int8(plain, input_ranges(plain, [feeds], Scheme()))
    return half(fewest_kernels(plain))


def _profile(config: TransformerConfig) -> dict[str, Profile]:
    low, usual, high = (
        {name: array.shape for name, array in feeds_of(config, tokens, batch).items()}
        for tokens, batch in ((1, 1), (min(32, config.max_positions), 1), (config.max_positions, MAX_BATCH_SIZE))
    )
    return {name: Profile(min=low[name], opt=usual[name], max=high[name]) for name in low}
