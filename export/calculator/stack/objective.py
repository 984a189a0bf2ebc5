"""What the stack calculator and its baselines learn: values of expressions, from relative errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from edge.bundles.arithmetic import CLOSE, OPEN, TIMES
from export.papers.calculator.stack.data import TRAIN_DEPTH, Split
from export.papers.calculator.stack.machine import StackMachine
from export.training.checkpoint import fingerprint
from export.training.objective import Score
from export.training.recipe import Recipe

#: Steps between two evaluations.
STEPS_PER_EPOCH = 100
#: Cells of the deepest training expression.
TRAIN_CELLS = TRAIN_DEPTH + 1
#: The learning rate of the logits of moves, relative to that of the other weights.
_MOVE_RATE = 3.0
_ENTROPY = 0.003  # weight of its penalty at the last step


class Batch(NamedTuple):
    """Kinds [n, length] of int64, values [n, length] and true values [n] of float64."""

    kinds: Tensor
    values: Tensor
    truth: Tensor


def batch_of(split: Split) -> Batch:
    """Return the items of a split without the padding that all of them have.

    Operands are the decimal numbers of the text, not their FP32 roundings: an exact machine then has no error.
    """
    length = int((split.kinds > 0).sum(1).max())
    values = torch.from_numpy(split.values[:, :length]).double().round(decimals=6)
    return Batch(torch.from_numpy(split.kinds[:, :length]), values, torch.from_numpy(split.truth))


def residuals(answers: Tensor, truth: Tensor) -> Tensor:
    """Return (answer - truth) / (1 + abs(truth))."""
    return (answers - truth) / (1 + truth.abs())


def robust_loss(answers: Tensor, truth: Tensor) -> Tensor:
    """Return the mean of log(1 + e²) over the items, [...], for :func:`residuals` e [..., n].

    A machine whose answers explode on some items still gets a gradient from the others.
    """
    return residuals(answers, truth).square().clamp(max=1e12).log1p().nan_to_num(nan=30.0).mean(-1)


class ExpressionObjective:
    """An :class:`export.training.objective.Objective`: :func:`robust_loss` of all training items in random order.

    Args:
        model: maps kinds and values to answers [n, 1].
        seed: of the order of the items.
    """

    def __init__(self, model: nn.Module, train: Split, val: Split, *, seed: int, recipe: Recipe) -> None:
        self.model = model
        self._train, self._val = batch_of(train), batch_of(val)
        self._lengths = (self._train.kinds > 0).sum(1)
        self._seed, self._batch_size = seed, recipe.batch_size
        self.steps_per_epoch = STEPS_PER_EPOCH
        self.rates: dict[nn.Parameter, float] = {}

    def fingerprint(self) -> str:
        """Return a hash of the initial weights and the training set."""
        return fingerprint([self.model], [tensor.numpy() for tensor in self._train], f"expressions {self._seed}")

    def batches(self, epoch: int, first: int) -> Iterator[Batch]:
        """Yield batches that depend on seed, epoch and position alone."""
        items = self.eligible(epoch).nonzero()[:, 0]
        for number in range(first, self.steps_per_epoch):
            generator = torch.Generator().manual_seed(self._seed * 10**6 + epoch * self.steps_per_epoch + number)
            rows = items[torch.randint(len(items), (self._batch_size,), generator=generator)]
            length = int(self._lengths[rows].max())
            yield Batch(self._train.kinds[rows, :length], self._train.values[rows, :length], self._train.truth[rows])

    def eligible(self, epoch: int) -> Tensor:
        """Return which training items an epoch draws from, [n] of bool."""
        return torch.ones_like(self._lengths, dtype=torch.bool)

    def answers(self, batch: Batch) -> Tensor:
        """Return the model's answers, [..., n]."""
        answers: Tensor = self.model(batch.kinds, batch.values)[:, 0]
        return answers

    def loss(self, batch: Batch, progress: float) -> Tensor:
        """Return the loss of a batch; the sum over machines side by side."""
        return robust_loss(self.answers(batch), batch.truth).sum()

    def evaluate(self) -> Score:
        """Return the loss on ``val``, negated; of machines side by side that of the best."""
        loss = float(self.validation_losses().min())
        return Score(-loss, "val loss", loss)

    def validation_losses(self) -> Tensor:
        """Return the loss on ``val``, a scalar, or [R] of machines side by side."""
        with torch.no_grad():
            return robust_loss(self.answers(self._val), self._val.truth)


class StackObjective(ExpressionObjective):
    """The objective of stack machines: sums first, then products, then parentheses one and two deep.

    In the second half of the epochs the entropy of the moves is penalised, ever more strongly. The gradients of each
    machine are clipped on their own.
    """

    model: StackMachine

    def __init__(self, model: StackMachine, train: Split, val: Split, *, seed: int, recipe: Recipe) -> None:
        super().__init__(model, train, val, seed=seed, recipe=recipe)
        self._epochs = recipe.epochs
        self.rates = {model.moves: _MOVE_RATE}
        kinds = self._train.kinds
        self._depths = ((kinds == OPEN).long() - (kinds == CLOSE).long()).cumsum(1).amax(1)
        self._has_product = (kinds == TIMES).any(1)
        for parameter in model.parameters():
            parameter.register_hook(_clipped)  # type: ignore[no-untyped-call]

    def eligible(self, epoch: int) -> Tensor:
        """Return which training items an epoch draws from, [n] of bool."""
        progress = epoch / self._epochs
        depth = 0 if progress < 0.3 else 1 if progress < 0.5 else TRAIN_DEPTH
        shallow = self._depths <= depth
        return shallow if progress >= 0.15 else shallow & ~self._has_product

    def answers(self, batch: Batch) -> Tensor:
        """Return the answers of each machine, [R, n]."""
        answers: Tensor = self.model(batch.kinds, batch.values, TRAIN_CELLS)
        return answers

    def loss(self, batch: Batch, progress: float) -> Tensor:
        """Return the sum of the machines' losses and of their penalties."""
        shares = self.model.moves.softmax(-1)
        entropy = -(shares * (shares + 1e-12).log()).sum()
        return super().loss(batch, progress) + _ENTROPY * max(0.0, 2 * progress - 1) * entropy


def _clipped(gradient: Tensor) -> Tensor:
    """Return gradients [R, ...] with a norm of at most 1 for each machine, and 0 where they are not finite."""
    norms = gradient.flatten(1).norm(dim=1).view(-1, *[1] * (gradient.dim() - 1))
    return torch.where(norms.isfinite(), gradient / norms.clamp(min=1), 0.0)
