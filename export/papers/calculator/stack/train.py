"""Training of the stack calculator: machines side by side, and then the best until it is exact."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor, nn

from edge.bundles.arithmetic import CLOSE, OPEN, TIMES
from edge.bundles.manifest import Measure
from export.papers.calculator.stack.data import DESCRIPTION, TRAIN_DEPTH, StackSplit, evaluate, load
from export.papers.calculator.stack.machine import (
    TRAIN_CELLS,
    Scan,
    StackBatch,
    StackFit,
    StackMachine,
    batch_of,
    residuals,
)
from export.training.checkpoint import fingerprint, save
from export.training.log import RunFiles
from export.training.objective import SILENT, EpochScore, Observer
from export.training.provenance import processor, provenance
from export.training.recipe import Recipe
from export.training.runs import LOG, RunConfig, RunMetrics
from export.training.trainer import Trained, train

#: Machines side by side, and how often 16 more are trained where none of the earlier ones became exact.
RESTARTS, ROUNDS = 16, 8
_SEEDS = 10**6  # between the seeds of rounds
RECIPE = Recipe(
    epochs=30,
    peak_learning_rate=2e-2,
    batch_size=128,
    betas=(0.9, 0.99),
    warmup_share=0.01,
    schedule="linear",
    final_share=0.02,
)
#: Steps between two evaluations.
STEPS_PER_EPOCH = 100
#: The learning rate of the logits of moves, relative to that of the other weights.
_MOVE_RATE = 3.0
_ENTROPY = 0.003  # weight of its penalty at the last step
#: Training items that the weights of a machine are fitted to.
_FITTED_ITEMS = 160


class StackObjective:
    """An :class:`export.training.objective.Objective` of machines side by side: the sum of their losses.

    The loss is the mean of log(1 + e²) over the items, for :func:`residuals` e: a machine whose answers explode on some
    still gets a gradient from the others. Sums are learnt first, then products, then parentheses one and two deep. In
    the second half of the epochs the entropy of the moves is penalised, ever more strongly. The gradients of each
    machine are clipped on their own.

    Args:
        seed: of the order of the items.
    """

    def __init__(self, model: StackMachine, train: StackSplit, val: StackSplit, *, seed: int, recipe: Recipe) -> None:
        self.model = model
        self._train, self._val = batch_of(train), batch_of(val)
        self._seed, self._batch_size, self._epochs = seed, recipe.batch_size, recipe.epochs
        self.steps_per_epoch = STEPS_PER_EPOCH
        self.rates: dict[nn.Parameter, float] = {model.moves: _MOVE_RATE}
        kinds = self._train.kinds
        self._lengths = (kinds > 0).sum(1)
        self._depths = ((kinds == OPEN).long() - (kinds == CLOSE).long()).cumsum(1).amax(1)
        self._has_product = (kinds == TIMES).any(1)
        for parameter in model.parameters():
            parameter.register_hook(_clipped)  # type: ignore[no-untyped-call]

    def fingerprint(self) -> str:
        """Return a hash of the initial weights and the training set."""
        return fingerprint([self.model], [tensor.numpy() for tensor in self._train], f"expressions {self._seed}")

    def batches(self, epoch: int, first: int) -> Iterator[StackBatch]:
        """Yield batches that depend on seed, epoch and position alone."""
        items = self.eligible(epoch).nonzero()[:, 0]
        for number in range(first, self.steps_per_epoch):
            generator = torch.Generator().manual_seed(self._seed * 10**6 + epoch * self.steps_per_epoch + number)
            rows = items[torch.randint(len(items), (self._batch_size,), generator=generator)]
            length = int(self._lengths[rows].max())
            yield StackBatch(
                self._train.kinds[rows, :length], self._train.values[rows, :length], self._train.truth[rows]
            )

    def eligible(self, epoch: int) -> Tensor:
        """Return which training items an epoch draws from, [n] of bool."""
        progress = epoch / self._epochs
        depth = 0 if progress < 0.3 else 1 if progress < 0.5 else TRAIN_DEPTH
        shallow = self._depths <= depth
        return shallow if progress >= 0.15 else shallow & ~self._has_product

    def loss(self, batch: StackBatch, progress: float) -> Tensor:
        """Return the sum of the machines' losses and of their penalties."""
        shares = self.model.moves.softmax(-1)
        entropy = -(shares * (shares + 1e-12).log()).sum()
        return self._losses(batch).sum() + _ENTROPY * max(0.0, 2 * progress - 1) * entropy

    def evaluate(self) -> EpochScore:
        """Return the loss of the best machine on ``val``, negated."""
        loss = float(self.validation_losses().min())
        return EpochScore(-loss, "val loss", loss)

    def validation_losses(self) -> Tensor:
        """Return the machines' losses on ``val``, [R]."""
        with torch.no_grad():
            return self._losses(self._val)

    def _losses(self, batch: StackBatch) -> Tensor:
        errors = residuals(self.model(batch.kinds, batch.values, TRAIN_CELLS), batch.truth)
        return errors.square().clamp(max=1e12).log1p().nan_to_num(nan=30.0).mean(-1)


