"""4-bit NormalFloat (NF4): a frozen base rounded as in QLoRA, Dettmers et al. 2023, arXiv 2305.14314."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from export.generate.backbone import linear_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Consecutive weights that share a scale, their largest magnitude. The scales stay in FP32.
BLOCK = 64


def _levels() -> Tensor:
    """Return the 16 values of a weight in units of its block's scale, [16], rising.

    They are quantiles of the normal distribution, 7 below and 8 above an exact 0, divided by the largest.
    """
    outermost = 1 - (1 / 32 + 1 / 30) / 2
    above, below = (
        torch.special.ndtri(torch.linspace(0.5, outermost, count, dtype=torch.float64)[1:]) for count in (9, 8)
    )
    levels = torch.cat([-below.flip(0), torch.zeros(1), above])
    return (levels / levels.max()).float()


LEVELS = _levels()
_MIDDLES = (LEVELS[1:] + LEVELS[:-1]) / 2


def nearest(weights: Tensor) -> Tensor:
    """Return each weight as the nearest level of its block in FP32; blocks follow one another row by row."""
    flat = weights.float().flatten()
    blocks = functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(dim=1, keepdim=True)
    units = blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)
    levels = LEVELS.to(flat.device)[torch.bucketize(units, _MIDDLES.to(flat.device))]
    return (levels * scales).flatten()[: len(flat)].view_as(weights)


@torch.no_grad()
def rounded_to_nf4(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of a model whose linear layers but the last have rounded weights, in blocks along their inputs.

    Embeddings, biases and norms stay as they are.
    """
    rounded = copy.deepcopy(model)
    for layer in linear_layers(rounded):
        weight: Tensor = layer.weight  # type: ignore[assignment]
        # GPT-2 keeps its matrices transposed.
        weight.copy_(nearest(weight) if isinstance(layer, nn.Linear) else nearest(weight.T.contiguous()).T)
    return rounded
