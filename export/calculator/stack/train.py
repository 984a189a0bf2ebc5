"""Training of the stack calculator: machines side by side by gradients, then the best of them until it is exact."""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch

from export.calculator.stack.data import DESCRIPTION, Split, load
from export.calculator.stack.evaluate import evaluate
from export.calculator.stack.machine import Scan, StackMachine
from export.calculator.stack.objective import StackObjective, batch_of
from export.calculator.stack.refine import Fit
from export.checkpoint import save
from export.processor import processor
from export.provenance import provenance
from export.runs import RunConfig, RunMetrics
from export.training.observer import SILENT, Observer
from export.training.recipe import Recipe
from export.training.run_files import RunFiles
from export.training.trainer import train

NAME = "calculator-stack"
RESTARTS = 16
RECIPE = Recipe(
    epochs=30,
    peak_learning_rate=2e-2,
    batch_size=128,
    betas=(0.9, 0.99),
    warmup_share=0.01,
    schedule="linear",
    final_share=0.02,
)
#: Training items that the weights of an exact machine are fitted to.
_FITTED_ITEMS = 250


class Refined(msgspec.Struct, frozen=True):
    """A machine after its refinement: its loss on ``val`` before, whether it is exact, and its weights still free."""

    machine: StackMachine
    loss: float
    is_exact: bool
    free_weights: int


def train_run(
    directory: str | Path,
    *,
    seed: int,
    epochs: int | None = None,
    tensorboard: Path | None = None,
    observer: Observer = SILENT,
) -> RunMetrics:
    """Train machines side by side, refine the best ones until one is exact, evaluate it, and write its run directory.

    If none is exact, the best one on ``val`` is written as it is. The state of an unfinished run is kept beside it; the
    same call resumes from it.

    Args:
        directory: path of the run; an earlier run there is replaced when this one is done.
        seed: of the initial weights and of the order of the items.
        epochs: of 100 steps; None is the recipe's.

    Raises:
        TrainingError: the loss is no longer a finite number.
    """
    recipe = RECIPE if epochs is None else msgspec.structs.replace(RECIPE, epochs=epochs)
    machines = StackMachine(RESTARTS, torch.Generator().manual_seed(seed))
    splits = load()
    objective = StackObjective(
        machines, splits["train"], splits["val"], seed=seed, batch_size=recipe.batch_size, epochs=recipe.epochs
    )
    files = RunFiles(Path(directory), tensorboard)
    trained = train(objective, recipe, seed=seed, state=files.state, log=files.log, observer=observer)
    losses = objective.validation_losses()
    best: Refined | None = None
    for restart in losses.argsort().tolist():
        refined = refine(machines.select(restart), splits["train"], float(losses[restart]))
        best = best or refined
        if refined.is_exact:
            best = refined
            break
    assert best is not None, "there is more than one machine"
    machine = best.machine
    measures = evaluate(Scan(machine), splits)
    metrics = RunMetrics(machine.parameter_count, len(trained.scores), trained.best_epoch, trained.seconds, measures)
    record = provenance(trainer=f"{RESTARTS} restarts, {recipe}", data=DESCRIPTION, seed=seed)
    config = RunConfig(NAME, {}, record, precision="fp32", processor=processor())
    save(directory, machine, config, metrics, files.finished())
    files.remove()
    return metrics


def refine(machine: StackMachine, train: Split, loss: float) -> Refined:
    """Choose the moves of a machine and fit its weights to training items; if it is exact then, fix weights too."""
    machine.choose_moves()
    items = batch_of(train)
    fit = Fit(machine, type(items)(*(tensor[:_FITTED_ITEMS] for tensor in items)))
    is_exact = fit.solve()
    if is_exact:
        fit.snap()
    fit.write()
    return Refined(machine, loss, is_exact, int(fit.free.sum()))