def _clipped(gradient: Tensor) -> Tensor:
    """Return gradients [R, ...] with a norm of at most 1 for each machine, and 0 where they are not finite."""
    norms = gradient.flatten(1).norm(dim=1).view(-1, *[1] * (gradient.dim() - 1))
    return torch.where(norms.isfinite(), gradient / norms.clamp(min=1), 0.0)


def train_stack(
    name: str,
    directory: str | Path,
    *,
    seed: int,
    epochs: int | None = None,
    tensorboard: Path | None = None,
    observer: Observer = SILENT,
) -> RunMetrics:
    """Train rounds of 16 machines until one is exact on the training items, evaluate it, and write its run directory.

    The states of an unfinished run are kept beside it; the same call resumes from them.

    Args:
        name: of the model.
        directory: path of the run; an earlier run there is replaced when this one is done.
        seed: of the initial weights and of the order of the items.
        epochs: of 100 steps; None is the recipe's.

    Raises:
        TrainingError: the loss is no longer a finite number.
    """
    recipe = RECIPE if epochs is None else msgspec.structs.replace(RECIPE, epochs=epochs)
    directory = Path(directory)
    rounds: list[_Round] = []
    for number in range(ROUNDS):
        files = RunFiles(directory.with_name(f"{directory.name}.round-{number}"), tensorboard)
        rounds.append(_round(seed + number * _SEEDS, recipe, files, observer))
        if rounds[-1].exact:
            break
    machine, tried = rounds[-1].machine, RESTARTS * len(rounds)
    share = Measure(metric="exact_restarts", split="train", value=rounds[-1].exact / tried, n=tried)
    metrics = RunMetrics(
        sum(parameter.numel() for parameter in machine.parameters()),
        sum(len(one.trained.scores) for one in rounds),
        rounds[-1].trained.best_epoch,
        sum(one.trained.seconds for one in rounds),
        (share, *evaluate(Scan(machine), load())),
    )
    record = provenance(trainer=f"{recipe}", data=DESCRIPTION, seed=seed)
    log = b"".join(content for one in rounds for content in one.files.finished().values())
    save(directory, machine, RunConfig(name, {}, record, precision="fp32", processor=processor()), metrics, {LOG: log})
    for one in rounds:
        one.files.remove()
    return metrics


def create(seed: int) -> StackMachine:
    """Return 16 untrained machines side by side, whose weights depend on ``seed`` alone."""
    return StackMachine(RESTARTS, torch.Generator().manual_seed(seed))


class _Round(NamedTuple):
    """The best machine of a round, and how many became exact."""

    machine: StackMachine
    exact: int
    trained: Trained
    files: RunFiles


def _round(seed: int, recipe: Recipe, files: RunFiles, observer: Observer) -> _Round:
    machines, splits = create(seed), load()
    objective = StackObjective(machines, splits["train"], splits["val"], seed=seed, recipe=recipe)
    trained = train(objective, recipe, seed=seed, state=files.state, log=files.log, observer=observer)
    best, exact = _best_of(machines, objective.validation_losses(), batch_of(splits["train"]))
    return _Round(best, exact, trained, files)


def _best_of(machines: StackMachine, losses: Tensor, items: StackBatch) -> tuple[StackMachine, int]:
    """Return the machine with the least loss on ``val`` that becomes exact, with weights fixed, and how many do.

    If none becomes exact, the machine with the least loss is returned as it was fitted.
    """
    items = StackBatch(*(tensor[:_FITTED_ITEMS] for tensor in items))
    fits: list[StackFit] = []
    for restart in losses.argsort().tolist():
        machine = machines.select(restart)
        machine.choose_moves()
        fits.append(StackFit(machine, items))
    exact = [fit for fit in fits if fit.solve()]
    best = exact[0] if exact else fits[0]
    if exact:
        best.snap()
    return best.written(), len(exact)
