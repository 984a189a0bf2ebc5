"""Losses: the task's own, and the imitation of a teacher."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from edge.errors import Raw, UsageError
from export.data.tokens import Batch
from export.models.heads import SentenceEmbedder, SequenceClassifier, SpanClassifier, TokenClassifier
from export.models.transformer import Transformer

Head: TypeAlias = "SequenceClassifier | TokenClassifier | SpanClassifier | SentenceEmbedder"
Outputs: TypeAlias = "Tensor | tuple[Tensor, Tensor]"


def outputs_of(model: Head, batch: Batch) -> Outputs:
    """Return the outputs for a batch in FP32.

    They are logits [N, labels] or [N, T, labels], embeddings [N, width], or logits of first and last tokens, each
    [N, T].
    """
    outputs: Outputs = model(batch.inputs, batch.mask, batch.segments)
    return outputs.float() if isinstance(outputs, Tensor) else (outputs[0].float(), outputs[1].float())


def task_loss(model: Head, outputs: Outputs, targets: Tensor) -> Tensor:
    """Return the loss of the model's head, a scalar.

    Args:
        targets: classes [N] or [N, T], scores [N], embeddings [N, width], or first and last tokens [N, 2].
    """
    loss: Any = model.loss
    return cast(Tensor, loss(outputs, targets.unbind(dim=1) if isinstance(model, SpanClassifier) else targets))


def imitation_loss(model: Head, outputs: Outputs, teacher: Outputs, temperature: float) -> Tensor:
    """Return the distance of outputs to a teacher's, a scalar.

    For logits, the Kullback-Leibler divergence at a temperature, times its square so that the gradient keeps its size:
    Hinton et al. 2015, "Distilling the Knowledge in a Neural Network". For a regression, the squared error, and for
    embeddings the squared distance. It is a mean over texts, for labels of tokens over tokens.
    """
    if isinstance(outputs, Tensor):
        assert isinstance(teacher, Tensor)
        if isinstance(model, SentenceEmbedder):
            return model.loss(outputs, teacher)
        if isinstance(model, SequenceClassifier) and model.regression:
            return functional.mse_loss(outputs, teacher)
        # Without the flattening, a sum over tokens. The logits of padding are 0 in both, and add nothing.
        return _divergence(outputs.flatten(0, -2), teacher.flatten(0, -2), temperature)
    start, end = (_divergence(*pair, temperature) for pair in zip(outputs, teacher, strict=True))
    return (start + end) / 2


def hidden_loss(ours: Sequence[Tensor], theirs: Sequence[Tensor], mask: Tensor | None) -> Tensor:
    """Return the mean squared error of hidden states relative to the teacher's mean square, a scalar.

    It is relative because the residual stream of pre-LN models grows with depth, and the last layers would dominate.

    Args:
        ours: [N, T, d] of each layer.
        theirs: [N, T, d] of the corresponding layers of the teacher.
        mask: [N, T], 1 for tokens and 0 for padding; None without padding.
    """
    errors = []
    for student, teacher in zip(ours, theirs, strict=True):
        error, size = (student - teacher).square(), teacher.square()
        if mask is not None:
            error, size = error * mask[:, :, None], size * mask[:, :, None]
        errors.append(error.sum() / size.sum())
    return torch.stack(errors).mean()


def corresponding_layers(student: Transformer, teacher: Transformer) -> tuple[list[int], list[int]]:
    """Return the corresponding layers of a student and a teacher, as two lists of indices of equal length.

    Layer i of n corresponds to the layer of the teacher's N that ends nearest to the same share of the depth, number
    (i + 1) * N / n, rounded, from 1.

    Raises:
        UsageError: the widths differ.
    """
    ours, theirs = len(student.layers), len(teacher.layers)
    if student.config.dim != teacher.config.dim:
        given = Raw(f"a width of {student.config.dim}, and {teacher.config.dim} of the teacher")
        fix = "Give --hidden 0, or a teacher of the student's width."
        raise UsageError("--hidden", given=given, expected="hidden states of one width", fix=fix)
    numbers = [(2 * (index + 1) * theirs + ours) // (2 * ours) for index in range(ours)]
    return list(range(ours)), [max(number, 1) - 1 for number in numbers]


@contextmanager
def hidden_states(transformer: Transformer, layers: Sequence[int]) -> Iterator[list[Tensor]]:
    """Yield a list that, after a forward pass in the block, has the outputs of the layers, [N, T, d] each."""
    found: list[Tensor] = []

    def keep(module: nn.Module, inputs: object, output: Tensor) -> None:
        found.append(output)

    handles = [transformer.layers[index].register_forward_hook(keep) for index in layers]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _divergence(logits: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    ours, theirs = (functional.log_softmax(one / temperature, dim=-1) for one in (logits, teacher))
    return temperature**2 * functional.kl_div(ours, theirs, reduction="batchmean", log_target=True)
