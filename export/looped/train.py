"""Training of a model on a function class, from a plan to a run directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from edge.bundles.manifest import Measure
from export.papers.looped import MODEL
from export.papers.looped.functions import draw_prompts, squared_errors
from export.papers.looped.model import PromptConfig, PromptTransformer
from export.papers.looped.objective import PromptObjective, Teacher
from export.papers.looped.recipes import Plan
from export.papers.looped.seeds import EVALUATION, generator_of
from export.papers.looped.solvers import trajectory
from export.training.checkpoint import save
from export.training.device import DeviceName, device_of
from export.training.intervals import interval, mean
from export.training.log import RunFiles
from export.training.objective import SILENT, Observer
from export.training.provenance import processor, provenance
from export.training.runs import RunConfig, RunMetrics, Speedup
from export.training.trainer import train

#: Prompts of an evaluation, as in the paper.
PROMPTS = 1280
#: Loops after which a looped model is measured.
MEASURED_LOOPS = (8, 12, 30, 120)


class Start(NamedTuple):
    """Where a training starts that goes on from another run.

    Attributes:
        model: has the initial weights; it is not changed.
        origin: of these weights, for the record of the new run.
        teacher: to learn from beside the truth.
        speedup: of the model over that of the other run.
    """

    model: PromptTransformer
    origin: str
    teacher: Teacher | None = None
    speedup: Speedup | None = None


def create(**arguments: Any) -> PromptTransformer:
    """Return a model with random weights, from the fields of its configuration and the name of its function class."""
    try:
        return PromptTransformer(msgspec.convert(arguments["config"], PromptConfig))
    except (KeyError, msgspec.ValidationError) as error:
        raise TypeError(str(error)) from None  # export.training.checkpoint expects this of wrong arguments


def train_run(
    name: str,
    plan: Plan,
    directory: str | Path,
    *,
    seed: int,
    device: DeviceName = "cpu",
    tensorboard: Path | None = None,
    start: Start | None = None,
    observer: Observer = SILENT,
) -> RunMetrics:
    """Train a model stage by stage, measure it, and write its run directory.

    The states of an unfinished run are kept beside it; the same call resumes from them.

    Args:
        name: of the function class.
        directory: path of the run; an earlier run there is replaced when this one is done.
        seed: of the initial weights and of the prompts.
        start: weights to go on from, of the plan's shape; None draws new ones.

    Raises:
        TrainingError: the loss is no longer a finite number.
        UsageError: there is no such device.
    """
    directory = Path(directory)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = PromptTransformer(plan.config)
    if start is not None:
        model.load_state_dict(start.model.state_dict())
    model.to(device_of(device))
    log: dict[str, bytes] = {}
    losses: list[float] = []
    scores: list[float] = []
    seconds, best = 0.0, 0
    stages = [RunFiles(directory.with_name(f"{directory.name}.{stage.name}"), tensorboard) for stage in plan.stages]
    for number, (stage, files) in enumerate(zip(plan.stages, stages, strict=True)):
        objective = PromptObjective(
            model,
            name,
            stage.curriculum,
            seed=seed,
            stage=number,
            batch_size=stage.recipe.batch_size,
            steps_per_epoch=stage.steps_per_epoch,
            evaluated_loops=stage.evaluated_loops,
            precision=stage.recipe.precision,
            teacher=start and start.teacher,
        )
        trained = train(
            objective,
            stage.recipe,
            seed=seed,
            state=files.state,
            log=files.log,
            observer=observer,
        )
        best = len(scores) + trained.best_epoch
        losses += trained.losses
        scores += trained.scores
        seconds += trained.seconds
        log = {key: log.get(key, b"") + lines for key, lines in files.finished().items()}
    model.cpu()
    metrics = RunMetrics(
        model.parameter_count, len(scores), best, seconds, evaluate(model, name), tuple(losses), tuple(scores)
    )
    how = [f"{stage.name}: {stage.steps} steps, {stage.recipe}, {stage.curriculum}" for stage in plan.stages]
    if start is not None:
        how.insert(0, start.origin)
    record = provenance(trainer="; ".join(how), data=f"prompts of the function class {name}", seed=seed)
    arguments = {"function": name, "config": msgspec.to_builtins(plan.config)}
    config = RunConfig(
        MODEL,
        arguments,
        record,
        speedup=start and start.speedup,
        precision=plan.stages[-1].recipe.precision if plan.stages else None,
        processor=processor(),
    )
    save(directory, model, config, metrics, log)
    for files in stages:
        files.remove()
    return metrics


def evaluate(model: PromptTransformer, name: str) -> tuple[Measure, ...]:
    """Return the normalised squared error at the last point of :data:`PROMPTS` prompts, with bootstrap intervals.

    A looped model is measured after each of :data:`MEASURED_LOOPS`, the split's name being ``loops-N``.
    """
    config = model.config
    xs, ys = draw_prompts(name, PROMPTS, config.points, config.dims, generator_of(EVALUATION))
    looped = config.injection is not None
    path = trajectory(model.eval(), xs, ys[:, :-1], max(MEASURED_LOOPS) if looped else 1)
    measures = []
    for loops in MEASURED_LOOPS if looped else (1,):
        errors = squared_errors(name, config.dims, path.predictions[loops - 1], ys[:, -1].numpy())
        split = f"loops-{loops}" if looped else "unlooped"
        measures.append(
            Measure("squared_error", split, float(errors.mean()), len(errors), interval=interval(mean, errors))
        )
    return tuple(measures)
