"""Fine-tuning: AdamW, warm-up and linear decay, the best epoch on a hold-out, an optional teacher."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import torch
from torch import Tensor, nn

from export.errors import TrainingError
from export.tasks.objectives import (
    Head,
    corresponding_layers,
    hidden_loss,
    hidden_states,
    imitation_loss,
    multiplying_in,
    outputs_of,
    task_loss,
)
from export.tasks.recipe import Recipe, learning_rate
from export.tasks.state import fingerprint, load_state, save_state
from export.tasks.teacher import Teacher, TeacherOutputs
from export.tasks.tokens import Batch, Rows, shuffled_batches


class Extra(Protocol):
    """A loss beside the task's own, and its parameters.

    Attributes:
        name: describes all that it depends on.
        rates: learning rates of its parameters, in units of the recipe's.
    """

    name: str
    rates: Mapping[nn.Parameter, float]

    def prepare(self, progress: float) -> None:
        """Prepare for the next batch, after a share ``progress`` of all steps."""

    def loss(self, progress: float) -> Tensor:
        """Return the loss, a scalar, for the last forward pass of the model."""


class Step(msgspec.Struct, frozen=True):
    """Position of a run: step, number of steps, loss of the step, and estimated seconds to the end."""

    number: int
    steps: int
    loss: float
    seconds_left: float


class Epoch(msgspec.Struct, frozen=True):
    """A finished epoch: its number from 1, and its score on the hold-out; more is better."""

    number: int
    score: float


class Tuned(msgspec.Struct, frozen=True):
    """Result of a run: score and mean loss of each epoch, best epoch from 1, steps, seconds without interruptions."""

    scores: tuple[float, ...]
    losses: tuple[float, ...]
    best_epoch: int
    steps: int
    seconds: float


def fine_tune(
    model: Head,
    train: Rows,
    recipe: Recipe,
    *,
    seed: int,
    evaluate: Callable[[], float],
    teacher: Head | None = None,
    extra: Extra | None = None,
    stop_below: float | None = None,
    state: Path | None = None,
    save_every: int = 200,
    on_resume: Callable[[int, int], None] = lambda step, steps: None,
    on_step: Callable[[Step], None] = lambda step: None,
    on_epoch: Callable[[Epoch], None] = lambda epoch: None,
) -> Tuned:
    """Train a model in place, and leave it in evaluation mode with the weights of its best epoch.

    Args:
        seed: of the order of the rows, the only random part.
        evaluate: returns the score on the hold-out, more being better, for the model in evaluation mode.
        teacher: a model with outputs of the same shape, whose outputs and hidden states are imitated.
        extra: a further loss. Its state must be part of the model's.
        stop_below: end after an epoch with a lower score. Since ``extra`` may trade score for its own loss, the last
            epoch that is not lower is kept, not the best one; if all are lower, the first.
        state: a file for the state of the run. A run that finds its own state resumes, and ends with the same bits as
            an uninterrupted one. The caller deletes the file.
        save_every: steps between two states; each epoch ends with a state, too.
        on_resume: called with the step and the number of steps, if the run resumes.

    Raises:
        TrainingError: a loss or gradient is not finite.
        CheckpointError: the state is malformed, of another run, or cannot be written.
    """
    run = _Run(model, recipe, state, extra.rates if extra else {}, stop_below)
    if state is not None:
        models = [model] if teacher is None else [model, teacher]
        further = f" {extra.name} {stop_below}" if extra else ""
        run.go_on(fingerprint(models, train, f"{recipe} seed {seed}{further}"))
    followed: list[int] = []
    teacher_model = None
    if teacher is not None:
        theirs: list[int] = []
        if recipe.distillation.hidden:
            followed, theirs = corresponding_layers(model.transformer, teacher.transformer)
        teacher_model = Teacher(teacher, train, theirs, recipe.precision)
    per_epoch = math.ceil(len(train.targets) / recipe.batch_size)
    steps = recipe.epochs * per_epoch
    if run.step:
        on_resume(run.step, steps)
    while run.step < steps and not run.stopped:
        first, started = run.step, time.perf_counter()
        epoch = run.step // per_epoch
        batches = shuffled_batches(train.lengths, recipe.batch_size, seed=seed, epoch=epoch)
        model.train()
        for rows in batches[run.step % per_epoch :]:
            batch = train.batch(rows)
            wanted = teacher_model.outputs_for(rows, batch) if teacher_model else None
            progress = run.step / steps
            if extra:
                extra.prepare(progress)
            loss = _loss(model, batch, recipe, wanted, followed)
            if extra:
                loss = loss + extra.loss(progress)
            run.update(loss, learning_rate(recipe, progress))
            pace = (time.perf_counter() - started) / (run.step - first)
            on_step(Step(run.step, steps, loss.item(), pace * (steps - run.step)))
            if run.step % save_every == 0 and run.step % per_epoch:
                run.save()
        model.eval()
        run.end_epoch(evaluate())
        on_epoch(Epoch(len(run.scores), run.scores[-1]))
        run.save()
    model.load_state_dict(run.best_weights)
    model.eval()
    return Tuned(tuple(run.scores), tuple(run.losses), run.best_epoch, run.step, run.seconds)


class _Run:
    def __init__(
        self,
        model: Head,
        recipe: Recipe,
        path: Path | None,
        rates: Mapping[nn.Parameter, float],
        stop_below: float | None,
    ) -> None:
        self.model, self.recipe, self.path, self.stop_below = model, recipe, path, stop_below
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        usual = [parameter for parameter in self.parameters if parameter not in rates]
        groups = [
            {"params": [p for p in usual if p.dim() > 1], "weight_decay": recipe.weight_decay},
            {"params": [p for p in usual if p.dim() <= 1], "weight_decay": 0.0},
            *({"params": [p for p in rates if rates[p] == r], "weight_decay": 0.0} for r in sorted({*rates.values()})),
        ]
        self.multiples = [1.0, 1.0, *sorted({*rates.values()})]
        self.optimizer = torch.optim.AdamW(groups, lr=recipe.peak_learning_rate, fused=True)
        self.step, self.best_epoch = 0, 0
        self.scores: list[float] = []
        self.losses: list[float] = []
        self._epoch_losses: list[float] = []
        self.best_weights: dict[str, Tensor] = {}
        self._earlier_seconds, self._started = 0.0, time.perf_counter()
        self._fingerprint = ""

    @property
    def seconds(self) -> float:
        return self._earlier_seconds + time.perf_counter() - self._started

    def go_on(self, fingerprint: str) -> None:
        assert self.path is not None
        self._fingerprint = fingerprint
        state = load_state(self.path, fingerprint)
        if state is None:
            return
        self.step, self.scores, self.best_epoch = state["step"], state["scores"], state["best_epoch"]
        self.losses, self._epoch_losses = state.get("losses", []), state.get("epoch_losses", [])
        self.best_weights, self._earlier_seconds = state["best_weights"], state["seconds"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def update(self, loss: Tensor, rate: float) -> None:
        for group, multiple in zip(self.optimizer.param_groups, self.multiples, strict=True):
            group["lr"] = rate * multiple
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(self.parameters, self.recipe.clip_norm)
        self.step += 1
        for what, value in (("loss", loss.item()), ("gradient's norm", norm.item())):
            if not math.isfinite(value):
                fix = "Train again with a lower --lr."
                raise TrainingError(f"{what} in step {self.step}", given=value, expected="a finite number", fix=fix)
        self._epoch_losses.append(loss.item())
        self.optimizer.step()

    @property
    def stopped(self) -> bool:
        return self.stop_below is not None and any(score < self.stop_below for score in self.scores)

    def end_epoch(self, score: float) -> None:
        least = self.stop_below
        better = score > self.scores[self.best_epoch - 1] if self.scores and least is None else True
        better = better and (not self.scores or least is None or score >= least)
        self.scores.append(score)
        self.losses.append(sum(self._epoch_losses) / len(self._epoch_losses))
        self._epoch_losses = []
        if better:
            self.best_epoch = len(self.scores)
            self.best_weights = copy.deepcopy(self.model.state_dict())

    def save(self) -> None:
        if self.path is None:
            return
        state = {
            "fingerprint": self._fingerprint,
            "step": self.step,
            "scores": self.scores,
            "losses": self.losses,
            "epoch_losses": self._epoch_losses,
            "seconds": self.seconds,
            "best_epoch": self.best_epoch,
            "best_weights": self.best_weights,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        save_state(self.path, state)


def _loss(model: Head, batch: Batch, recipe: Recipe, wanted: TeacherOutputs | None, followed: Sequence[int]) -> Tensor:
    """Return the loss of a batch: the task's alone without a teacher, else the mixture of the recipe."""
    with multiplying_in(recipe.precision), hidden_states(model.transformer, followed) as states:
        outputs = outputs_of(model, batch)
    loss = task_loss(model, outputs, batch.targets)
    if wanted is None:
        return loss
    how = recipe.distillation
    imitation = imitation_loss(model, outputs, wanted.outputs, how.temperature)
    loss = (1 - how.imitation) * loss + how.imitation * imitation
    if followed:
        loss = loss + how.hidden * hidden_loss([x.float() for x in states], wanted.states, batch.mask)
    return loss
