"""Outputs of a teacher on a training set, computed once and kept if memory allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from edge.datatypes import Array
from export.data.tokens import Batch, Rows, sorted_batches
from export.finetune.objectives import Head, Outputs, hidden_states, outputs_of
from export.training.device import model_device, multiplying_in
from export.training.recipe import Precision

#: Hidden states are kept up to this size; larger ones are computed again for each batch.
MOST_KEPT_BYTES = 4 << 30
_KEPT = torch.bfloat16
_BATCH = 64
#: The logit of padding as an answer's first or last token: exp() of it is 0.
_UNLIKELY = -1e4


class TeacherOutputs(NamedTuple):
    """Outputs of a teacher for a batch.

    Attributes:
        outputs: of its head, float32; see :func:`export.finetune.objectives.outputs_of`.
        states: [N, T, d], the outputs of the imitated layers.
    """

    outputs: Outputs
    states: list[Tensor]


class Teacher:
    """A model whose outputs on a training set are imitated; several students may share one.

    Args:
        layers: indices of the layers whose hidden states are imitated, too.
        most_kept_bytes: limit for the hidden states kept in bfloat16; above it, each batch is computed again.
    """

    def __init__(
        self,
        model: Head,
        rows: Rows,
        layers: Sequence[int],
        precision: Precision = "fp32",
        most_kept_bytes: int = MOST_KEPT_BYTES,
    ) -> None:
        self.model, self._layers, self._precision = model.eval(), list(layers), precision
        config = model.transformer.config
        tokens = len(rows.targets) * config.max_positions if config.architecture == "vit" else int(rows.lengths.sum())
        needed = tokens * config.dim * len(layers) * _KEPT.itemsize
        self._kept = outputs_by_row(self.model, rows, layers, precision) if needed <= most_kept_bytes else None

    def outputs_for(self, rows: Array, batch: Batch, layers: Sequence[int]) -> TeacherOutputs:
        """Return the outputs for rows of the training set, and their batch; ``layers`` are some of the teacher's."""
        if self._kept is None:
            return _run(self.model, batch, layers, self._precision)
        lessons, device = [self._kept[row] for row in rows], batch.inputs.device
        places = [self._layers.index(layer) for layer in layers]
        states = [pad_sequence([one.states[i] for one in lessons], True).to(device) for i in places]
        if isinstance(lessons[0].outputs, Tensor):
            return TeacherOutputs(pad_sequence([cast(Tensor, one.outputs) for one in lessons], True).to(device), states)
        first, last = (pad_sequence([one.outputs[i] for one in lessons], True, _UNLIKELY).to(device) for i in (0, 1))
        return TeacherOutputs((first, last), states)


def outputs_by_row(
    model: Head,
    rows: Rows,
    layers: Sequence[int] = (),
    precision: Precision = "fp32",
    on_rows: Callable[[int, int], None] = lambda done, rows: None,
) -> list[TeacherOutputs]:
    """Return the outputs for each row, without padding.

    They are [labels], [T, labels], [width] or two of [T], with states [T, d] of each layer. ``on_rows`` is called with
    the number of rows done and of all.
    """
    kept: list[TeacherOutputs | None] = [None] * len(rows.targets)
    lengths, device = rows.lengths, model_device(model)
    done = 0
    for indices in sorted_batches(lengths, _BATCH):
        batch = rows.batch(indices).to(device)
        outputs, states = _run(model, batch, layers, precision)
        for place, row in enumerate(indices):
            length = None if batch.mask is None else int(lengths[row])  # images have no padding
            one: Outputs
            if isinstance(outputs, Tensor):
                cut = outputs[place, :length] if outputs.dim() == 3 else outputs[place]
                one = cut.to("cpu", copy=True)
            else:
                first, last = (one[place, :length].to("cpu", copy=True) for one in outputs)
                one = first, last
            # Copies, because a view would keep the whole batch.
            kept[row] = TeacherOutputs(one, [state[place, :length].to("cpu", _KEPT, copy=True) for state in states])
        done += len(indices)
        on_rows(done, len(kept))
    return [lesson for lesson in kept if lesson is not None]


def _run(model: Head, batch: Batch, layers: Sequence[int], precision: Precision) -> TeacherOutputs:
    # Not inference_mode: its tensors cannot be saved for the backward pass.
    with (
        torch.no_grad(),
        multiplying_in(precision, batch.inputs.device),
        hidden_states(model.transformer, layers) as states,
    ):
        return TeacherOutputs(outputs_of(model, batch), states)
