"""Training of the stack calculator and its baselines: machines side by side, and then the best until it is exact."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from torch import Tensor, nn

from edge.bundles.manifest import Measure
from export.calculator.stack import LSTM, STACK, TRANSFORMER
from export.calculator.stack.baselines import BASELINES
from export.calculator.stack.data import DESCRIPTION, load
from export.calculator.stack.evaluate import evaluate
from export.calculator.stack.machine import Scan, StackMachine
from export.calculator.stack.objective import Batch, ExpressionObjective, StackObjective, batch_of
from export.calculator.stack.refine import Fit
from export.checkpoint import save
from export.processor import processor
from export.provenance import provenance
from export.runs import RunConfig, RunMetrics
from export.training.observer import SILENT, Observer
from export.training.recipe import Recipe
from export.training.run_files import RunFiles
from export.training.trainer import train

RESTARTS = 16
RECIPES = {
    STACK: Recipe(
        epochs=30,
        peak_learning_rate=2e-2,
        batch_size=128,
        betas=(0.9, 0.99),
        warmup_share=0.01,
        schedule="linear",
        final_share=0.02,
    ),
    **dict.fromkeys(
        (LSTM, TRANSFORMER),
        Recipe(epochs=30, peak_learning_rate=2e-3, batch_size=128, warmup_share=0.05, schedule="cosine", clip_norm=1.0),
    ),
}
#: Functions that return a network as a run keeps it.
NETWORKS: dict[str, Callable[..., nn.Module]] = {STACK: StackMachine, **BASELINES}
#: Training items that the weights of a machine are fitted to.
_FITTED_ITEMS = 160


def train_token_reader(
    name: str,
    directory: str | Path,
    *,
    seed: int,
    epochs: int | None = None,
    tensorboard: Path | None = None,
    observer: Observer = SILENT,
) -> RunMetrics:
    """Train a network on the processor, evaluate it, and write its run directory.

    The state of an unfinished run is kept beside it; the same call resumes from it.

    Args:
        name: of the model.
        directory: path of the run; an earlier run there is replaced when this one is done.
        seed: of the initial weights and of the order of the items.
        epochs: of 100 steps; None is the recipe's.

    Raises:
        TrainingError: the loss is no longer a finite number.
    """
    recipe = RECIPES[name] if epochs is None else msgspec.structs.replace(RECIPES[name], epochs=epochs)
    splits = load()
    model = create(name, seed)
    train_split, val = splits["train"], splits["val"]
    if isinstance(model, StackMachine):
        objective: ExpressionObjective = StackObjective(model, train_split, val, seed=seed, recipe=recipe)
    else:
        objective = ExpressionObjective(model, train_split, val, seed=seed, recipe=recipe)
    files = RunFiles(Path(directory), tensorboard)
    trained = train(objective, recipe, seed=seed, state=files.state, log=files.log, observer=observer)
    measures: tuple[Measure, ...] = ()
    if isinstance(model, StackMachine):
        model, share = _best_of(model, objective.validation_losses(), batch_of(train_split))
        measures = (share,)
    measures += evaluate(served(model), splits)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    metrics = RunMetrics(parameters, len(trained.scores), trained.best_epoch, trained.seconds, measures)
    record = provenance(trainer=f"{recipe}", data=DESCRIPTION, seed=seed)
    config = RunConfig(name, {}, record, precision="fp32", processor=processor())
    save(directory, model, config, metrics, files.finished())
    files.remove()
    return metrics


def create(name: str, seed: int) -> nn.Module:
    """Return an untrained network, of the stack calculator 16 side by side, whose weights depend on ``seed`` alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return StackMachine(RESTARTS, torch.default_generator) if name == STACK else BASELINES[name]()


def served(model: nn.Module) -> nn.Module:
    """Return a network as it is served: of a stack machine its scan in FP32."""
    return Scan(model) if isinstance(model, StackMachine) else model


def _best_of(machines: StackMachine, losses: Tensor, items: Batch) -> tuple[StackMachine, Measure]:
    """Return the machine with the least loss on ``val`` that becomes exact, with weights fixed, and the share that do.

    If none becomes exact, the machine with the least loss is returned as it was fitted.
    """
    items = Batch(*(tensor[:_FITTED_ITEMS] for tensor in items))
    fits: list[Fit] = []
    for restart in losses.argsort().tolist():
        machine = machines.select(restart)
        machine.choose_moves()
        fits.append(Fit(machine, items))
    exact = [fit for fit in fits if fit.solve()]
    best = exact[0] if exact else fits[0]
    if exact:
        best.snap()
    share = Measure(metric="exact_restarts", split="train", value=len(exact) / len(fits), n=len(fits))
    return best.written(), share
