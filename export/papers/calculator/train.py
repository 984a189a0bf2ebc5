"""Training of the calculator's networks: their recipes, objective and run directories."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from export.data.expressions import DESCRIPTION, Split, load
from export.papers.calculator.benchmark import evaluate
from export.papers.calculator.networks import Regressor, create
from export.papers.calculator.specs import SPECS
from export.training.checkpoint import fingerprint, save
from export.training.device import DeviceName, device_of, model_device
from export.training.log import RunFiles
from export.training.objective import SILENT, EpochScore, Observer
from export.training.provenance import processor, provenance
from export.training.runs import RunConfig, RunMetrics
from export.training.trainer import train


class CalculatorObjective:
    """An :class:`export.training.objective.Objective`: the mean squared error of values.

    Args:
        val: decides when to stop and which weights to keep; it is not learnt from. None: the mean of the losses within
            an epoch does, as in the code of paper 000's LSTM, and all epochs have the order of ``train``.
        seed: of the order of the items.
    """

    def __init__(self, model: Regressor, train: Split, val: Split | None, *, seed: int, batch_size: int = 32) -> None:
        self.model: Regressor = model
        self._x, self._y, self._val = torch.from_numpy(train.tokens), torch.from_numpy(train.truth)[:, None], val
        self._seed, self._batch_size = seed, batch_size
        self._losses: list[tuple[int, float]] = []  # items and mean loss of each batch of the epoch, without ``val``
        self._device = model_device(model)
        self.steps_per_epoch = math.ceil(len(self._x) / batch_size)
        self.rates: dict[nn.Parameter, float] = {}

    def fingerprint(self) -> str:
        """Return a hash of the initial weights and the training set."""
        return fingerprint([self.model], [self._x.numpy(), self._y.numpy()], f"calculator {self._seed}")

    def batches(self, epoch: int, first: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield tokens [N, 15] and values [N, 1], with ``val`` in an order that depends on seed and epoch."""
        self._losses, order = [], torch.arange(len(self._x))
        generator = torch.Generator().manual_seed(self._seed)
        for _ in range(epoch + 1 if self._val else 0):  # one generator for all epochs, as the published runs have it
            order = torch.randperm(len(self._x), generator=generator)
        for rows in torch.split(order, self._batch_size)[first:]:
            yield self._x[rows].to(self._device), self._y[rows].to(self._device)

    def loss(self, batch: tuple[Tensor, Tensor], progress: float) -> Tensor:
        """Return the mean squared error."""
        x, y = batch
        loss = functional.mse_loss(self.model(x), y)
        if self._val is None:
            self._losses.append((len(x), loss.item()))
        return loss

    def evaluate(self) -> EpochScore:
        """Return the mean squared error on ``val``, negated; people read the mean absolute error.

        Without ``val``, both are the mean of the losses within the epoch.
        """
        if self._val is None:
            items, losses = zip(*self._losses, strict=True)
            within = float(np.average(losses, weights=items))
            return EpochScore(-within, "train MSE", within)
        errors = torch.from_numpy(self.model.predict(self._val.tokens)[:, 0] - self._val.truth)
        return EpochScore(-float(errors.square().mean()), "val MAE", float(errors.abs().mean()))


def train_run(
    name: str,
    directory: str | Path,
    *,
    seed: int,
    epochs: int | None = None,
    device: DeviceName = "cpu",
    tensorboard: Path | None = None,
    observer: Observer = SILENT,
) -> RunMetrics:
    """Make a network, train it unless it is constructed, evaluate it, and write its run directory.

    The state of an unfinished run is kept beside it as ``.NAME.state``; the same call resumes from it.

    Args:
        directory: path of the run; an earlier run there is replaced when this one is done.
        seed: of the initial weights and of the order of the items.
        epochs: the maximum; None is the recipe's.

    Raises:
        TrainingError: the loss is no longer a finite number.
        UsageError: there is no such device.
    """
    spec, model, splits = SPECS[name], create(name, seed), load()
    recipe = spec.recipe
    files, history = RunFiles(Path(directory), tensorboard), (0, 0, 0.0)
    if recipe is not None:
        recipe = msgspec.structs.replace(recipe, epochs=epochs or recipe.epochs)
        model.to(device_of(device))
        learnt = splits["train"].resampled(seed) if spec.resampled else splits["train"]
        val = splits["val"] if spec.validated else None
        objective = CalculatorObjective(model, learnt, val, seed=seed, batch_size=recipe.batch_size)
        whole = objective.steps_per_epoch  # a state after each epoch: one within it would lack the losses before
        trained = train(
            objective, recipe, seed=seed, state=files.state, save_every=whole, log=files.log, observer=observer
        )
        history = len(trained.scores), trained.best_epoch, trained.seconds
        model.cpu()
    metrics = RunMetrics(model.parameter_count, *history, evaluate(model.predict, splits))
    trainer, learns = (str(recipe), seed) if recipe else ("constructed, not trained", None)
    record = provenance(trainer=trainer, data=DESCRIPTION, seed=learns)
    config = RunConfig(name, {}, record, precision="fp32" if recipe else None, processor=processor())
    save(directory, model, config, metrics, files.finished())
    files.remove()
    return metrics
