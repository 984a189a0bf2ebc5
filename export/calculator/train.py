"""Training of the calculator's networks: their recipes, objective and run directories."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional

from export.models.attention import AdaptiveMode, adaptive_loss, adaptive_weight
from export.papers.calculator.benchmark import evaluate, head_use
from export.papers.calculator.data import DESCRIPTION, Split, load
from export.papers.calculator.networks import Regressor, Transformer, create
from export.papers.calculator.specs import SPECS
from export.training.checkpoint import fingerprint, save
from export.training.device import DeviceName, device_of, model_device
from export.training.log import RunFiles
from export.training.objective import SILENT, Observer, Score
from export.training.provenance import processor, provenance
from export.training.recipe import Recipe
from export.training.runs import RunConfig, RunMetrics
from export.training.trainer import Trained, train


def recipe_of(name: str, *, epochs: int | None = None, adaptive: AdaptiveMode | None = None) -> Recipe | None:
    """Return the recipe of a model; None for one without training.

    Args:
        epochs: the maximum; None is that of its spec.
        adaptive: how its heads shrink. Such a run does not stop early: lambda rises in the last 5 % of the steps.
    """
    recipe = SPECS[name].recipe
    if recipe is None:
        return None
    if epochs is not None:
        recipe = msgspec.structs.replace(recipe, epochs=epochs)
    return msgspec.structs.replace(recipe, patience=recipe.epochs) if adaptive else recipe


def learnt_items(name: str, splits: Mapping[str, Split], seed: int) -> Split:
    """Return the items that a model learns from: ``train``, or a bootstrap resample of it where its spec says so."""
    return splits["train"].resampled(seed) if SPECS[name].resampled else splits["train"]


class CalculatorObjective:
    """An :class:`export.training.objective.Objective`: the mean squared error of values.

    Args:
        val: decides when to stop and which weights to keep; it is not learnt from.
        seed: of the order of the items.
    """

    def __init__(self, model: Regressor, train: Split, val: Split, *, seed: int, batch_size: int = 32) -> None:
        self.model: Regressor = model
        self._x, self._y, self._val = torch.from_numpy(train.tokens), torch.from_numpy(train.truth)[:, None], val
        self._seed, self._batch_size = seed, batch_size
        self._device = model_device(model)
        self.steps_per_epoch = math.ceil(len(self._x) / batch_size)
        self.rates: dict[nn.Parameter, float] = {}

    def fingerprint(self) -> str:
        """Return a hash of the initial weights and the training set."""
        return fingerprint([self.model], [self._x.numpy(), self._y.numpy()], f"calculator {self._seed}")

    def batches(self, epoch: int, first: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield tokens [N, 15] and values [N, 1] in an order that depends on seed and epoch."""
        generator = torch.Generator().manual_seed(self._seed)
        for _ in range(epoch + 1):  # one generator for all epochs, as the published runs have it
            order = torch.randperm(len(self._x), generator=generator)
        for rows in torch.split(order, self._batch_size)[first:]:
            yield self._x[rows].to(self._device), self._y[rows].to(self._device)

    def loss(self, batch: tuple[Tensor, Tensor], progress: float) -> Tensor:
        """Return the mean squared error, and the loss of the scores of adaptive heads."""
        x, y = batch
        value, scores = self.model.scored(x)
        task = functional.mse_loss(value, y)
        if self.model.adaptive is None:
            return task
        return task + adaptive_weight(progress) * adaptive_loss(scores, self.model.adaptive)

    def evaluate(self) -> Score:
        """Return the mean squared error on ``val``, negated; people read the mean absolute error."""
        errors = torch.from_numpy(self.model.predict(self._val.tokens)[:, 0] - self._val.truth)
        return Score(-float(errors.square().mean()), "val MAE", float(errors.abs().mean()))


def train_run(
    name: str,
    directory: str | Path,
    *,
    seed: int,
    epochs: int | None = None,
    adaptive: AdaptiveMode | None = None,
    arguments: Mapping[str, Any] | None = None,
    recipe: Recipe | None = None,
    device: DeviceName = "cpu",
    tensorboard: Path | None = None,
    observer: Observer = SILENT,
) -> RunMetrics:
    """Make a network, train it unless it is constructed, evaluate it, and write its run directory.

    Args:
        directory: path of the run; an earlier run there is replaced when this one is done.
        seed: of the initial weights and of the order of the items.
        epochs: the maximum; None is the recipe's.
        adaptive: how the heads of a transformer shrink; None for plain attention and for other networks.
        arguments: of the network, in place of those of its spec.
        recipe: in place of that of its spec; it has its own epochs, so ``epochs`` is not used.

    The state of an unfinished run is kept beside it as ``.NAME.state``; the same call resumes from it.

    Raises:
        TrainingError: the loss is no longer a finite number.
        UsageError: there is no such device.
    """
    arguments = {**(arguments or {}), **({"adaptive": adaptive} if adaptive else {})}
    model = create(name, seed, **arguments)
    splits = load()
    recipe = recipe or recipe_of(name, epochs=epochs, adaptive=adaptive)
    files = RunFiles(Path(directory), tensorboard)
    trained = None
    if recipe is not None:
        model.to(device_of(device))
        learnt = learnt_items(name, splits, seed)
        objective = CalculatorObjective(model, learnt, splits["val"], seed=seed, batch_size=recipe.batch_size)
        trained = train(
            objective,
            recipe,
            seed=seed,
            state=files.state,
            save_every=2000,
            log=files.log,
            observer=observer,
        )
        model.cpu()
    metrics = metrics_of(model, splits, trained)
    how = str(recipe) if recipe else "constructed, not trained"
    record = provenance(trainer=how, data=DESCRIPTION, seed=seed if recipe else None)
    config = RunConfig(name, arguments, record, precision="fp32" if recipe else None, processor=processor())
    save(directory, model, config, metrics, files.finished())
    files.remove()
    return metrics


def metrics_of(model: Regressor, splits: Mapping[str, Split], trained: Trained | None) -> RunMetrics:
    """Evaluate a network on all splits; ``trained`` is None for one that is constructed."""
    measures = evaluate(model.predict, splits)
    if isinstance(model, Transformer) and model.adaptive:
        measures += head_use(model, splits)
    if trained is None:
        return RunMetrics(model.parameter_count, 0, 0, 0.0, measures)
    epochs = len(trained.scores)
    return RunMetrics(model.parameter_count, epochs, trained.best_epoch, trained.seconds, measures)
