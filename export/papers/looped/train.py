"""Training with the truncated loss of paper 003 on prompts that grow, from a plan to a run directory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn

from edge.bundles.manifest import Measure
from export.papers.looped import MODEL
from export.papers.looped.model import PromptConfig, PromptTransformer, trajectory
from export.papers.looped.prompts import (
    EVALUATION,
    FUNCTION_CLASSES,
    VALIDATION,
    Prompts,
    draw_prompts,
    generator_of,
    squared_errors,
    training_generator,
)
from export.papers.looped.recipes import Stage, TrainingPlan
from export.training.checkpoint import fingerprint, load, save
from export.training.device import DeviceName, device_of, model_device, multiplying_in
from export.training.intervals import mean_measure
from export.training.log import RunFiles
from export.training.objective import SILENT, EpochScore, Observer
from export.training.provenance import processor, provenance
from export.training.runs import RunConfig, RunMetrics
from export.training.trainer import train

#: Prompts that choose the best epoch.
_VALIDATION = 256
#: Prompts of an evaluation, as in the paper.
_PROMPTS = 1280
#: Loops after which a looped model is measured.
_MEASURED_LOOPS = (8, 12, 30, 120)


class PromptBatch(NamedTuple):
    """Prompts, and the number of loops to run."""

    prompts: Prompts
    loops: int


class PromptObjective:
    """An :class:`export.training.objective.Objective`: the squared error at every point, over the last loops.

    The loss has exactly T terms. The paper's sum from b to T + b has one more, over which it does not average.

    Args:
        name: of the function class.
        seed: of the prompts, with the number of the stage among those that train the same weights.
    """

    rates: Mapping[nn.Parameter, float] = {}

    def __init__(self, model: PromptTransformer, name: str, stage: Stage, *, seed: int, number: int = 0) -> None:
        self.model, self.steps_per_epoch = model, stage.steps_per_epoch
        self._name, self._stage, self._seed, self._number = name, stage, seed, number
        self._device = model_device(model)
        config = model.config
        validation = draw_prompts(name, _VALIDATION, config.points, config.dims, generator_of(VALIDATION))
        self._validation = validation.to(self._device)

    def fingerprint(self) -> str:
        """Return a hash of the initial weights and of all settings."""
        stage = self._stage
        settings = f"{self.model.config} {self._name} {stage.curriculum} {self._seed} {self._number}"
        settings += f" {stage.recipe.batch_size} {self.steps_per_epoch} {stage.evaluated_loops}"
        return fingerprint([self.model], [], settings)

    def batches(self, epoch: int, first: int) -> Iterator[PromptBatch]:
        """Yield prompts that depend on the seed, the stage and the step alone."""
        curriculum, config = self._stage.curriculum, self.model.config
        for step in range(epoch * self.steps_per_epoch + first, (epoch + 1) * self.steps_per_epoch):
            generator = training_generator(self._seed, self._number, step)
            size, active = (
                (self._stage.recipe.batch_size, curriculum.points.at(step), config.dims),
                curriculum.dims.at(step),
            )
            prompts = draw_prompts(self._name, *size, generator, active_dims=active)
            loops = curriculum.loops.at(step)
            if curriculum.drawn_loops is not None:
                loops = int(torch.randint(curriculum.drawn_loops, loops + 1, (), generator=generator))
            yield PromptBatch(prompts.to(self._device), loops)

    def loss(self, batch: PromptBatch, progress: float) -> Tensor:
        """Return the mean squared error over prompts, points, and the last T loops."""
        prompts = batch.prompts
        with multiplying_in(self._stage.recipe.precision, self._device):
            predictions = self.model(prompts.xs, prompts.ys, batch.loops, self._stage.curriculum.window)
        return (torch.stack(predictions).float() - prompts.ys).square().mean()

    def evaluate(self) -> EpochScore:
        """Return the negated error at the last point, divided by the normaliser of the function class."""
        with torch.no_grad():
            xs, ys = self._validation
            predicted = self.model(xs, ys[:, :-1], self._stage.evaluated_loops, 1)[-1]
            error = float((predicted[:, -1] - ys[:, -1]).square().mean())
        error /= FUNCTION_CLASSES[self._name].normaliser(self.model.config.dims)
        return EpochScore(-error, "error", error)


def create(**arguments: Any) -> PromptTransformer:
    """Return a model with random weights, from the fields of its configuration and the name of its function class."""
    try:
        return PromptTransformer(msgspec.convert(arguments["config"], PromptConfig))
    except (KeyError, msgspec.ValidationError) as error:
        raise TypeError(str(error)) from None  # export.training.checkpoint expects this of wrong arguments


def load_run(directory: str | Path) -> tuple[PromptTransformer, RunConfig, RunMetrics]:
    """Return the model of a run, in evaluation mode, and its records; see :func:`export.training.checkpoint.load`."""
    return load(directory, {MODEL: create})


def train_run(
    name: str,
    plan: TrainingPlan,
    directory: str | Path,
    *,
    seed: int,
    device: DeviceName = "cpu",
    tensorboard: Path | None = None,
    observer: Observer = SILENT,
) -> RunMetrics:
    """Train a model stage by stage, measure it, and write its run directory; the same call resumes an unfinished run.

    Args:
        name: of the function class.
        directory: path of the run; an earlier run there is replaced when this one is done.
        seed: of the initial weights and of the prompts.

    Raises:
        TrainingError: the loss is no longer a finite number.
        UsageError: there is no such device.
    """
    directory = Path(directory)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = PromptTransformer(plan.config)
    model.to(device_of(device))
    log, losses, scores = dict[str, bytes](), list[float](), list[float]()
    seconds, best = 0.0, 0
    stages = [RunFiles(directory.with_name(f"{directory.name}.{stage.name}"), tensorboard) for stage in plan.stages]
    for number, (stage, files) in enumerate(zip(plan.stages, stages, strict=True)):
        objective = PromptObjective(model, name, stage, seed=seed, number=number)
        trained = train(objective, stage.recipe, seed=seed, state=files.state, log=files.log, observer=observer)
        best = len(scores) + trained.best_epoch
        losses += trained.losses
        scores += trained.scores
        seconds += trained.seconds
        log = {key: log.get(key, b"") + lines for key, lines in files.finished().items()}
    model.cpu()
    measures = evaluate(model, name)
    metrics = RunMetrics(model.parameter_count, len(scores), best, seconds, measures, tuple(losses), tuple(scores))
    how = [f"{stage.name}: {stage.steps} steps, {stage.recipe}, {stage.curriculum}" for stage in plan.stages]
    record = provenance(trainer="; ".join(how), data=f"prompts of the function class {name}", seed=seed)
    arguments = {"function": name, "config": msgspec.to_builtins(plan.config)}
    precision = plan.stages[-1].recipe.precision
    config = RunConfig(MODEL, arguments, record, precision=precision, processor=processor())
    save(directory, model, config, metrics, log)
    for files in stages:
        files.remove()
    return metrics


def evaluate(model: PromptTransformer, name: str) -> tuple[Measure, ...]:
    """Return the normalised squared error at the last point of 1,280 prompts, with bootstrap intervals.

    A looped model is measured after each of 8, 12, 30 and 120 loops, the split being ``loops-N``.
    """
    config, looped = model.config, model.config.injection is not None
    xs, ys = draw_prompts(name, _PROMPTS, config.points, config.dims, generator_of(EVALUATION))
    splits = {f"loops-{loops}": loops for loops in _MEASURED_LOOPS} if looped else {"unlooped": 1}
    path = trajectory(model.eval(), xs, ys[:, :-1], max(splits.values()))
    return tuple(
        mean_measure(
            "squared_error", split, squared_errors(name, config.dims, path.predictions[loops - 1], ys[:, -1].numpy())
        )
        for split, loops in splits.items()
    )
