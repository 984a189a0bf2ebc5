"""The objective of a fine-tuning on a task, with an optional teacher and an optional further loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from torch import Tensor, nn

from edge.datatypes import Array
from export.data.tokens import Batch, Rows, shuffled_batches
from export.finetune.objectives import (
    Head,
    Teacher,
    TeacherOutputs,
    corresponding_layers,
    hidden_loss,
    hidden_states,
    imitation_loss,
    outputs_of,
    task_loss,
)
from export.finetune.recipe import Recipe
from export.training.checkpoint import fingerprint
from export.training.device import model_device, multiplying_in
from export.training.objective import Score


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


class TaskObjective:
    """An :class:`export.training.objective.Objective` of a task.

    Args:
        seed: of the order of the rows.
        evaluate: returns the score on the hold-out, more being better, for the model in evaluation mode.
        metric: the name of that score.
        teacher: a model with outputs of the same shape, whose outputs and hidden states are imitated; or its outputs
            on the same rows.
        extra: a further loss. Its state must be part of the model's.

    Raises:
        UsageError: the recipe imitates hidden states, and the teacher's have another width.
    """

    def __init__(
        self,
        model: Head,
        train: Rows,
        recipe: Recipe,
        *,
        seed: int,
        evaluate: Callable[[], float],
        metric: str = "score",
        teacher: Head | Teacher | None = None,
        extra: Extra | None = None,
    ) -> None:
        self.model: Head = model
        self._train, self._recipe, self._seed = train, recipe, seed
        self._evaluate, self._metric, self._extra = evaluate, metric, extra
        self.steps_per_epoch = math.ceil(len(train.targets) / recipe.batch_size)
        self.rates = extra.rates if extra else {}
        self._device = model_device(model)
        self._ours, self._theirs = list[int](), list[int]()
        if teacher is not None and recipe.distillation.hidden:
            teaching = teacher.model if isinstance(teacher, Teacher) else teacher
            self._ours, self._theirs = corresponding_layers(model.transformer, teaching.transformer)
        self._teacher = (
            teacher
            if teacher is None or isinstance(teacher, Teacher)
            else Teacher(teacher, train, self._theirs, recipe.precision)
        )

    def fingerprint(self) -> str:
        """Return a hash of the weights, the teacher's, the rows, and the further loss."""
        models = [self.model] if self._teacher is None else [self.model, self._teacher.model]
        return fingerprint(models, self._train.contents, self._extra.name if self._extra else "")

    def batches(self, epoch: int, first: int) -> Iterator[Array]:
        """Yield the rows of each batch."""
        rows = shuffled_batches(self._train.lengths, self._recipe.batch_size, seed=self._seed, epoch=epoch)
        yield from rows[first:]

    def loss(self, batch: Array, progress: float) -> Tensor:
        """Return the task's loss, or its mixture with the teacher's, and the further one."""
        inputs = self._train.batch(batch).to(self._device)
        wanted = self._teacher.outputs_for(batch, inputs, self._theirs) if self._teacher else None
        if self._extra:
            self._extra.prepare(progress)
        loss = _loss(self.model, inputs, self._recipe, wanted, self._ours)
        return loss + self._extra.loss(progress) if self._extra else loss

    def evaluate(self) -> Score:
        """Return the score on the hold-out."""
        return Score(self._evaluate(), self._metric)


def _loss(model: Head, batch: Batch, recipe: Recipe, wanted: TeacherOutputs | None, followed: Sequence[int]) -> Tensor:
    """Return the loss of a batch: the task's alone without a teacher, else the mixture of the recipe."""
    with multiplying_in(recipe.precision, batch.inputs.device), hidden_states(model.transformer, followed) as states:
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
