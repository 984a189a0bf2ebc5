"""Latency of each shape of a layer in units of the dense layer: measured here, or from a device's table.

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

from edge.datatypes import Array
from edge.errors import Literally, UsageError, Whole
from edge.profiling.conditions import cpu_name
from edge.profiling.table import Comparison, LatencyTable, Rest, Shape, Timing, check_key
from edge.profiling.timing import compared, times_in_turns
from edge.runtimes.onnxruntime_runner import OnnxRuntimeRunner
from export.convert import to_onnx
from export.reduction.search import Costs, Grid, time_of, widest
from export.tasks.objectives import Head
from export.transformer import Layer, LayerShape, TransformerConfig


def compare(dense: bytes, other: bytes, feeds: Mapping[str, Array], calls: int) -> Comparison:
    """Time two ONNX models in turns, ``calls`` of each after a warm-up."""
    models = {"dense": dense, "other": other}
    runners = {name: OnnxRuntimeRunner(model, subject="a model to be timed") for name, model in models.items()}
    seconds = times_in_turns(runners, feeds, calls)
    for runner in runners.values():
        runner.close()
    return compared(seconds["dense"], seconds["other"])


def measure_models(dense: nn.Module, other: nn.Module, feeds: Mapping[str, Array], calls: int = 60) -> Comparison:
    """Export two models, with embeddings and task heads, and compare them; ``feeds`` decide the exported shapes."""
    models = [to_onnx(m, {n: torch.from_numpy(a) for n, a in feeds.items()}, ["output"], {}) for m in (dense, other)]
    return compare(models[0], models[1], feeds, calls)


def feeds_of(config: TransformerConfig, tokens: int) -> dict[str, Array]:
    """Return one input of ``tokens`` tokens for a whole model, or one image."""
    random = np.random.default_rng(0)
    if config.architecture == "vit":
        pixels = random.standard_normal((1, config.channels, config.image_size, config.image_size))
        return {"inputs": pixels.astype(np.float32)}
    return {
        "inputs": random.integers(config.vocab_size, size=(1, tokens)),
        "mask": np.ones((1, tokens), dtype=np.int64),
    }


def measure_layers(
    config: TransformerConfig,
    shapes: Sequence[LayerShape],
    lengths: Sequence[int],
    *,
    cache: Path | None = None,
    calls: int = 60,
    on_shape: Callable[[int, int], None] = lambda done, shapes: None,
) -> LatencyTable:
    """Measure the shapes that are not in the cache, and update the cache after every shape.

    Args:
        config: of the model; its widest layer is the dense one.
        lengths: numbers of tokens; one input at a time.
        cache: a JSON file; one of another machine, version or model is replaced.
    """
    key = machine_key(config)
    table = _cached(cache, key)
    dense = None
    for done, shape in enumerate(shapes):
        missing = [tokens for tokens in lengths if table.find(shape, tokens) is None]
        if missing:
            dense = dense or _block(config, widest(config))
            block = _block(config, shape)
            found = [(n, compare(dense, block, layer_feeds(config, n), calls)) for n in missing]
            timings = [Timing(Shape.of(shape), n, comparison) for n, comparison in found]
            table = msgspec.structs.replace(table, timings=(*table.timings, *timings))
            if cache is not None:
                table.write(cache)
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
    """Return the times of a layer's options, and of embeddings and task head, in units of a dense layer.

    The halves of a layer run one after the other, so each option is measured beside the other half's original, and half
    of the dense layer's time is assigned to each.
    """
    config = model.transformer.config
    shapes = grid.beside(widest(config)).all()
    table = measure_layers(config, shapes, [tokens], cache=cache, calls=calls, on_shape=on_shape)
    times = _costs(table, config, grid, tokens)
    rest = table.find_rest(tokens)
    if rest is None:
        found = measure_models(model, without_layers(model), feeds_of(config, tokens), calls)
        share = 1 / found.ratio  # of the whole model's time
        layers = time_of(config.layers, grid, times, rest=0.0)
        rest = Rest(tokens, found.milliseconds, layers * share / (1 - share))
        if cache is not None:
            msgspec.structs.replace(table, rest=(*table.rest, rest)).write(cache)
    return times, rest.dense_layers


def table_times(
    table: LatencyTable, config: TransformerConfig, grid: Grid, tokens: int, subject: str
) -> tuple[Costs, float]:
    """Return the same as :func:`measure_times`, from a device's table; ``subject`` names the table in errors.

    Raises:
        UsageError: the table is of another model, lacks shapes or the length, or has timings of a device that
            throttled.
    """
    fix = "Write the shapes of this model with 'fewheads shapes', and time them with 'fewheads profile'."
    check_key(subject, table.key, model_key(config), fix)
    shapes = [Shape.of(shape) for shape in grid.beside(widest(config)).all()]
    missing = [shape.name for shape in shapes if table.find(shape, tokens) is None]
    rest = table.find_rest(tokens)
    if missing or rest is None:
        lengths = sorted({timing.tokens for timing in table.timings})
        names = missing if rest else [*missing, "rest"]
        raise UsageError(
            f"{subject} at {tokens} tokens",
            given=Whole(f"no timing of {', '.join(names[:4])}{f' and {len(names) - 4} more' if names[4:] else ''}"),
            expected=f"timings of {len(shapes)} shapes; it has the lengths {', '.join(map(str, lengths)) or 'none'}",
            fix=f"On the device: fewheads profile SHAPES --lengths {tokens} --out {subject.rpartition(' ')[2]}, with "
            f"SHAPES from 'fewheads shapes --lengths {tokens}'; or give --tokens of a length that the table has.",
        )
    wanted = set(shapes)
    throttled = [t.shape.name for t in table.timings if t.throttled and t.tokens == tokens and t.shape in wanted]
    if throttled or rest.throttled:
        given = Literally(f"{len(throttled) + rest.throttled} timings of a device that throttled")
        fix = "Cool the device, and give the same 'fewheads profile' again: it repeats these timings alone."
        raise UsageError(f"{subject} at {tokens} tokens", given=given, expected="steady clocks", fix=fix)
    return _costs(table, config, grid, tokens), rest.dense_layers


def _costs(table: LatencyTable, config: TransformerConfig, grid: Grid, tokens: int) -> Costs:
    """Return the times of the options; half of the dense layer's time is assigned to each half."""

    def times(options: Sequence[LayerShape]) -> list[float]:
        found = [table.find(shape, tokens) for shape in options]
        return [1 / comparison.ratio - 0.5 for comparison in found if comparison]

    beside = grid.beside(widest(config))
    return Costs(times(beside.attention), times(beside.feed_forward))


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


def _block(config: TransformerConfig, shape: LayerShape) -> bytes:
    inputs = {name: torch.from_numpy(array) for name, array in layer_feeds(config, 16).items()}
    return to_onnx(Layer(config, shape), inputs, ["y"], {name: {1: "tokens"} for name in inputs})


def layer_feeds(config: TransformerConfig, tokens: int) -> dict[str, Array]:
    """Return one input of a layer: x [1, tokens, dim], and except for images its mask [1, tokens]."""
    x = np.random.default_rng(0).standard_normal((1, tokens, config.dim)).astype(np.float32)
    if config.architecture == "vit":
        return {"x": x}
    return {"x": x, "mask": np.ones((1, tokens), dtype=np.int64)}


def _cached(cache: Path | None, key: dict[str, str]) -> LatencyTable:
    with suppress(UsageError):  # it can be measured again, so a broken one is as good as none
        if cache is not None and (table := LatencyTable.read(cache)).key == key:
            return table
    return LatencyTable(key=key)
