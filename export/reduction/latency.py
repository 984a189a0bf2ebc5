"""Latency of each shape of a layer on ONNX Runtime, CPU, one thread, in units of the dense layer.

TensorRT's times come from the device itself; a table has a key, so that neither is taken for the other.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import onnxruntime
import torch
from torch import Tensor, nn

from edge.datatypes import Array
from edge.files import write_whole
from export.convert import to_onnx
from export.reduction.search import Costs, Grid
from export.reduction.timing import Comparison, compare, cpu_name, feeds_of, measure_models
from export.tasks.objectives import Head
from export.transformer import Layer, LayerShape, TransformerConfig


class Timing(msgspec.Struct, frozen=True):
    """One shape of a layer at one length."""

    shape: LayerShape
    tokens: int
    comparison: Comparison


class LatencyTable(msgspec.Struct, frozen=True):
    """Latencies of the layers of one kind of model on one machine.

    Attributes:
        key: machine, versions and model, as :func:`machine_key` has them; a table of another key says nothing.
        timings: of every shape and length that was measured.
    """

    key: dict[str, str]
    timings: tuple[Timing, ...] = ()

    def find(self, shape: LayerShape, tokens: int) -> Comparison | None:
        """Return what was measured of a shape at a length, or None."""
        found = (t.comparison for t in self.timings if t.shape == shape and t.tokens == tokens)
        return next(found, None)


def measure_layers(
    config: TransformerConfig,
    shapes: Sequence[LayerShape],
    lengths: Sequence[int],
    *,
    cache: Path | None = None,
    calls: int = 60,
    on_shape: Callable[[int, int], None] = lambda done, shapes: None,
) -> LatencyTable:
    """Measure what is not in the cache, and bring the cache up to date after every shape.

    Args:
        config: of the model; its first layer is the dense one.
        shapes: to measure.
        lengths: numbers of tokens; one input at a time.
        cache: a JSON file; one of another machine, version or model is replaced.
        calls: of each model at each length.
        on_shape: called with how many shapes are done, of how many.
    """
    key = machine_key(config)
    table = _cached(cache, key)
    dense = None
    for done, shape in enumerate(shapes):
        missing = [tokens for tokens in lengths if table.find(shape, tokens) is None]
        if missing:
            dense = dense or _block(config, config.layers[0])
            block = _block(config, shape)
            timings = [Timing(shape, n, compare(dense, block, _layer_feeds(config, n), calls)) for n in missing]
            table = LatencyTable(key, (*table.timings, *timings))
            _store(cache, table)
        on_shape(done + 1, len(shapes))
    return table


def measure_times(
    model: Head,
    grid: Grid,
    tokens: int,
    *,
    cache: Path | None = None,
    calls: int = 60,
    on_shape: Callable[[int, int], None] = lambda done, shapes: None,
) -> tuple[Costs, float]:
    """Return what a layer's options take, and what embeddings and task head take, in units of a dense layer.

    The halves of a layer run one after the other, so each option is measured beside the other half's original, and
    half of the dense layer is written to either side's account.

    Args:
        model: the original.
        grid: what its layers may become.
        tokens: in the one input of each call.
        cache: see :func:`measure_layers`.
        calls: likewise.
        on_shape: likewise.
    """
    config = model.transformer.config
    dense = config.layers[0]
    attention = [grid.shape(option, 0, dense) for option in range(len(grid.attention))]
    feed_forward = [grid.shape(0, option, dense) for option in range(len(grid.feed_forward))]
    shapes = list(dict.fromkeys([*attention, *feed_forward]))
    table = measure_layers(config, shapes, [tokens], cache=cache, calls=calls, on_shape=on_shape)

    def times(options: Sequence[LayerShape]) -> list[float]:
        found = [table.find(shape, tokens) for shape in options]
        return [1 / comparison.ratio - 0.5 for comparison in found if comparison]

    empty = copy.deepcopy(model)
    empty.transformer.layers = nn.ModuleList()
    share = 1 / measure_models(model, empty, feeds_of(config, tokens), calls).ratio  # of the whole model's time
    return Costs(times(attention), times(feed_forward)), len(config.layers) * share / (1 - share)


def machine_key(config: TransformerConfig) -> dict[str, str]:
    """Return what a measurement depends on, shapes and lengths apart."""
    return {
        "cpu": cpu_name(),
        "cores": str(os.cpu_count()),
        "onnxruntime": onnxruntime.__version__,
        "torch": str(torch.__version__),
        "architecture": config.architecture,
        "dim": str(config.dim),
        "dense": str(config.layers[0]),
    }


def _block(config: TransformerConfig, shape: LayerShape) -> bytes:
    """Return one layer as ONNX, for one input of any length."""
    inputs = {name: torch.from_numpy(array) for name, array in _layer_feeds(config, 16).items()}
    return to_onnx(_Block(Layer(config, shape)), inputs, ["y"], {name: {1: "tokens"} for name in inputs})


def _layer_feeds(config: TransformerConfig, tokens: int) -> dict[str, Array]:
    x = np.random.default_rng(0).standard_normal((1, tokens, config.dim)).astype(np.float32)
    if config.architecture == "vit":
        return {"x": x}
    return {"x": x, "mask": np.ones((1, tokens), dtype=np.int64)}


class _Block(nn.Module):
    """A layer whose mask may be left out, as images have none."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        output: Tensor = self.layer(x, mask)
        return output


def _cached(cache: Path | None, key: dict[str, str]) -> LatencyTable:
    if cache is None or not cache.exists():
        return LatencyTable(key)
    try:
        table = msgspec.json.decode(cache.read_bytes(), type=LatencyTable)
    except msgspec.DecodeError:  # it can be measured again, so a broken one is as good as none
        return LatencyTable(key)
    return table if table.key == key else LatencyTable(key)


def _store(cache: Path | None, table: LatencyTable) -> None:
    if cache is None:
        return
    write_whole(cache, msgspec.json.format(msgspec.json.encode(table), indent=1))
