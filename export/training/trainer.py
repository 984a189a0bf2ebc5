"""The training loop: a schedule, clipping, the best epoch or an average, and a state from which a run resumes."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path

import msgspec
import torch
from torch import Tensor, nn

from edge.bundles.manifest import Measure
from export.errors import TrainingError
from export.training.average import AveragedWeights
from export.training.checkpoint import load_state, save_state
from export.training.device import model_device
from export.training.log import TrainingLog
from export.training.objective import SILENT, Epoch, EpochScore, Objective, Observer, Step
from export.training.optimizers import Optimizers
from export.training.recipe import Recipe, learning_rate
from export.training.runs import RunMetrics

#: Steps between two reads of the loss on a GPU, which would otherwise wait for the processor in every step.
_GPU_STEPS = 10
#: Steps between two lines of the log.
_LOGGED_STEPS = 100
#: Steps of large models take seconds, and an interruption should lose minutes at most.
_SAVE_SECONDS = 300.0
_FIX = "Train again with a lower learning rate, or with another --seed."


class Trained(msgspec.Struct, frozen=True):
    """Result of a run: score and mean loss of each epoch, best epoch from 1, steps, seconds without interruptions."""

    scores: tuple[float, ...]
    losses: tuple[float, ...]
    best_epoch: int
    steps: int
    seconds: float

    def metrics(self, parameters: int, measures: tuple[Measure, ...]) -> RunMetrics:
        """Return the metrics of a run of this training alone."""
        history = len(self.scores), self.best_epoch, self.seconds
        return RunMetrics(parameters, *history, measures, self.losses, self.scores)


def train(
    objective: Objective,
    recipe: Recipe,
    *,
    seed: int,
    state: Path | None = None,
    save_every: int = 200,
    log: TrainingLog | None = None,
    observer: Observer = SILENT,
) -> Trained:
    """Train the model of an objective in place, and leave it in evaluation mode with the weights of its best epoch.

    A recipe with an average scores that of the weights, and keeps it as it is after the last epoch.

    Args:
        seed: of everything random in the model, such as dropout; the objective has the order of the data.
        state: a file for the state of the run. A run that finds its own state resumes, and ends with the same bits as
            an uninterrupted one. The caller deletes the file.
        save_every: steps between two states; five minutes, and each epoch, end with a state, too.
        log: receives the loss every :data:`_LOGGED_STEPS` steps, and the score of each epoch.

    Raises:
        TrainingError: a loss, a gradient or a score is not finite.
        CheckpointError: the state is malformed, of another run, or cannot be written.
    """
    device = model_device(objective.model)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        run = _Run(objective, recipe, state)
        run.resume(f"{recipe} seed {seed}")
        per_epoch = objective.steps_per_epoch
        steps = recipe.epochs * per_epoch
        if run.step:
            observer.on_resume(run.step, steps)
        if log is not None:
            log.resume(run.step)
        report_every = _GPU_STEPS if device.type == "cuda" else 1
        while run.step < steps and not run.stopped:
            first, started = run.step, time.perf_counter()
            objective.model.train()
            for batch in objective.batches(run.step // per_epoch, run.step % per_epoch):
                progress = run.step / steps
                rate = learning_rate(recipe, progress)
                run.update(objective.loss(batch, progress), rate)
                if run.step % report_every == 0:
                    run.check()
                    pace = (time.perf_counter() - started) / (run.step - first)
                    observer.on_step(Step(run.step, steps, run.last_loss, pace * (steps - run.step)))
                if log is not None and run.step % _LOGGED_STEPS == 0:
                    run.check()
                    log.write(run.step, loss=run.last_loss, learning_rate=rate, seconds=run.seconds)
                due = run.step % save_every == 0 or time.perf_counter() - run.saved > _SAVE_SECONDS
                if due and run.step % per_epoch:
                    run.save()
            objective.model.eval()
            with run.scored_weights():
                score = objective.evaluate()
                run.end_epoch(score)
            if log is not None:
                log.write(run.step, epoch=len(run.scores), loss=run.losses[-1], score=score.value, scored=str(score))
            observer.on_epoch(Epoch(len(run.scores), score))
            run.save()
        objective.model.load_state_dict(run.best_weights)
    objective.model.eval()
    return Trained(tuple(run.scores), tuple(run.losses), run.best_epoch, run.step, run.seconds)


class _Run:
    def __init__(self, objective: Objective, recipe: Recipe, path: Path | None) -> None:
        self.objective, self.model, self.recipe = objective, objective.model, recipe
        self.path = path
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizers = Optimizers(objective, recipe)
        self._average = None if recipe.average is None else AveragedWeights(self.parameters, recipe.average)
        self.scored_weights = self._average.in_place if self._average else nullcontext
        self.step, self.best_epoch, self.last_loss = 0, 0, math.nan
        self.scores: list[float] = []
        self.losses: list[float] = []
        self._epoch_losses: list[float] = []
        self._unread: list[tuple[Tensor, Tensor]] = []  # loss and norm of the gradient
        self.best_weights: dict[str, Tensor] = {}
        self._earlier_seconds, self._started = 0.0, time.perf_counter()
        self.saved = self._started  # when the last state was written
        self._fingerprint = ""

    @property
    def seconds(self) -> float:
        return self._earlier_seconds + time.perf_counter() - self._started

    def resume(self, settings: str) -> None:
        if self.path is None:
            return
        self._fingerprint = f"{self.objective.fingerprint()} {settings}"
        state = load_state(self.path, self._fingerprint)
        if state is None:
            return
        self.step, self.scores, self.best_epoch = state["step"], state["scores"], state["best_epoch"]
        self.losses, self._epoch_losses = state["losses"], state["epoch_losses"]
        self.best_weights, self._earlier_seconds = state["best_weights"], state["seconds"]
        self.model.load_state_dict(state["model"])
        self.optimizers.load_state_dict(state["optimizers"])
        if self._average is not None:
            self._average.load_state_dict(state["average"])
        torch.set_rng_state(state["random"])
        if state["random_gpu"] is not None:
            torch.cuda.set_rng_state(state["random_gpu"])

    def update(self, loss: Tensor | Iterable[Tensor], rate: float) -> None:
        self.optimizers.zero_grad()
        total = torch.zeros((), device=self.parameters[0].device)
        for summand in [loss] if isinstance(loss, Tensor) else loss:
            summand.backward()
            total += summand.detach()
        self._unread.append((total, clip(self.parameters, self.recipe)))
        self.step += 1
        if total.device.type == "cpu":
            self.check()
        self.optimizers.step(rate)
        if self._average is not None:
            self._average.update()

    def check(self) -> None:
        """Read the losses since the last call.

        Raises:
            TrainingError: one of them, or a gradient, is not finite.
        """
        first = self.step - len(self._unread) + 1
        for number, (loss, norm) in enumerate(self._unread, first):
            for what, value in (("loss", loss.item()), ("gradient's norm", norm.item())):
                if not math.isfinite(value):
                    raise TrainingError(f"{what} in step {number}", given=value, expected="a finite number", fix=_FIX)
            self.last_loss = loss.item()
            self._epoch_losses.append(self.last_loss)
        self._unread = []

    @property
    def stopped(self) -> bool:
        patience = self.recipe.patience
        return patience is not None and len(self.scores) - self.best_epoch >= patience

    def end_epoch(self, score: EpochScore) -> None:
        self.check()
        if not math.isfinite(score.value):
            subject = f"{score.name} after epoch {len(self.scores) + 1}"
            raise TrainingError(subject, given=score.value, expected="a finite number", fix=_FIX)
        better = not self.scores or self._average is not None
        better = better or score.value > self.scores[self.best_epoch - 1] + self.recipe.min_delta
        self.scores.append(score.value)
        self.losses.append(sum(self._epoch_losses) / len(self._epoch_losses))
        self._epoch_losses = []
        if better:
            self.best_epoch = len(self.scores)
            self.best_weights = copy.deepcopy(self.model.state_dict())

    def save(self) -> None:
        if self.path is None:
            return
        self.check()
        on_gpu = self.parameters[0].device.type == "cuda"
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
            "optimizers": self.optimizers.state_dict(),
            "average": None if self._average is None else self._average.state_dict(),
            "random": torch.get_rng_state(),
            "random_gpu": torch.cuda.get_rng_state() if on_gpu else None,
        }
        save_state(self.path, state)
        self.saved = time.perf_counter()


def clip(parameters: list[nn.Parameter], recipe: Recipe) -> Tensor:
    """Clip the gradients as the recipe has it, and return the norm of all of them before, a scalar."""
    if recipe.clips == "all" or recipe.clip_norm is None:
        return nn.utils.clip_grad_norm_(parameters, recipe.clip_norm or math.inf)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    # The list forms of norm and multiplication: one call for dozens of small tensors, a tenth of a step less.
    norms = torch.stack(torch._foreach_norm(gradients))
    torch._foreach_mul_(gradients, (recipe.clip_norm / norms.clamp(min=recipe.clip_norm)).unbind())
    total: Tensor = norms.norm()
    return total
