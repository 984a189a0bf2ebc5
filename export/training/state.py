"""The state of a training run on disk, from which an interrupted run resumes."""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from edge.datatypes import Array
from edge.errors import Raw
from export.errors import CheckpointError


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
        fix = "Free space, or choose another --out."
        raise CheckpointError(f"{path}", given=Raw(error), expected="a writable place", fix=fix) from None


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
        found = state["fingerprint"]
    except (OSError, RuntimeError, EOFError, KeyError, TypeError, ValueError, pickle.UnpicklingError) as error:
        what = str(error).partition("\n")[0] or type(error).__name__
        raise CheckpointError(f"{path}", given=Raw(what), expected="the state of a training run", fix=fix) from None
    if found != expected:
        given = Raw("the state of a run with other weights, data or settings")
        raise CheckpointError(f"{path}", given=given, expected="the state of this run", fix=fix)
    return state
