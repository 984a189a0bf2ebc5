"""The last hidden states of a frozen language model on disk: what a head is trained on.

A state takes 2 E bytes, where its logits would take 4 V: for GPT-2 1.5 KB and 201 KB. Only states that predict a token
with a loss are kept. A directory, whose name is the hash of the model's name and the tokens, has

- ``hidden.npy``: FP16 [P, E], the state before each such token
- ``targets.npy``: int32 [P], the token
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.lib import format as npy
from torch import Tensor, nn

from edge.datatypes import Array
from edge.errors import Raw, UsageError
from edge.files import replaced_directory, write_durably
from export.data.tokens import sorted_batches
from export.errors import DataError
from export.generate.objective import padded
from export.generate.tokenizer import Encoded
from export.training.device import model_device

HIDDEN, TARGETS = "hidden.npy", "targets.npy"

#: Returns the states [B, T, E] from which the next tokens of token ids [B, T], int64, are predicted.
Backbone = Callable[[Tensor], Tensor]


class HiddenStates(NamedTuple):
    """States and what they predict; see the module. ``fingerprint`` is the name of their directory."""

    hidden: Array
    targets: Array
    fingerprint: str


def cached_hidden(
    directory: str | Path, backbone: Backbone, sequences: Sequence[Encoded], *, name: str, batch_size: int = 8
) -> HiddenStates:
    """Return the states of some sequences: those below a directory, or computed now and written there.

    Memory holds those of one batch while they are computed; the result is mapped from the disk. Those of each model and
    its sequences have a directory of their own, which is complete or not there.

    Args:
        backbone: causal, in evaluation mode; it is not called if the states are there.
        name: identifies the backbone with its weights, such as their hash.
        batch_size: sequences that are computed together, of about equal length.

    Raises:
        DataError: the files are not whole or cannot be written, or a state is too large for FP16.
        UsageError: no token has a loss.
    """
    own = Path(directory) / _fingerprint(name, sequences)
    if own.exists():
        return _opened(own)
    try:
        with replaced_directory(own) as new:
            _write(new, backbone, sequences, batch_size)
    except OSError as error:
        raise _unusable(own, error, "a writable place", "Free space, or choose another.") from None
    return _opened(own)


def _write(directory: Path, backbone: Backbone, sequences: Sequence[Encoded], batch_size: int) -> None:
    positions = sum(int(one.learnt[1:].sum()) for one in sequences)  # nothing predicts a first token
    if not positions:
        given, fix = Raw(f"{len(sequences)} sequences without any"), "Give examples with solutions."
        raise UsageError("tokens with a loss", given=given, expected="at least one", fix=fix)
    targets = np.empty(positions, np.int32)
    end = 0
    with open(directory / HIDDEN, "xb") as file:
        for states, following in _computed(backbone, sequences, batch_size):
            if not file.tell():
                header = {"descr": "<f2", "fortran_order": False, "shape": (positions, states.shape[1])}
                npy.write_array_header_1_0(file, header)
            file.write(states.tobytes())
            start, end = end, end + len(states)
            targets[start:end] = following
        file.flush()
        os.fsync(file.fileno())
    encoded = io.BytesIO()
    np.save(encoded, targets)
    write_durably(directory / TARGETS, encoded.getvalue())


@torch.no_grad()
def _computed(backbone: Backbone, sequences: Sequence[Encoded], batch_size: int) -> Iterator[tuple[Array, Array]]:
    """Yield the rows of both files for some sequences at a time."""
    device = model_device(backbone) if isinstance(backbone, nn.Module) else torch.device("cpu")
    for places in sorted_batches(np.array([len(one.ids) for one in sequences]), batch_size):
        batch = padded([sequences[place] for place in places], device)
        following = batch.learnt[:, 1:]
        hidden = backbone(batch.ids)[:, :-1][following]
        states = hidden.half()
        if not states.isfinite().all():
            expected = f"at most {np.finfo(np.float16).max:.0f}, the largest FP16"
            fix = "Use a language model with a normalisation before its last layer."
            raise DataError("hidden states", given=float(hidden.abs().max()), expected=expected, fix=fix)
        yield states.cpu().numpy(), batch.ids[:, 1:][following].cpu().numpy()


def _opened(directory: Path) -> HiddenStates:
    try:
        hidden, targets = (np.load(directory / name, mmap_mode="r") for name in (HIDDEN, TARGETS))
        if len(hidden) != len(targets):
            raise ValueError("files of different lengths")
    except (OSError, ValueError) as error:
        fix = "Delete the directory to compute them again."
        raise _unusable(directory, error, "whole files", fix) from None
    return HiddenStates(hidden, np.array(targets), directory.name)


def _fingerprint(name: str, sequences: Sequence[Encoded]) -> str:
    digest = hashlib.sha256(name.encode())
    for one in sequences:
        digest.update(len(one.ids).to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(one.ids, dtype=np.int32).data)
        digest.update(np.ascontiguousarray(one.learnt, dtype=np.bool_).data)
    return digest.hexdigest()


def _unusable(directory: Path, error: Exception, expected: str, fix: str) -> DataError:
    return DataError(f"hidden states in {directory}", given=Raw(error), expected=expected, fix=fix)
