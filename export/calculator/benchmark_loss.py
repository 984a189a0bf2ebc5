"""Paper 000's benchmark as a loss: logarithms of errors in range, out of range and on long expressions.

The score of a network is a geometric mean of ratios of errors, so its logarithm is a mean of logarithms of errors, and
the baseline's errors are constants in it. The terms are computed on the training items and on generated dev splits,
never on the benchmark's own items.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from export.papers.calculator import generated
from export.papers.calculator.benchmark import FLOOR
from export.papers.calculator.data import Split
from export.papers.calculator.networks import Regressor
from export.papers.calculator.train import CalculatorObjective
from export.training.checkpoint import fingerprint
from export.training.device import model_device
from export.training.objective import Score

DevLoss = Literal["mse", "mae", "benchmark"]
#: Batches by split: tokens [N, 15] and values [N, 1].
Batch = Mapping[str, tuple[Tensor, Tensor]]


class DevObjective:
    """An :class:`export.training.objective.Objective`: a loss over the training items and both dev splits.

    A batch holds equally many items of the three, whatever the loss is, so that losses differ in nothing else. The
    epoch is chosen by the benchmark's terms on ``val`` and on the parts of the dev splits that are not learnt from.

    Args:
        loss: ``mse`` and ``mae`` are over all items of a batch, ``benchmark`` is :func:`log_errors`.
        batch_size: of each of the three.
    """

    def __init__(
        self, model: Regressor, splits: Mapping[str, Split], loss: DevLoss, *, seed: int, batch_size: int = 32
    ) -> None:
        self._plain = CalculatorObjective(model, splits["train"], splits["val"], seed=seed, batch_size=batch_size)
        self.model, self.steps_per_epoch, self.rates = model, self._plain.steps_per_epoch, self._plain.rates
        self._kind, self._seed, self._batch_size, self._device = loss, seed, batch_size, model_device(model)
        dev = generated.dev()
        self._further = {name: _tensors(split) for name, split in dev.learnt.items()}
        self._choice = {name: _tensors(split) for name, split in {"in_range": splits["val"], **dev.choice}.items()}

    def fingerprint(self) -> str:
        """Return a hash of the initial weights, the training set and the loss."""
        data = [tensor.numpy() for pair in self._further.values() for tensor in pair]
        return fingerprint([], data, f"{self._plain.fingerprint()} {self._kind}")

    def batches(self, epoch: int, first: int) -> Iterator[Batch]:
        """Yield batches in an order that depends on seed and epoch; dev items come several times in an epoch."""
        generator = torch.Generator().manual_seed(1_000_003 * self._seed + epoch)
        needed = self.steps_per_epoch * self._batch_size
        orders = {}
        for name, (x, _) in self._further.items():
            times = -(-needed // len(x))
            orders[name] = torch.cat([torch.randperm(len(x), generator=generator) for _ in range(times)])
        for number, learnt in enumerate(self._plain.batches(epoch, first), first):
            batch = {"in_range": learnt}
            for name, (x, y) in self._further.items():
                rows = orders[name][number * self._batch_size : (number + 1) * self._batch_size]
                batch[name] = x[rows].to(self._device), y[rows].to(self._device)
            yield batch

    def loss(self, batch: Batch, progress: float) -> Tensor:
        """Return the loss."""
        value = self.model(torch.cat([x for x, _ in batch.values()]))
        truth = torch.cat([y for _, y in batch.values()])
        if self._kind == "mse":
            return functional.mse_loss(value, truth)
        if self._kind == "mae":
            return functional.l1_loss(value, truth)
        values = value.split([len(x) for x, _ in batch.values()])
        return log_errors(dict(zip(batch, values, strict=True)), {name: y for name, (_, y) in batch.items()})

    def evaluate(self) -> Score:
        """Return the benchmark's terms, negated; people read the geometric mean of the four errors."""
        values = {name: torch.from_numpy(self.model.predict(x.numpy())) for name, (x, _) in self._choice.items()}
        found = log_errors(values, {name: y for name, (_, y) in self._choice.items()})
        return Score(-found.item(), "dev error", found.exp().item())


def log_errors(values: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> Tensor:
    """Return the mean of four logarithms: MAE in range, out of range, on long expressions, and MRE out of range.

    Args:
        values: [N, 1] of the splits ``in_range``, ``out_of_range`` and ``long``. All long items have the same weight,
            whereas the benchmark averages over lengths; the dev splits have about as many of each length.
        truth: [N, 1] of the same; zeros count as 1 in MRE.
    """
    errors = {name: (value - truth[name]).abs() for name, value in values.items()}
    relative = errors["out_of_range"] / truth["out_of_range"].abs().clamp(min=1)
    means = torch.stack([error.mean() for error in (*errors.values(), relative)])
    return means.clamp(min=FLOOR).log().mean()


def _tensors(split: Split) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(split.tokens), torch.from_numpy(split.truth)[:, None]
