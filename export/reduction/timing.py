"""Two models on ONNX Runtime, CPU, one thread, timed in turns."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

from edge.datatypes import Array
from edge.profiling.table import Comparison
from edge.profiling.timing import compared, times_in_turns
from edge.runtimes.onnxruntime_runner import OnnxRuntimeRunner
from export.convert import to_onnx
from export.transformer import TransformerConfig


def compare(dense: bytes, other: bytes, feeds: Mapping[str, Array], calls: int) -> Comparison:
    """Call two ONNX models in turns.

    Args:
        calls: of each, after some that do not count.

    Raises:
        BundleError: ONNX Runtime does not take a model.
    """
    models = {"dense": dense, "other": other}
    runners = {name: OnnxRuntimeRunner(model, subject="a model to be timed") for name, model in models.items()}
    seconds = times_in_turns(runners, feeds, calls)
    for runner in runners.values():
        runner.close()
    return compared(seconds["dense"], seconds["other"])


def measure_models(dense: nn.Module, other: nn.Module, feeds: Mapping[str, Array], calls: int = 60) -> Comparison:
    """Export two models and compare them, embeddings and task heads included.

    Args:
        feeds: inputs of both, by their names, in the order of the modules' arguments; their shape is what is exported.
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
