"""Training of the stack calculator and its baselines: machines side by side, and then the best until it is exact."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor, nn

from edge.bundles.manifest import Measure
from export.papers.calculator.stack import LSTM, STACK, TRANSFORMER
from export.papers.calculator.stack.baselines import BASELINES
from export.papers.calculator.stack.data import DESCRIPTION, Split, evaluate, load
from export.papers.calculator.stack.machine import Fit, Scan, StackMachine
from export.papers.calculator.stack.train import Batch, ExpressionObjective, StackObjective, batch_of
from export.training.checkpoint import save
from export.training.log import RunFiles
from export.training.objective import SILENT, Observer
from export.training.provenance import processor, provenance
from export.training.recipe import Recipe
from export.training.runs import LOG, RunConfig, RunMetrics
from export.training.trainer import Trained, train

#: Machines side by side, and how often 16 more are trained where none of the earlier ones became exact.
RESTARTS, ROUNDS = 16, 8
_SEEDS = 10**6  # between the seeds of rounds
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


def train_stack(
    name: str,
    directory: str | Path,
    *,
    seed: int,
    epochs: int | None = None,
    tensorboard: Path | None = None,
    observer: Observer = SILENT,
) -> RunMetrics:
    """Train a network on the processor, evaluate it, and write its run directory.

    Rounds of 16 stack machines are trained until one of them is exact on the training items. The states of an
    unfinished run are kept beside it; the same call resumes from them.

    Args:
        name: of the model.
        directory: path of the run; an earlier run there is replaced when this one is done.
        seed: of the initial weights and of the order of the items.
        epochs: of 100 steps; None is the recipe's.

    Raises:
        TrainingError: the loss is no longer a finite number.
    """
    recipe = RECIPES[name] if epochs is None else msgspec.structs.replace(RECIPES[name], epochs=epochs)
    directory, splits = Path(directory), load()
    rounds: list[_Round] = []
    for number in range(ROUNDS if name == STACK else 1):
        files = RunFiles(directory.with_name(f"{directory.name}.round-{number}"), tensorboard)
        rounds.append(_round(name, seed + number * _SEEDS, recipe, splits, files, observer))
        if rounds[-1].exact:
            break
    model, tried = rounds[-1].model, RESTARTS * len(rounds)
    share = Measure(metric="exact_restarts", split="train", value=rounds[-1].exact / tried, n=tried)
    measures = (*((share,) if name == STACK else ()), *evaluate(served(model), splits))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    epochs_run = sum(len(one.trained.scores) for one in rounds)
    seconds = sum(one.trained.seconds for one in rounds)
    metrics = RunMetrics(parameters, epochs_run, rounds[-1].trained.best_epoch, seconds, measures)
    record = provenance(trainer=f"{recipe}", data=DESCRIPTION, seed=seed)
    config = RunConfig(name, {}, record, precision="fp32", processor=processor())
    log = b"".join(content for one in rounds for content in one.files.finished().values())
    save(directory, model, config, metrics, {LOG: log})
    for one in rounds:
        one.files.remove()
    return metrics


def create(name: str, seed: int) -> nn.Module:
    """Return an untrained network, of the stack calculator 16 side by side, whose weights depend on ``seed`` alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return StackMachine(RESTARTS, torch.default_generator) if name == STACK else BASELINES[name]()


def served(model: nn.Module) -> nn.Module:
    """Return a network as it is served: of a stack machine its scan in FP32."""
    return Scan(model) if isinstance(model, StackMachine) else model


class _Round(NamedTuple):
    """A trained network, of the stack calculator the best machine and how many became exact."""

    model: nn.Module
    exact: int
    trained: Trained
    files: RunFiles


def _round(
    name: str, seed: int, recipe: Recipe, splits: Mapping[str, Split], files: RunFiles, observer: Observer
) -> _Round:
    model, learnt, val = create(name, seed), splits["train"], splits["val"]
    objective: ExpressionObjective
    if isinstance(model, StackMachine):
        objective = StackObjective(model, learnt, val, seed=seed, recipe=recipe)
    else:
        objective = ExpressionObjective(model, learnt, val, seed=seed, recipe=recipe)
    trained = train(objective, recipe, seed=seed, state=files.state, log=files.log, observer=observer)
    if not isinstance(model, StackMachine):
        return _Round(model, 0, trained, files)
    machine, exact = _best_of(model, objective.validation_losses(), batch_of(learnt))
    return _Round(machine, exact, trained, files)


def _best_of(machines: StackMachine, losses: Tensor, items: Batch) -> tuple[StackMachine, int]:
    """Return the machine with the least loss on ``val`` that becomes exact, with weights fixed, and how many do.

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
    return best.written(), len(exact)
