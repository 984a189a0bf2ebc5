"""Training of a language model on examples: next-token cross-entropy, with prompts masked."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from edge.datatypes import Array
from export.data.tokens import shuffled_batches, sorted_batches
from export.generate.tokenizer import Encoded
from export.training.checkpoint import fingerprint
from export.training.device import model_device, multiplying_in
from export.training.objective import Score
from export.training.recipe import Precision


class Batch(NamedTuple):
    """Examples of similar length, padded on the right, which a causal model never looks at.

    Attributes:
        ids: [B, T], int64.
        learnt: [B, T], bool: the tokens with a loss.
    """

    ids: Tensor
    learnt: Tensor


class TeacherForced(NamedTuple):
    """Predictions of tokens, [n] each, row by row.

    Attributes:
        rows: the row of each token.
        losses: cross-entropies in nats.
        predicted: the most likely token.
        targets: the right token.
    """

    rows: Array
    losses: Array
    predicted: Array
    targets: Array


class LanguageObjective:
    """An :class:`export.training.objective.Objective`: cross-entropy of the tokens that are learnt, per token.

    Args:
        model: a causal language model of the package transformers.
        train: rows to train on, in passes of a new random order; an epoch of the trainer is so many batches as
            ``steps_per_epoch`` says, whatever the length of a pass.
        holdout: rows for the score, the perplexity of their tokens that are learnt.
        seed: of the orders.
    """

    rates: Mapping[nn.Parameter, float] = {}

    def __init__(
        self,
        model: nn.Module,
        train: Sequence[Encoded],
        holdout: Sequence[Encoded],
        *,
        seed: int,
        batch_size: int = 32,
        steps_per_epoch: int = 500,
        precision: Precision = "fp32",
    ) -> None:
        self.model, self.steps_per_epoch = model, steps_per_epoch
        self._train, self._holdout = train, holdout
        self._seed, self._batch_size, self._precision = seed, batch_size, precision
        self._device = model_device(model)
        lengths = np.array([len(row.ids) for row in train])

        @lru_cache(maxsize=1)
        def order(number: int) -> list[Array]:
            return shuffled_batches(lengths, batch_size, seed=seed, epoch=number)

        self._order: Callable[[int], list[Array]] = order

    def fingerprint(self) -> str:
        """Return a hash of the initial weights, all rows, and the settings."""
        rows = [array for row in (*self._train, *self._holdout) for array in row]
        settings = f"{len(self._train)} {self._seed} {self._batch_size} {self.steps_per_epoch}"
        return fingerprint([self.model], rows, settings)

    def batches(self, epoch: int, first: int) -> Iterator[Batch]:
        """Yield batches that depend on the seed and the step alone."""
        per_pass = math.ceil(len(self._train) / self._batch_size)
        for step in range(epoch * self.steps_per_epoch + first, (epoch + 1) * self.steps_per_epoch):
            number, place = divmod(step, per_pass)
            yield padded([self._train[row] for row in self._order(number)[place]], self._device)

    def loss(self, batch: Batch, progress: float) -> Tensor:
        """Return the mean cross-entropy of the tokens that are learnt, in nats."""
        return functional.cross_entropy(*learnt_logits(self.model, batch, self._precision))

    def evaluate(self) -> Score:
        """Return the negated cross-entropy of the hold-out, printed as perplexity."""
        cross_entropy = float(teacher_forced(self.model, self._holdout).losses.mean())
        return Score(-cross_entropy, "perplexity", math.exp(min(cross_entropy, 700.0)))


def padded(rows: Sequence[Encoded], device: torch.device) -> Batch:
    """Return rows as a batch on a device, padded with zeros that are not learnt."""
    length = max(len(row.ids) for row in rows)
    ids, learnt = np.zeros((len(rows), length), dtype=np.int64), np.zeros((len(rows), length), dtype=np.bool_)
    for place, row in enumerate(rows):
        ids[place, : len(row.ids)], learnt[place, : len(row.ids)] = row
    return Batch(torch.from_numpy(ids).to(device), torch.from_numpy(learnt).to(device))


def learnt_logits(model: nn.Module, batch: Batch, precision: Precision = "fp32") -> tuple[Tensor, Tensor]:
    """Return the logits of each token that is learnt, [n, V] in FP32, and the tokens, [n], row by row."""
    before = functional.pad(batch.learnt[:, 1:], (0, 1))

    def choose(_: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        return (inputs[0][before],)

    # The last layer has most of the work where V is large, and only these positions need it.
    last: nn.Module = model.get_output_embeddings()  # type: ignore[operator]
    hook = last.register_forward_pre_hook(choose)
    try:
        with multiplying_in(precision, batch.ids.device):
            logits: Tensor = model(batch.ids, use_cache=False).logits
    finally:
        hook.remove()
    return logits.float(), batch.ids[:, 1:][batch.learnt[:, 1:]]


def teacher_forced(model: nn.Module, rows: Sequence[Encoded], batch_size: int = 32) -> TeacherForced:
    """Return what a model predicts at each learnt token of some rows, given the right ones before it."""
    device = model_device(model)
    found: list[Array] = [np.empty((0, 3))] * len(rows)
    with torch.inference_mode():
        for places in sorted_batches(np.array([len(row.ids) for row in rows]), batch_size):
            batch = padded([rows[place] for place in places], device)
            logits, targets = learnt_logits(model, batch)
            losses = functional.cross_entropy(logits, targets, reduction="none")
            tokens = np.stack([one.cpu().double().numpy() for one in (losses, logits.argmax(1), targets)], axis=1)
            ends = np.cumsum(batch.learnt[:, 1:].sum(1).cpu().numpy())
            for place, part in zip(places, np.split(tokens, ends[:-1]), strict=True):
                found[place] = part
    losses, predicted, right = np.concatenate(found).T
    numbers = np.repeat(np.arange(len(rows)), [len(part) for part in found])
    return TeacherForced(numbers, losses, predicted.astype(np.int64), right.astype(np.int64))
