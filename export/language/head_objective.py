"""Training of a head, or of a control, on cached hidden states of a frozen language model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from edge.datatypes import Array
from export.generate.read_out import ReadOut
from export.papers.backward.training import HiddenStates, revised_logits
from export.training.checkpoint import fingerprint
from export.training.device import model_device
from export.training.objective import Score


class Batch(NamedTuple):
    """Hidden states [N, E], FP32, and the tokens that follow, [N], int64."""

    hidden: Tensor
    targets: Tensor


class HeadObjective:
    """An :class:`export.training.objective.Objective`: the cross-entropy of the tokens with a loss.

    All is computed in FP32: the logits of trained models are so large that half of their digits would be lost in BF16.
    The cross-entropy is of what the model returns, so that of a literal head is the paper's.

    Args:
        model: maps logits [N, V] to logits, or is a :class:`export.papers.backward.training.HiddenModule`.
        read_out: of the language model; it is moved to the model's device.
        states: to train on; an epoch has each of them once.
        holdout: states that choose the best epoch.
        seed: of the order of the states.
    """

    rates: Mapping[nn.Parameter, float] = {}

    def __init__(
        self,
        model: nn.Module,
        read_out: ReadOut,
        states: HiddenStates,
        holdout: HiddenStates,
        *,
        seed: int,
        batch_size: int = 256,
    ) -> None:
        self.model = model
        self.steps_per_epoch = -(-len(states.targets) // batch_size)
        self._read_out = read_out._replace(weight=read_out.weight.detach().float().to(model_device(model)))
        self._states, self._holdout = states, holdout
        self._seed, self._batch_size = seed, batch_size

    def fingerprint(self) -> str:
        """Return a hash of the initial weights, the frozen ones, the states and all settings."""
        settings = f"{type(self.model).__name__} {self._read_out.softcap} {self._states.fingerprint}"
        settings += f" {self._holdout.fingerprint} {self._seed} {self._batch_size}"
        frozen = (self._read_out.weight, *self.model.buffers())
        return fingerprint([self.model], (tensor.cpu().numpy() for tensor in frozen), settings)

    def batches(self, epoch: int, first: int) -> Iterator[Batch]:
        """Yield the states in an order that depends on the seed and the epoch alone."""
        order = np.random.default_rng((self._seed, epoch)).permutation(len(self._states.targets))
        yield from _batches(self._states, order[first * self._batch_size :], self._batch_size, self._device)

    def loss(self, batch: Batch, progress: float) -> Tensor:
        """Return the mean cross-entropy."""
        return self._losses(batch).mean()

    def evaluate(self) -> Score:
        """Return the negated mean cross-entropy on the hold-out."""
        error = float(self.losses(self._holdout).mean())
        return Score(-error, "cross-entropy", error)

    @torch.no_grad()
    def losses(self, states: HiddenStates) -> Array:
        """Return the cross-entropy of each token, FP64 [P]."""
        rows = np.arange(len(states.targets))
        batches = _batches(states, rows, self._batch_size, self._device)
        return np.concatenate([self._losses(batch).double().cpu().numpy() for batch in batches])

    @property
    def _device(self) -> torch.device:
        return self._read_out.weight.device

    def _losses(self, batch: Batch) -> Tensor:
        with torch.no_grad():
            logits = self._read_out.logits(batch.hidden)
        revised = revised_logits(self.model, logits, batch.hidden)
        return functional.cross_entropy(revised, batch.targets, reduction="none")


def _batches(states: HiddenStates, rows: Array, batch_size: int, device: torch.device) -> Iterator[Batch]:
    for start in range(0, len(rows), batch_size):
        some = np.sort(rows[start : start + batch_size])  # as they are on the disk
        hidden, targets = states.hidden[some].astype(np.float32), states.targets[some].astype(np.int64)
        yield Batch(torch.from_numpy(hidden).to(device), torch.from_numpy(targets).to(device))
