"""Run directories: atomic writes, and reads that check the weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from edge.errors import Raw
from edge.files import replaced_directory, write_durably
from export.errors import CheckpointError
from export.training.runs import (
    CONFIG,
    METRICS,
    TRAIN_AGAIN,
    WEIGHTS,
    RunConfig,
    RunMetrics,
    decode,
    is_run,
    read,
    read_config,
)

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def save(
    directory: str | Path,
    module: nn.Module,
    config: RunConfig,
    metrics: RunMetrics,
    further: Mapping[str, bytes] | None = None,
) -> None:
    """Write a run directory; an earlier run at that path is replaced.

    Args:
        further: contents by file name, for the optional files ``tokenizer.json`` and ``predictions.npz``.

    Raises:
        CheckpointError: the path holds something that is not a run, or the disk refuses.
    """
    directory = Path(directory)
    if directory.exists() and not is_run(directory):
        given = Raw("something that is not a run")
        expected = "a free path or an earlier run"
        raise CheckpointError(f"run {directory}", given=given, expected=expected, fix="Choose another --out.")
    contents = {
        WEIGHTS: safetensors.torch.save({name: tensor.contiguous() for name, tensor in module.state_dict().items()}),
        CONFIG: _encode(config),
        METRICS: _encode(metrics),
        **(further or {}),
    }
    try:
        with replaced_directory(directory) as new:
            for name, data in contents.items():
                write_durably(new / name, data)
    except OSError as error:
        fix = "Free space, or choose another --out."
        raise CheckpointError(f"run {directory}", given=Raw(error), expected="a writable place", fix=fix) from None


def load(directory: str | Path, models: Mapping[str, Callable[..., ModuleT]]) -> tuple[ModuleT, RunConfig, RunMetrics]:
    """Read a run directory.

    Returns:
        The module with its weights, in evaluation mode, the configuration and the metrics.

    Raises:
        CheckpointError: a file is missing or malformed, the model is unknown, or the weights do not fit it or are not
            finite.
    """
    directory = Path(directory)
    config = read_config(directory)
    metrics = decode(directory / METRICS, RunMetrics)
    if config.model not in models:
        subject = f"{directory / CONFIG} field model"
        raise CheckpointError(subject, given=config.model, expected=f"one of {', '.join(models)}", fix=TRAIN_AGAIN)
    try:
        module = models[config.model](**config.arguments)
    except TypeError as error:
        expected = f"the arguments of {config.model}"
        raise CheckpointError(
            f"{directory / CONFIG} field arguments", given=Raw(error), expected=expected, fix=TRAIN_AGAIN
        ) from None
    _load_weights(module, directory / WEIGHTS)
    return module.eval(), config, metrics


def _load_weights(module: nn.Module, path: Path) -> None:
    try:
        weights = safetensors.torch.load(read(path))
    except SafetensorError as error:
        raise CheckpointError(f"{path}", given=Raw(error), expected="a safetensors file", fix=TRAIN_AGAIN) from None
    wanted: dict[str, Tensor] = module.state_dict()
    if set(weights) != set(wanted):
        name = sorted(set(weights) ^ set(wanted))[0]
        given = Raw("a tensor that the model lacks" if name in weights else "no such tensor")
        raise CheckpointError(f"{path} tensor {name!r}", given=given, expected="the model's tensors", fix=TRAIN_AGAIN)
    for name, tensor in weights.items():
        if tensor.shape != wanted[name].shape or tensor.dtype != wanted[name].dtype:
            given, expected = (Raw(f"{t.dtype} {list(t.shape)}") for t in (tensor, wanted[name]))
            raise CheckpointError(f"{path} tensor {name!r}", given=given, expected=expected, fix=TRAIN_AGAIN)
        if not torch.isfinite(tensor).all():
            given = Raw("NaN or Inf")
            raise CheckpointError(f"{path} tensor {name!r}", given=given, expected="finite weights", fix=TRAIN_AGAIN)
    module.load_state_dict(weights)


def _encode(value: msgspec.Struct) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"
