"""Two models on ONNX Runtime, CPU, one thread, timed in turns.

Times drift with clocks and neighbours; a ratio of times taken in turns hardly does.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import torch
from torch import nn

from edge.datatypes import Array
from edge.runner import Runner
from edge.runtimes.onnxruntime_runner import OnnxRuntimeRunner
from export.convert import to_onnx
from export.transformer import TransformerConfig

#: Calls that do not count, before those that do.
WARM_UP = 5

K = TypeVar("K")


class Comparison(msgspec.Struct, frozen=True):
    """Two models in turns.

    Attributes:
        milliseconds: the median time of a call.
        dense_milliseconds: that of the model it is compared with.
        ratio: how many times faster it is: the median over pairs of neighbouring calls, which share the clock's and
            the neighbours' moods.
        calls: how often each was called.
    """

    milliseconds: float
    dense_milliseconds: float
    ratio: float
    calls: int


def times_in_turns(runners: Mapping[K, Runner], feeds: Mapping[str, Array], calls: int) -> dict[K, Array]:
    """Return the seconds that each runner takes for the same inputs, call by call, [calls].

    Args:
        runners: models to be compared.
        feeds: inputs of all.
        calls: of each, after some that do not count.
    """
    seconds: dict[K, Array] = {key: np.zeros(calls) for key in runners}
    for call in range(-WARM_UP, calls):
        for key in turns(list(runners), call):
            started = time.perf_counter()
            runners[key].infer(feeds)
            if call >= 0:
                seconds[key][call] = time.perf_counter() - started
    return seconds


def turns(keys: Sequence[K], number: int) -> Sequence[K]:
    """Return the keys, another one first at each number: whoever is first finds the caches cold."""
    first = number % len(keys)
    return [*keys[first:], *keys[:first]]


def compare(dense: bytes, other: bytes, feeds: Mapping[str, Array], calls: int) -> Comparison:
    """Call two ONNX models in turns.

    Args:
        dense: the model to compare with.
        other: the model in question.
        feeds: inputs of both.
        calls: of each, after some that do not count.

    Raises:
        BundleError: ONNX Runtime does not take a model.
    """
    models = {"dense": dense, "other": other}
    runners = {name: OnnxRuntimeRunner(model, subject="a model to be timed") for name, model in models.items()}
    seconds = times_in_turns(runners, feeds, calls)
    for runner in runners.values():
        runner.close()
    medians = {name: float(1e3 * np.median(series)) for name, series in seconds.items()}
    ratio = float(np.median(seconds["dense"] / seconds["other"]))
    return Comparison(medians["other"], medians["dense"], ratio, calls)


def measure_models(dense: nn.Module, other: nn.Module, feeds: Mapping[str, Array], calls: int = 60) -> Comparison:
    """Export two models and compare them, embeddings and task heads included.

    Args:
        dense: the model to compare with.
        other: the model in question.
        feeds: inputs of both, by their names, in the order of the modules' arguments; their shape is what is exported.
        calls: see :func:`compare`.
    """
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


def cpu_name() -> str:
    """Return what the processor calls itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
