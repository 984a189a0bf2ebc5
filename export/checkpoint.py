"""A run directory: ``weights.safetensors``, ``config.json`` and ``metrics.json``, written whole or not at all.

A model of text has its ``tokenizer.json`` beside them, and one that was measured its ``predictions.npz``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from edge.bundles.manifest import Measure, Provenance
from edge.errors import Literally
from edge.files import replaced_directory, write_durably
from export.errors import CheckpointError

WEIGHTS, CONFIG, METRICS = "weights.safetensors", "config.json", "metrics.json"
TOKENIZER, PREDICTIONS = "tokenizer.json", "predictions.npz"
_FIX = "Train the model again."

ModuleT = TypeVar("ModuleT", bound=nn.Module)
StructT = TypeVar("StructT", bound=msgspec.Struct)


class RunConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was trained: a model's name, the arguments that rebuild it, and where its weights come from."""

    model: str
    arguments: dict[str, Any]
    provenance: Provenance


class RunMetrics(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How it went: parameters, epochs until the end and the best of them, seconds, and the measured accuracy."""

    parameters: int
    epochs: int
    best_epoch: int
    seconds: float
    measures: tuple[Measure, ...]


def save(
    directory: str | Path,
    module: nn.Module,
    config: RunConfig,
    metrics: RunMetrics,
    further: Mapping[str, bytes] | None = None,
) -> None:
    """Write a run directory; an earlier run that stands there is replaced.

    Args:
        directory: where.
        module: its weights are written.
        config: what rebuilds it.
        metrics: how good it is.
        further: the contents of :data:`TOKENIZER` and :data:`PREDICTIONS`, where there are such.

    Raises:
        CheckpointError: something else stands there, or the disk refuses.
    """
    directory = Path(directory)
    if directory.exists() and not _is_run(directory):
        given = Literally("something that is not a run")
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
        raise CheckpointError(
            f"run {directory}", given=Literally(error), expected="a writable place", fix=fix
        ) from None


def load(directory: str | Path, models: Mapping[str, Callable[..., ModuleT]]) -> tuple[ModuleT, RunConfig, RunMetrics]:
    """Read a run directory.

    Args:
        directory: what :func:`save` wrote.
        models: from a model's name to what makes it.

    Returns:
        The module with its weights, in evaluation mode, the configuration and the metrics.

    Raises:
        CheckpointError: a file is missing or malformed, the model is unknown, or the weights do not fit it or are not
            finite.
    """
    directory = Path(directory)
    if not directory.is_dir():
        given = Literally("a file" if directory.exists() else "nothing there")
        fix = "Give a directory that 'fewheads train' wrote, for example runs/calculator-gate."
        raise CheckpointError(f"run {directory}", given=given, expected="a run directory", fix=fix)
    config = _decode(directory / CONFIG, RunConfig)
    metrics = _decode(directory / METRICS, RunMetrics)
    if config.model not in models:
        subject = f"{directory / CONFIG} field model"
        raise CheckpointError(subject, given=config.model, expected=f"one of {', '.join(models)}", fix=_FIX)
    try:
        module = models[config.model](**config.arguments)
    except TypeError as error:
        expected = f"the arguments of {config.model}"
        raise CheckpointError(
            f"{directory / CONFIG} field arguments", given=Literally(error), expected=expected, fix=_FIX
        ) from None
    _load_weights(module, directory / WEIGHTS)
    return module.eval(), config, metrics


def _load_weights(module: nn.Module, path: Path) -> None:
    try:
        weights = safetensors.torch.load(_read(path))
    except SafetensorError as error:
        raise CheckpointError(f"{path}", given=Literally(error), expected="a safetensors file", fix=_FIX) from None
    wanted: dict[str, Tensor] = module.state_dict()
    if set(weights) != set(wanted):
        name = sorted(set(weights) ^ set(wanted))[0]
        given = Literally("a tensor that the model has not" if name in weights else "no such tensor")
        raise CheckpointError(f"{path} tensor {name!r}", given=given, expected="the model's tensors", fix=_FIX)
    for name, tensor in weights.items():
        if tensor.shape != wanted[name].shape or tensor.dtype != wanted[name].dtype:
            given, expected = (Literally(f"{t.dtype} {list(t.shape)}") for t in (tensor, wanted[name]))
            raise CheckpointError(f"{path} tensor {name!r}", given=given, expected=expected, fix=_FIX)
        if not torch.isfinite(tensor).all():
            given = Literally("NaN or Inf")
            raise CheckpointError(f"{path} tensor {name!r}", given=given, expected="finite weights", fix=_FIX)
    module.load_state_dict(weights)


def _is_run(directory: Path) -> bool:
    if not directory.is_dir():
        return False
    return {entry.name for entry in directory.iterdir()} - {TOKENIZER, PREDICTIONS} == {WEIGHTS, CONFIG, METRICS}


def _encode(value: msgspec.Struct) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"


def _decode(path: Path, kind: type[StructT]) -> StructT:
    try:
        return msgspec.json.decode(_read(path), type=kind)
    except msgspec.DecodeError as error:  # ValidationError is one too
        raise CheckpointError(
            f"{path}", given=Literally(error), expected=f"the fields of {kind.__name__}", fix=_FIX
        ) from None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}", given=Literally(error.strerror), expected="a file", fix=_FIX) from None
