"""Run directories: atomic writes, and reads that check the weights."""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from edge.datatypes import Array
from edge.errors import Raw
from edge.files import replaced_directory, write_durably
from export.errors import CheckpointError
from export.report.card import run_card
from export.training.runs import (
    CARD,
    CONFIG,
    METRICS,
    TRAIN_AGAIN,
    WEIGHTS,
    RunConfig,
    RunMetrics,
    is_run,
    read,
    read_config,
    read_metrics,
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
        CARD: run_card(directory.name, config, metrics).encode(),
        **(further or {}),
    }
    try:
        with replaced_directory(directory) as new:
            for name, data in contents.items():
                write_durably(new / name, data)
    except OSError as error:
        raise _unwritable(f"run {directory}", error) from None


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
    metrics = read_metrics(directory)
    if config.model not in models:
        subject = f"{directory / CONFIG} field model"
        fix = "Give a run of such a model."
        raise CheckpointError(subject, given=config.model, expected=f"one of {', '.join(models)}", fix=fix)
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
    def broken(what: str, given: object, expected: str) -> CheckpointError:
        return CheckpointError(f"{path}{what}", given=Raw(given), expected=expected, fix=TRAIN_AGAIN)

    try:
        weights = safetensors.torch.load(read(path))
    except SafetensorError as error:
        raise broken("", error, "a safetensors file") from None
    wanted: dict[str, Tensor] = module.state_dict()
    for name in sorted(set(weights) ^ set(wanted)):
        given = "a tensor that the model lacks" if name in weights else "no such tensor"
        raise broken(f" tensor {name!r}", given, "the model's tensors")
    for name, tensor in weights.items():
        given, expected = (f"{each.dtype} {list(each.shape)}" for each in (tensor, wanted[name]))
        if given != expected:
            raise broken(f" tensor {name!r}", given, expected)
        if not torch.isfinite(tensor).all():
            raise broken(f" tensor {name!r}", "NaN or Inf", "finite weights")
    module.load_state_dict(weights)


def _encode(value: msgspec.Struct) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"


def fingerprint(models: Sequence[nn.Module], data: Iterable[Array], settings: str) -> str:
    """Return a hash of all that a run depends on: initial weights and teacher, training set, and settings as text."""
    digest = hashlib.sha256(settings.encode())
    for name, tensor in (item for model in models for item in model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().data)
    for array in data:
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def save_state(path: Path, state: dict[str, Any]) -> None:
    """Write a state; the earlier one stays until the new one is complete.

    Raises:
        CheckpointError: the disk is full or not writable.
    """
    scratch = path.with_name(f"{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(scratch, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    except OSError as error:
        raise _unwritable(f"{path}", error) from None


def load_state(path: Path, expected: str) -> dict[str, Any] | None:
    """Return a state of :func:`save_state`; None if there is none.

    Raises:
        CheckpointError: it is malformed, or its fingerprint is not the expected one.
    """
    fix = "Delete it to start the run from the beginning, or choose another --out."
    if not path.exists():
        return None
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True)
        recorded = state["fingerprint"]
    except (OSError, RuntimeError, EOFError, KeyError, TypeError, ValueError, pickle.UnpicklingError) as error:
        what = str(error).partition("\n")[0] or type(error).__name__
        raise CheckpointError(f"{path}", given=Raw(what), expected="the state of a training run", fix=fix) from None
    if recorded != expected:
        given = Raw("the state of a run with other weights, data or settings")
        raise CheckpointError(f"{path}", given=given, expected="the state of this run", fix=fix)
    return state


def _unwritable(subject: str, error: OSError) -> CheckpointError:
    fix = "Free space, or choose another --out."
    return CheckpointError(subject, given=Raw(error), expected="a writable place", fix=fix)
