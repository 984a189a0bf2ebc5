"""Latency of each shape of a layer: measured here, or from a device's table.

This machine is ONNX Runtime, CPU, one thread. A device has a table of its own, by ``fewheads profile``. Each table has
a key, so that none is taken for another.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
import onnxruntime
import torch
from torch import nn

from edge.bench.conditions import cpu_name
from edge.bench.layer_latencies import Comparison, LayerLatencies, Rest, Shape, Timing, check_key
from edge.bench.timing import compared, times_in_turns
from edge.datatypes import Array
from edge.errors import Raw, UsageError, Whole
from edge.runtimes.onnxruntime_runner import OnnxRuntimeRunner
from export.models.convert import to_onnx
from export.models.heads import Head
from export.models.transformer import Layer, LayerShape, TransformerConfig
from export.reduce.grid import Grid, Times, widest
from export.training.points import Point

#: The least time of a layer, in units of a dense one: without heads and units, its normalisations remain.
_LEAST_TIME = 0.01


def compare(dense: bytes, other: bytes, feeds: Mapping[str, Array], calls: int) -> Comparison:
    """Time two ONNX models in turns, ``calls`` of each after a warm-up."""
    models = {"dense": dense, "other": other}
    runners = {name: OnnxRuntimeRunner(model, subject="a model to be timed") for name, model in models.items()}
    seconds = times_in_turns(runners, feeds, calls)
    for runner in runners.values():
        runner.close()
    return compared(seconds["dense"], seconds["other"])


def measure_models(dense: nn.Module, other: nn.Module, feeds: Mapping[str, Array], calls: int) -> Comparison:
    """Export two models, with embeddings and task heads, and compare them; ``feeds`` decide the exported shapes."""
    models = [to_onnx(m, {n: torch.from_numpy(a) for n, a in feeds.items()}, ["output"], {}) for m in (dense, other)]
    return compare(models[0], models[1], feeds, calls)


def feeds_of(config: TransformerConfig, tokens: int, batch: int = 1) -> dict[str, Array]:
    """Return ``batch`` inputs of ``tokens`` tokens for a whole model, or images."""
    random = np.random.default_rng(0)
    if config.architecture == "vit":
        pixels = random.standard_normal((batch, config.channels, config.image_size, config.image_size))
        return {"inputs": pixels.astype(np.float32)}
    return {
        "inputs": random.integers(config.vocab_size, size=(batch, tokens)),
        "mask": np.ones((batch, tokens), dtype=np.int64),
    }


def measure_layers(
    config: TransformerConfig,
    shapes: Sequence[LayerShape],
    points: Sequence[Point],
    *,
    cache: Path | None = None,
    calls: int = 60,
    on_shape: Callable[[int, int], None] = lambda done, shapes: None,
) -> LayerLatencies:
    """Measure the shapes that are not in the cache, and update the cache after every shape.

    Args:
        config: of the model; its widest layer is the dense one.
        points: sizes of the input; weights do not matter.
        cache: a JSON file; one of another machine, version or model is replaced.
    """
    key = machine_key(config)
    table = _cached(cache, key)
    dense: dict[int, bytes] = {}  # by batch
    for done, shape in enumerate(shapes):
        missing = [point for point in points if table.find(shape, point.tokens, point.batch) is None]
        for point in missing:
            if point.batch not in dense:
                dense[point.batch] = _block(config, widest(config), point.batch)
        blocks = {batch: _block(config, shape, batch) for batch in dict.fromkeys(point.batch for point in missing)}
        timings = []
        for point in missing:
            feeds = layer_feeds(config, point.tokens, point.batch)
            comparison = compare(dense[point.batch], blocks[point.batch], feeds, calls)
            timings.append(Timing(Shape.of(shape), point.tokens, comparison, batch=point.batch))
        if missing:
            table = msgspec.structs.replace(table, timings=(*table.timings, *timings))
            if cache is not None:
                table.write(cache)
        on_shape(done + 1, len(shapes))
    return table


def measure_times(
    model: Head,
    grid: Grid,
    points: Sequence[Point],
    *,
    cache: Path | None = None,
    calls: int = 60,
    on_shape: Callable[[int, int], None] = lambda done, shapes: None,
) -> list[Times]:
    """Return the times of a layer's options, and of embeddings and task head, at each operating point.

    The halves of a layer run one after the other, so each option is measured beside the other half's original, and half
    of the dense layer's time is assigned to each.
    """
    config = model.transformer.config
    shapes = grid.shapes(widest(config))
    table = measure_layers(config, shapes, points, cache=cache, calls=calls, on_shape=on_shape)
    for point in points:
        if table.find_rest(point.tokens, point.batch) is None:
            feeds = feeds_of(config, point.tokens, point.batch)
            found = measure_models(model, without_layers(model), feeds, calls)
            share = 1 / found.ratio  # of the whole model's time
            layers = _layers(table, config, grid, point)
            whole = Times(grid, layers, 0.0).of(config.layers)
            rest = Rest(point.tokens, found.milliseconds, whole * share / (1 - share), batch=point.batch)
            table = msgspec.structs.replace(table, rest=(*table.rest, rest))
            if cache is not None:
                table.write(cache)
    return [_times(table, config, grid, point) for point in points]


def table_times(
    table: LayerLatencies, config: TransformerConfig, grid: Grid, points: Sequence[Point], subject: str
) -> list[Times]:
    """Return the same as :func:`measure_times`, from a device's table; ``subject`` names the table in errors.

    Raises:
        UsageError: the table is of another model, lacks shapes or an operating point, or has timings of a device that
            throttled.
    """
    fix = "Write the shapes of this model with 'fewheads shapes', and time them with 'fewheads profile'."
    check_key(subject, table.key, model_key(config), fix)
    shapes = [Shape.of(shape) for shape in grid.shapes(widest(config))]
    for point in points:
        _check_point(table, shapes, point, subject)
    return [_times(table, config, grid, point) for point in points]


def _check_point(table: LayerLatencies, shapes: Sequence[Shape], point: Point, subject: str) -> None:
    subject, tokens = f"{subject} at {point.name}", point.tokens
    missing = [shape.name for shape in shapes if table.find(shape, tokens, point.batch) is None]
    rest = table.find_rest(tokens, point.batch)
    if missing or rest is None:
        names = missing if rest else [*missing, "rest"]
        lengths = sorted({timing.tokens for timing in table.timings if timing.batch == point.batch})
        raise UsageError(
            subject,
            given=Whole(f"no timing of {', '.join(names[:4])}{f' and {len(names) - 4} more' if names[4:] else ''}"),
            expected=f"timings of {len(shapes)} shapes; for batch {point.batch} it has the lengths "
            f"{', '.join(map(str, lengths)) or 'none'}",
            fix=f"On the device: fewheads profile SHAPES --lengths {tokens} --out TABLE, with SHAPES from 'fewheads "
            f"shapes --lengths {tokens}', which times batch 1; or give --tokens and --batch that the table has.",
        )
    throttled = [
        t.shape.name
        for t in table.timings
        if t.throttled and (t.tokens, t.batch) == (tokens, point.batch) and t.shape in shapes
    ]
    if throttled or rest.throttled:
        given = Raw(f"{len(throttled) + rest.throttled} timings of a device that throttled")
        fix = "Cool the device, and give the same 'fewheads profile' again: it repeats these timings alone."
        raise UsageError(subject, given=given, expected="steady clocks", fix=fix)


def _times(table: LayerLatencies, config: TransformerConfig, grid: Grid, point: Point) -> Times:
    """Return the milliseconds at a point of a complete table."""
    dense, rest = table.find(widest(config), point.tokens, point.batch), table.find_rest(point.tokens, point.batch)
    assert dense is not None
    assert rest is not None
    layer_ms = dense.dense_milliseconds - dense.floor_milliseconds
    return Times(grid, _layers(table, config, grid, point) * layer_ms, rest.dense_layers * layer_ms)


def _layers(table: LayerLatencies, config: TransformerConfig, grid: Grid, point: Point) -> Array:
    """Return the times of all pairs of options in units of the dense layer, half of which is assigned to each half."""
    halves = []
    for options in grid.beside(widest(config)):
        found = [table.find(shape, point.tokens, point.batch) for shape in options]
        halves.append(np.array([1 / comparison.ratio - 0.5 for comparison in found if comparison]))
    layers: Array = np.maximum(np.add.outer(*halves), _LEAST_TIME)
    return layers


def without_layers(model: Head) -> Head:
    """Return a copy of a model with only its embeddings and task head."""
    empty = copy.deepcopy(model)
    empty.transformer.layers = nn.ModuleList()
    return empty


def machine_key(config: TransformerConfig) -> dict[str, str]:
    """Return the key of a measurement on this machine."""
    return {
        "runtime": "onnxruntime",
        "runtime_version": onnxruntime.__version__,
        "provider": "CPU",
        "precision": "fp32",
        "device": cpu_name(),
        "cores": str(os.cpu_count()),
        "torch": str(torch.__version__),
        **model_key(config),
    }


def model_key(config: TransformerConfig) -> dict[str, str]:
    """Return the properties of a model that its times depend on, beside the shapes of its layers."""
    image = f"{config.image_size}/{config.patch_size}"
    return {
        "architecture": config.architecture,
        "dim": str(config.dim),
        "dense": Shape.of(widest(config)).name,
        "embeddings": image if config.architecture == "vit" else str(config.vocab_size),
    }


def _block(config: TransformerConfig, shape: LayerShape, batch: int) -> bytes:
    inputs = {name: torch.from_numpy(array) for name, array in layer_feeds(config, 16, batch).items()}
    return to_onnx(Layer(config, shape), inputs, ["y"], {name: {1: "tokens"} for name in inputs})


def layer_feeds(config: TransformerConfig, tokens: int, batch: int = 1) -> dict[str, Array]:
    """Return an input of a layer: x [batch, tokens, dim], and except for images its mask [batch, tokens]."""
    x = np.random.default_rng(0).standard_normal((batch, tokens, config.dim)).astype(np.float32)
    if config.architecture == "vit":
        return {"x": x}
    return {"x": x, "mask": np.ones((batch, tokens), dtype=np.int64)}


def _cached(cache: Path | None, key: dict[str, str]) -> LayerLatencies:
    with suppress(UsageError):  # it can be measured again, so a broken one is as good as none
        if cache is not None and (table := LayerLatencies.read(cache)).key == key:
            return table
    return LayerLatencies(key=key)
