"""The objective of a fine-tuning on a task, with an optional teacher."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from edge.datatypes import Array
from edge.errors import Raw, UsageError
from export.data.tokens import Batch, Rows, shuffled_batches, sorted_batches
from export.finetune.recipe import FinetuningRecipe
from export.models.heads import Head, Outputs, tensors_of
from export.models.recorded import recorded
from export.models.transformer import TransformerConfig
from export.training.checkpoint import fingerprint
from export.training.device import model_device, multiplying_in
from export.training.objective import EpochScore
from export.training.points import Planned
from export.training.recipe import Precision

#: Hidden states are kept up to this size; larger ones are computed again for each batch.
MOST_KEPT_BYTES = 4 << 30
_KEPT = torch.bfloat16
_BATCH = 64


class OutputsWithStates(NamedTuple):
    """Outputs of a model for a batch or a row, float32, and [N, T, d] or [T, d] of some layers."""

    outputs: Outputs
    states: list[Tensor]


class Teacher:
    """A model whose outputs for some rows are imitated, computed once; several students may share one.

    Args:
        layers: indices of the layers whose hidden states are imitated, too.
        most_kept_bytes: limit for the hidden states kept in bfloat16; above it, they are computed again for each batch.
        on_rows: called with the number of rows that the model has answered, and of all.
    """

    def __init__(
        self,
        model: Head,
        rows: Rows,
        layers: Sequence[int],
        precision: Precision = "fp32",
        most_kept_bytes: int = MOST_KEPT_BYTES,
        on_rows: Callable[[int, int], None] = lambda done, rows: None,
    ) -> None:
        self.model, self._layers, self._precision = model.eval(), list(layers), precision
        config = model.transformer.config
        tokens = len(rows.targets) * config.max_positions if config.architecture == "vit" else int(rows.lengths.sum())
        needed = tokens * config.dim * len(layers) * _KEPT.itemsize
        self._kept = outputs_by_row(model, rows, layers, precision, on_rows) if needed <= most_kept_bytes else None

    def outputs(self, rows: Rows) -> list[Outputs]:
        """Return the outputs for each of its rows, without padding."""
        return [row.outputs for row in self._kept or outputs_by_row(self.model, rows, (), self._precision)]

    def outputs_for(self, rows: Array, batch: Batch, layers: Sequence[int]) -> OutputsWithStates:
        """Return the outputs for some of its rows, and their batch; ``layers`` are some of the teacher's."""
        if self._kept is None:
            return self.answer(batch, layers)
        kept, device = [self._kept[row] for row in rows], batch.inputs.device
        states = [
            pad_sequence([row.states[self._layers.index(layer)] for row in kept], True).to(device) for layer in layers
        ]
        columns = zip(*(tensors_of(row.outputs) for row in kept), strict=True)
        padded = [pad_sequence(list(column), True, self.model.padding).to(device) for column in columns]
        return OutputsWithStates(self.model.joined(padded), states)

    def answer(self, batch: Batch, layers: Sequence[int]) -> OutputsWithStates:
        """Return the outputs for a batch of any rows."""
        with torch.no_grad():  # not inference_mode, whose tensors cannot be saved for the backward pass
            return outputs_with_states(self.model, batch, layers, self._precision)


