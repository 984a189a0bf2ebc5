"""Losses of the options for each layer: how far the model's outputs move when only that layer is reduced."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from export.data.tokens import Batch, Rows, sorted_batches
from export.finetune.objectives import outputs_of
from export.models.heads import Head
from export.models.transformer import LayerShape
from export.reduce.calibration import BATCH, attention_statistics, calibration_batches, feed_forward_statistics
from export.reduce.grid import Grid
from export.reduce.states import after_attention, after_feed_forward, embedded, layers_of
from export.reduce.sublayers import AttentionReducer, FeedForwardReducer, with_half
from export.training.checkpoint import fingerprint, load_state, save_state
from export.training.device import model_device, multiplying_in
from export.training.recipe import Precision

#: Called with a stage and its steps, those done and all: texts are read, data prepared, for which an imported model
#: answers them, shapes timed, losses of a layer measured, layers reduced.
OnProgress: TypeAlias = Callable[[Literal["texts", "data", "times", "losses", "layers"], int, int], None]


def silent(stage: str, done: int, total: int) -> None:
    """Ignore the progress of a reduction."""


class SavedState:
    """A file in the directory of the state, one for each model, calibration set and settings.

    Raises:
        CheckpointError: it is malformed, of another reduction, or cannot be written.
    """

    def __init__(self, state: Path | None, name: str, model: Head, calibration: Rows, settings: str) -> None:
        self._path: Path | None = None
        self.value: dict[str, Any] = {}
        if state is not None:
            self._fingerprint = fingerprint([model], calibration.contents, settings)
            self._path = state / f"{name}-{self._fingerprint[:12]}.state"
            self.value = load_state(self._path, self._fingerprint) or {}

    def save(self, value: dict[str, Any]) -> None:
        """Replace the file."""
        if self._path is not None:
            save_state(self._path, {"fingerprint": self._fingerprint, **value})


#: Of :func:`tokens_needed`, in units of the widest layer's features.
_TOKENS = 2.5


class Losses(NamedTuple):
    """Losses of each option for the halves of a layer, which add up, and of leaving the layer out."""

    attention: list[float]
    feed_forward: list[float]
    layer: float = math.inf

    def of(self, grid: Grid, shape: LayerShape | None) -> float:
        """Return the loss of a shape; None leaves the layer out."""
        if shape is None:
            return self.layer
        attention, feed_forward = grid.find(shape)
        return self.attention[attention] + self.feed_forward[feed_forward]


def tokens_needed(model: Head) -> float:
    """Return about how many tokens the losses are measured on: they take long, and need less than the weights."""
    return _TOKENS * max(max(one.num_heads * one.head_dim, one.ffn_dim) for one in model.transformer.config.layers)


class LossMeter:
    """Measures the losses of one layer after the other, from the first on.

    Args:
        states: input of the first layer, from :func:`export.reduce.states.embedded`.
    """

    def __init__(self, model: Head, batches: Sequence[Batch], states: list[Tensor], grid: Grid) -> None:
        self._batches, self._states, self._grid = batches, states, grid
        self._layers, self._shapes = layers_of(model.transformer), model.transformer.config.layers
        with torch.no_grad():
            self._wanted = [outputs_of(model, batch) for batch in batches]
        # The same head and later layers, after layers with known outputs.
        self._known = _Known()
        self._tail = copy.deepcopy(model).eval()

    def measure(self, number: int) -> Losses:
        """Return the losses of each option for layer ``number``, and advance the states to the next layer.

        The loss of a shape that the layer does not fit into is infinite.
        """
        layer, shape = self._layers[number], self._shapes[number]
        self._tail.transformer.layers = nn.ModuleList([self._known, *self._layers[number + 1 :]])
        after = after_attention(layer, self._states, self._batches)
        own = self._grid.find(shape)
        attention_losses, feed_forward_losses = (
            [0.0 if option == index else math.inf for option in range(len(options))]
            for index, options in zip(own, self._grid, strict=True)
        )
        if layer.attention is not None:
            statistics, _ = attention_statistics(layer, self._states, self._batches)
            attention = AttentionReducer(layer.attention, statistics)
            for option, (heads, rank) in enumerate(self._grid.attention):
                if option != own[0] and heads <= shape.num_heads and rank <= shape.head_dim:
                    smaller = with_half(layer, "attention", attention.reduced(heads, rank))
                    halfway = after_attention(smaller, self._states, self._batches)
                    attention_losses[option] = self._loss(after_feed_forward(smaller, halfway))
        if layer.feed_forward is not None:
            feed_forward = FeedForwardReducer(layer.feed_forward, feed_forward_statistics(layer, after, self._batches))
            for option, units in enumerate(self._grid.feed_forward):
                if units < shape.ffn_dim:
                    smaller = with_half(layer, "feed_forward", feed_forward.reduced(units))
                    feed_forward_losses[option] = self._loss(after_feed_forward(smaller, after))
        left_out = self._loss(self._states)
        self._states = after_feed_forward(layer, after)
        return Losses(attention_losses, feed_forward_losses, left_out)

    def skip(self, number: int) -> None:
        """Advance the states beyond layer ``number`` without measuring it."""
        layer = self._layers[number]
        self._states = after_feed_forward(layer, after_attention(layer, self._states, self._batches))

    def _loss(self, states: Sequence[Tensor]) -> float:
        """Return the divergence of the outputs from the original's, a mean over inputs."""
        total = 0.0
        with torch.no_grad():
            for state, batch, wanted in zip(states, self._batches, self._wanted, strict=True):
                self._known.state = state
                outputs = outputs_of(self._tail, batch)
                total += len(state) * float(self._tail.imitation(outputs, wanted, temperature=1.0))
        return total / sum(len(state) for state in states)


class _Known(nn.Module):
    """Stands for layers with known output."""

    state: Tensor

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return self.state


def measure_losses(
    model: Head,
    calibration: Rows,
    grid: Grid,
    *,
    state: Path | None = None,
    on_progress: OnProgress = silent,
) -> list[Losses]:
    """Return the loss of each option for each layer; arguments and errors of ``reduce_model``."""
    share = min(1.0, tokens_needed(model) / float(calibration.lengths.sum()))
    batches = calibration_batches(model, calibration, share=share)
    saved = SavedState(state, "losses", model, calibration, f"{grid} and none {_TOKENS}")
    losses = [Losses(*values) for values in saved.value.get("losses", [])]
    layers = len(model.transformer.layers)
    if len(losses) == layers:
        return losses
    meter = LossMeter(model, batches, embedded(model.transformer, batches), grid)
    for number in range(layers):
        if number < len(losses):
            meter.skip(number)
            continue
        losses.append(meter.measure(number))
        saved.save({"losses": [tuple(costs) for costs in losses]})
        on_progress("losses", number + 1, layers)
    return losses


def divergence(model: Head, reduced: Head, rows: Rows, precision: Precision = "fp32") -> float:
    """Return the mean divergence of a reduced model from the original; of a regression, the mean squared error."""
    total, device = 0.0, model_device(model)
    with torch.no_grad(), multiplying_in(precision, device):
        for indices in sorted_batches(rows.lengths, BATCH):
            batch = rows.batch(indices).to(device)
            outputs, wanted = (outputs_of(each, batch) for each in (reduced, model))
            total += len(indices) * float(model.imitation(outputs, wanted, temperature=1.0))
    return total / len(rows.lengths)
