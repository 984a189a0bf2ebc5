"""Correction of a sub-layer for inputs that reduced layers before it have changed.

A layer after a reduced one reads other states than the original did. So its last weights are fitted once more: their
output, added to the changed input, is to be what the original layer gives for the original input. This is a linear
regression, and the reduction that follows keeps the best part of its result: to fit all weights first and the kept ones
then gives the same as to fit the kept ones to the original's outputs.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from export.models.transformer import Layer
from export.reduce.algebra import regularised
from export.reduce.calibration import Moments
from export.reduce.states import Padded, Part, last_of, run_half, tokens_of

#: Added to the inputs' covariance, in units of their mean variance: the weights stay near the original ones in
#: directions that the calibration set hardly has.
_RIDGE = 1e-3


def sums(layer: Layer, part: Part, states: Sequence[Tensor], batches: Sequence[Padded]) -> list[Tensor]:
    """Return the input of a half of a layer plus its output, before any normalisation, [N, T, d] for each batch."""
    return [x + run_half(layer, part, x, batch.mask).returned for x, batch in zip(states, batches, strict=True)]


def refitted(
    layer: Layer, part: Part, states: Sequence[Tensor], wanted: Sequence[Tensor], batches: Sequence[Padded]
) -> Layer:
    """Return a copy of a layer one of whose halves gives ``wanted``, as nearly as its last weights can.

    Args:
        states: input of the half, [N, T, d] for each batch.
        wanted: :func:`sums` of the original model, of the same shapes.
    """
    new = copy.deepcopy(layer)
    last = last_of(new, part)
    width = last.in_features if last else 0
    moments = Moments(1, width + states[0].shape[-1])
    for x, target, batch in zip(states, wanted, batches, strict=True):
        found = run_half(layer, part, x, batch.mask)
        moments.add(tokens_of(torch.cat([found.read, target - x - found.returned], dim=-1), batch.mask))
    mean, covariance = moments.mean[0], moments.covariance[0]
    error = mean[width:]
    with torch.no_grad():
        if last is None:
            constant = new.attention_constant if part == "attention" else new.feed_forward_constant
            assert constant is not None
            constant.add_(error.to(constant))
            return new
        change = torch.linalg.solve(regularised(covariance[:width, :width], _RIDGE), covariance[:width, width:])
        last.weight.add_(change.T.to(last.weight))
        last.bias.add_((error - mean[:width] @ change).to(last.bias))
    return new