class TaskObjective:
    """An :class:`export.training.objective.Objective` of a task.

    Args:
        seed: of the order of the rows.
        evaluate: returns the score on the hold-out, named ``metric``, for the model in evaluation mode; more is better.
        teacher: a model with outputs of the same shape, which are imitated; or its outputs on the same rows.
        planned: of a model that was reduced, see :func:`corresponding_layers`.

    Raises:
        UsageError: the recipe imitates hidden states, and the teacher's have another width.
    """

    def __init__(
        self,
        model: Head,
        train: Rows,
        recipe: FinetuningRecipe,
        *,
        seed: int,
        evaluate: Callable[[], float],
        metric: str = "score",
        teacher: Head | Teacher | None = None,
        planned: Planned | None = None,
    ) -> None:
        self.model: Head = model
        self._train, self._recipe, self._seed = train, recipe, seed
        self._evaluate, self._metric = evaluate, metric
        self.steps_per_epoch = math.ceil(len(train.targets) / recipe.batch_size)
        self.rates: Mapping[nn.Parameter, float] = {}
        self._device = model_device(model)
        self._student_layers, self._teacher_layers = list[int](), list[int]()
        if teacher is not None and recipe.distillation.hidden:
            teaching = teacher.model if isinstance(teacher, Teacher) else teacher
            shapes = model.transformer.config, teaching.transformer.config
            self._student_layers, self._teacher_layers = corresponding_layers(*shapes, planned)
        if isinstance(teacher, Head):
            teacher = Teacher(teacher, train, self._teacher_layers, recipe.precision)
        self._teacher = teacher

    def fingerprint(self) -> str:
        """Return a hash of the weights, the teacher's, and the rows."""
        return self._fingerprint(self._train.contents)

    def _fingerprint(self, contents: Iterable[Array]) -> str:
        models = [self.model] if self._teacher is None else [self.model, self._teacher.model]
        return fingerprint(models, contents, "")

    def batches(self, epoch: int, first: int) -> Iterator[Any]:
        """Yield the rows of each batch."""
        rows = shuffled_batches(self._train.lengths, self._recipe.batch_size, seed=self._seed, epoch=epoch)
        yield from rows[first:]

    def loss(self, batch: Any, progress: float) -> Tensor:
        """Return the task's loss, or its mixture with the teacher's."""
        inputs = self._train.batch(batch).to(self._device)
        wanted = self._teacher.outputs_for(batch, inputs, self._teacher_layers) if self._teacher else None
        outputs, states = self._student(inputs)
        loss = self.model.loss(outputs, inputs.targets)
        if wanted is None:
            return loss
        imitation, hidden = self._imitation(outputs, states, wanted, inputs.mask)
        weight = self._recipe.distillation.imitation
        return (1 - weight) * loss + weight * imitation + hidden

    def _student(self, inputs: Batch) -> OutputsWithStates:
        return outputs_with_states(self.model, inputs, self._student_layers, self._recipe.precision)

    def _imitation(
        self, outputs: Outputs, states: Sequence[Tensor], wanted: OutputsWithStates, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the distance from a teacher's outputs, and that from its hidden states with its weight."""
        how = self._recipe.distillation
        imitation = self.model.imitation(outputs, wanted.outputs, how.temperature)
        if not states:
            return imitation, torch.zeros_like(imitation)
        return imitation, how.hidden * hidden_loss([state.float() for state in states], wanted.states, mask)

    def evaluate(self) -> EpochScore:
        """Return the score on the hold-out."""
        return EpochScore(self._evaluate(), self._metric)


def outputs_of(model: Head, batch: Batch) -> Outputs:
    """Return the outputs for a batch in FP32.

    They are logits [N, labels] or [N, T, labels], embeddings [N, width], or logits of first and last tokens, each
    [N, T].
    """
    outputs: Outputs = model(batch.inputs, batch.mask, batch.segments)
    return model.joined([tensor.float() for tensor in tensors_of(outputs)])


def outputs_with_states(model: Head, batch: Batch, layers: Sequence[int], precision: Precision) -> OutputsWithStates:
    """Return the outputs for a batch in FP32, and the states after some layers in the precision of multiplications."""
    chosen = [model.transformer.layers[index] for index in layers]
    with multiplying_in(precision, batch.inputs.device), recorded(chosen) as found:
        outputs = outputs_of(model, batch)
    return OutputsWithStates(outputs, [found[layer].returned for layer in chosen])


def outputs_by_row(
    model: Head,
    rows: Rows,
    layers: Sequence[int] = (),
    precision: Precision = "fp32",
    on_rows: Callable[[int, int], None] = lambda done, rows: None,
) -> list[OutputsWithStates]:
    """Return [labels], [T, labels], [width] or two of [T] of each row, and states [T, d] by layer, without padding."""
    kept: dict[int, OutputsWithStates] = {}
    lengths, device = rows.lengths, model_device(model)
    for indices in sorted_batches(lengths, _BATCH):
        batch = rows.batch(indices).to(device)
        with torch.no_grad():
            outputs, states = outputs_with_states(model, batch, layers, precision)
        for index, row in enumerate(indices):
            length = None if batch.mask is None else int(lengths[row])  # images have no padding
            # Copies, because a view would keep the whole batch.
            cut = [
                (tensor[index, :length] if model.by_token else tensor[index]).to("cpu", copy=True)
                for tensor in tensors_of(outputs)
            ]
            of_row = [state[index, :length].to("cpu", _KEPT, copy=True) for state in states]
            kept[row] = OutputsWithStates(model.joined(cut), of_row)
        on_rows(len(kept), len(lengths))
    return [kept[row] for row in range(len(lengths))]


def hidden_loss(student: Sequence[Tensor], teacher: Sequence[Tensor], mask: Tensor | None) -> Tensor:
    """Return the mean squared error of hidden states relative to the teacher's mean square, a scalar.

    It is relative because the residual stream of pre-LN models grows with depth, and the last layers would dominate.

    Args:
        student: [N, T, d] of each layer.
        teacher: [N, T, d] of its corresponding layers.
        mask: [N, T], 1 for tokens and 0 for padding; None without padding.
    """
    errors = []
    for state, wanted in zip(student, teacher, strict=True):
        error, size = (state - wanted).square(), wanted.square()
        if mask is not None:
            error, size = error * mask[:, :, None], size * mask[:, :, None]
        errors.append(error.sum() / size.sum())
    return torch.stack(errors).mean()


def corresponding_layers(
    student: TransformerConfig, teacher: TransformerConfig, planned: Planned | None = None
) -> tuple[list[int], list[int]]:
    """Return the corresponding layers of a student and a teacher, as two lists of indices of equal length.

    Layer i of n corresponds to the layer of the teacher's N that ends nearest to the same share of the depth, number
    (i + 1) * N / n, rounded, from 1.

    Args:
        planned: of a student that was reduced from a model as deep as the teacher; its layers correspond to those of
            :func:`imitated_layers`, as in its restoration.

    Raises:
        UsageError: the widths differ.
    """
    n, whole = len(student.layers), len(teacher.layers)
    if student.dim != teacher.dim:
        given = Raw(f"a width of {student.dim}, and {teacher.dim} of the teacher")
        fix = "Give --hidden 0, or a teacher of the student's width."
        raise UsageError("--hidden", given=given, expected="hidden states of one width", fix=fix)
    if planned and (planned.original_layers, len(planned.kept)) == (whole, n):
        return list(range(n)), list(imitated_layers(planned.kept, whole))
    numbers = [(2 * (index + 1) * whole + n) // (2 * n) for index in range(n)]
    return list(range(n)), [max(number, 1) - 1 for number in numbers]


def imitated_layers(kept: Sequence[int], layers: int) -> tuple[int, ...]:
    """Return the layer of an original whose output each kept layer imitates: that before the next kept one."""
    return (*(number - 1 for number in kept[1:]), layers - 1)
