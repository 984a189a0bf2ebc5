"""States between the layers of a model and between their halves, and measurements on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from export.data.tokens import Batch
from export.models.recorded import Passed, recorded
from export.models.transformer import Layer, Transformer

Part = Literal["attention", "feed_forward"]


def layers_of(transformer: Transformer) -> list[Layer]:
    """Return the layers with their type."""
    return [cast(Layer, layer) for layer in transformer.layers]


def embedded(transformer: Transformer, batches: Sequence[Batch]) -> list[Tensor]:
    """Return the input of the first layer, [N, T, d] for each batch."""
    embed: Any = transformer.embeddings
    with torch.no_grad():
        return [embed(b.inputs) if b.segments is None else embed(b.inputs, b.segments) for b in batches]


def after_attention(layer: Layer, states: Sequence[Tensor], batches: Sequence[Batch]) -> list[Tensor]:
    """Return the output of a layer's first half for ``states``, [N, T, d] for each batch."""
    with torch.no_grad():
        return [layer.after_attention(x, batch.mask) for x, batch in zip(states, batches, strict=True)]


def after_feed_forward(layer: Layer, states: Sequence[Tensor]) -> list[Tensor]:
    """Return the output of a layer's second half for that of its first half, [N, T, d] for each batch."""
    with torch.no_grad():
        return [layer.after_feed_forward(x) for x in states]


def last_of(layer: Layer, part: Part) -> nn.Linear | None:
    """Return the last weights of a half of a layer; None if the half is a constant."""
    if part == "attention":
        return layer.attention.output_proj if layer.attention else None
    return layer.feed_forward.down if layer.feed_forward else None


def run_half(layer: Layer, part: Part, x: Tensor, mask: Tensor | None) -> Passed:
    """Return what the last weights of a half read, [N, T, w], and return, [N, T, d]: its output without the residual.

    A half that is a constant reads nothing, [N, T, 0].
    """
    last = last_of(layer, part)
    if last is None:
        constant = layer.attention_constant if part == "attention" else layer.feed_forward_constant
        assert constant is not None
        return Passed(x[..., :0], constant.detach().expand_as(x))
    with torch.no_grad(), recorded([last]) as found:
        if part == "attention":
            layer.after_attention(x, mask)
        else:
            layer.after_feed_forward(x)
    return found[last]


def tokens_of(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return the rows [n, w] of x [N, T, w] that are not padding."""
    return x.flatten(0, 1) if mask is None else x[mask.bool()]


def relative_error(
    before: Layer, after: Layer, part: Part, states: Sequence[Tensor], batches: Sequence[Batch]
) -> float:
    """Return the mean squared error of a half's output over the variance of the original's, without the residual."""
    count, lost = 0, 0.0
    total, squares = torch.zeros(states[0].shape[-1], dtype=torch.float64), 0.0
    for x, batch in zip(states, batches, strict=True):
        wanted, found = (
            tokens_of(run_half(layer, part, x, batch.mask).returned, batch.mask).double() for layer in (before, after)
        )
        lost += float((found - wanted).square().sum())
        squares += float(wanted.square().sum())
        total += wanted.sum(dim=0).cpu()
        count += len(wanted)
    return lost / (squares - float(total.square().sum()) / count)
