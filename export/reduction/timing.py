"""Two models on ONNX Runtime, CPU, one thread, timed in turns.

Times drift with clocks and neighbours; a ratio of times taken in turns hardly does.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import nn

from edge.datatypes import Array
from edge.onnxruntime_runner import OnnxRuntimeRunner
from export.convert import to_onnx
from export.transformer import TransformerConfig

_WARM_UP = 5


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
    runners = [OnnxRuntimeRunner(model, subject="a model to be timed") for model in (dense, other)]
    times: tuple[list[float], list[float]] = ([], [])
    for call in range(_WARM_UP + calls):
        for runner, series in zip(runners, times, strict=True):
            started = time.perf_counter()
            runner.infer(feeds)
            if call >= _WARM_UP:
                series.append(1e3 * (time.perf_counter() - started))
    for runner in runners:
        runner.close()
    ratio = statistics.median(dense_time / time for dense_time, time in zip(*times, strict=True))
    dense_median, median = (statistics.median(series) for series in times)
    return Comparison(median, dense_median, ratio, calls)


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
