"""Training on prompts: curricula, and the truncated loss of paper 003."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor, nn

from export.papers.looped.functions import FUNCTION_CLASSES, Prompts, draw_prompts
from export.papers.looped.model import PromptTransformer
from export.papers.looped.seeds import VALIDATION, generator_of, training_generator
from export.training.checkpoint import fingerprint
from export.training.device import model_device, multiplying_in
from export.training.objective import Score
from export.training.recipe import Precision

#: Prompts that choose the best epoch.
_VALIDATION = 256


class Rising(msgspec.Struct, frozen=True):
    """A number that grows during training: by ``increment`` every ``interval`` steps, from ``start`` to ``end``."""

    start: int
    end: int
    increment: int = 1
    interval: int = 1

    def at(self, step: int) -> int:
        """Return the number in a step, counted from 0."""
        return min(self.end, self.start + step // self.interval * self.increment)


class Curriculum(msgspec.Struct, frozen=True):
    """How prompts and loops grow.

    Attributes:
        dims: coordinates of the points that are not zero.
        points: of a prompt.
        loops: of the model; 1 for an unlooped one.
        window: T, the last loops whose predictions are in the loss.
        drawn_loops: the number of loops of each step is drawn evenly from here to ``loops``; None is ``loops`` itself.
            Training on drawn numbers makes a solver that holds its fixed point.
    """

    dims: Rising
    points: Rising
    loops: Rising = Rising(1, 1)
    window: int = 1
    drawn_loops: int | None = None


class Batch(NamedTuple):
    """Prompts, and the number of loops to run."""

    prompts: Prompts
    loops: int


class Teacher(NamedTuple):
    """A model whose predictions are learnt beside the truth.

    Attributes:
        model: of any shape, in evaluation mode.
        share: of the squared distance to the teacher's predictions in the loss; the rest is that to the truth.
    """

    model: PromptTransformer
    share: float = 0.5


class PromptObjective:
    """An :class:`export.training.objective.Objective`: the squared error at every point, over the last loops.

    The loss has exactly T terms. The paper's sum from b to T + b has one more, over which it does not average.

    Args:
        name: of the function class.
        evaluated_loops: after which the score is measured; None is the curriculum's last number.
        seed: of the prompts, with the number of the ``stage`` among those that train the same weights.
        teacher: None learns from the truth alone.
    """

    rates: Mapping[nn.Parameter, float] = {}

    def __init__(
        self,
        model: PromptTransformer,
        name: str,
        curriculum: Curriculum,
        *,
        seed: int,
        stage: int = 0,
        batch_size: int = 64,
        steps_per_epoch: int = 500,
        evaluated_loops: int | None = None,
        precision: Precision = "fp32",
        teacher: Teacher | None = None,
    ) -> None:
        self.model, self.steps_per_epoch = model, steps_per_epoch
        self._name, self._curriculum, self._batch_size = name, curriculum, batch_size
        self._seed, self._stage = seed, stage
        self._precision = precision
        self._device = model_device(model)
        self._teacher = teacher and teacher._replace(model=copy.deepcopy(teacher.model).to(self._device))
        self._loops = evaluated_loops or curriculum.loops.end
        config = model.config
        validation = draw_prompts(name, _VALIDATION, config.points, config.dims, generator_of(VALIDATION))
        self._validation = validation.to(self._device)

    def fingerprint(self) -> str:
        """Return a hash of the initial weights and of all settings."""
        settings = f"{self.model.config} {self._name} {self._curriculum} {self._seed} {self._stage} {self._batch_size}"
        settings += f" {self.steps_per_epoch} {self._loops}"
        if self._teacher is None:
            return fingerprint([self.model], [], settings)
        settings += f" teacher {self._teacher.share}"
        return fingerprint([self.model, self._teacher.model], [], settings)

    def batches(self, epoch: int, first: int) -> Iterator[Batch]:
        """Yield prompts that depend on the seed, the stage and the step alone."""
        curriculum, config = self._curriculum, self.model.config
        for step in range(epoch * self.steps_per_epoch + first, (epoch + 1) * self.steps_per_epoch):
            generator = training_generator(self._seed, self._stage, step)
            prompts = draw_prompts(
                self._name,
                self._batch_size,
                curriculum.points.at(step),
                config.dims,
                generator,
                active_dims=curriculum.dims.at(step),
            )
            loops = curriculum.loops.at(step)
            if curriculum.drawn_loops is not None:
                loops = int(torch.randint(curriculum.drawn_loops, loops + 1, (), generator=generator))
            yield Batch(prompts.to(self._device), loops)

    def loss(self, batch: Batch, progress: float) -> Tensor:
        """Return the mean squared error over prompts, points, and the last T loops, beside a teacher's if any."""
        prompts = batch.prompts
        with multiplying_in(self._precision, self._device):
            predictions = self.model(prompts.xs, prompts.ys, batch.loops, self._curriculum.window)
        predicted = torch.stack(predictions).float()
        loss = (predicted - prompts.ys).square().mean()
        if self._teacher is None:
            return loss
        model, share = self._teacher
        with torch.no_grad():
            taught = model(prompts.xs, prompts.ys, batch.loops, len(predicted))
        return (1 - share) * loss + share * (predicted - torch.stack(taught)).square().mean()

    def evaluate(self) -> Score:
        """Return the negated error at the last point, divided by the normaliser of the function class."""
        with torch.no_grad():
            xs, ys = self._validation
            predicted = self.model(xs, ys[:, :-1], self._loops, 1)[-1]
            error = float((predicted[:, -1] - ys[:, -1]).square().mean())
        error /= FUNCTION_CLASSES[self._name].normaliser(self.model.config.dims)
        return Score(-error, "error", error)
