"""Smaller matrices with the same outputs, for scores that are the same for every input."""

from __future__ import annotations

import copy
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from edge.errors import Raw
from export.errors import ReductionError
from export.finetune.objectives import Head
from export.models.attention import MultiHeadAttention, hard_keep
from export.models.transformer import Layer
from export.papers.adaptive.scores import GivenScores, GlobalScores, SkippableAttention
from export.reduce.states import layers_of

HeadT = TypeVar("HeadT", bound=Head)

#: Widths of heads are rounded up to a multiple of this, so that few groups result.
WIDTH_STEP = 8


class GroupedAttention(nn.Module):
    """Attention with groups of heads of different widths, whose outputs are added."""

    def __init__(self, groups: list[MultiHeadAttention]) -> None:
        super().__init__()
        self.groups = nn.ModuleList(groups)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, *, queries: int | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output [N, queries, d], and None for the scores."""
        outputs: list[Tensor] = [group(x, mask, queries=queries)[0] for group in self.groups]
        return torch.stack(outputs).sum(dim=0), None


def shrunk_model(model: HeadT) -> HeadT:
    """Return a copy of a model with the same outputs, without the coordinates and attentions that its scores drop.

    Raises:
        ReductionError: the scores depend on the input.
    """
    new = copy.deepcopy(model)
    new.eval()
    for layer in layers_of(new.transformer):
        attention: nn.Module | None = layer.attention
        if isinstance(attention, SkippableAttention):
            _shrink_skippable(layer, attention)
        elif isinstance(attention, MultiHeadAttention) and attention.scorer is not None:
            layer.attention = cast(MultiHeadAttention, shrunk_attention(attention))
    return new


def shrunk_attention(attention: MultiHeadAttention) -> nn.Module:
    """Return the attention without the coordinates that its scores drop; errors as :func:`shrunk_model`."""
    if not isinstance(attention.scorer, GivenScores | GlobalScores) or attention.adaptive == "literal":
        given = Raw(f"{type(attention.scorer).__name__} in mode {attention.adaptive}")
        fix = "Run it as it is; only scores that are the same for every input can be folded into the weights."
        raise ReductionError("scores", given=given, expected="fixed ones", fix=fix)
    with torch.no_grad():
        scores = attention.scorer(torch.zeros(1, 1, attention.dim))
        keep = hard_keep(scores, attention.head_dim, attention.head_dim)[0].bool()  # [H, d_k]
    widths = (-(-keep.sum(dim=1) // WIDTH_STEP) * WIDTH_STEP).clamp(max=attention.head_dim)
    groups = [_group(attention, keep, torch.where(widths == width)[0], width) for width in sorted(set(widths.tolist()))]
    for group in groups[1:]:
        nn.init.zeros_(group.output_proj.bias)
    return (groups[0] if len(groups) == 1 else GroupedAttention(groups)).train(attention.training)


def _group(attention: MultiHeadAttention, keep: Tensor, heads: Tensor, width: int) -> MultiHeadAttention:
    """Return the attention of some heads, at a width that holds all their kept coordinates."""
    new = MultiHeadAttention(attention.dim, len(heads), width, causal=attention.causal, scale=attention.scale)
    kept = keep[heads, :width].flatten().float()
    rows = (heads[:, None] * attention.head_dim + torch.arange(width)).flatten()
    with torch.no_grad():
        for name in ("q_proj", "k_proj", "v_proj"):
            old, fresh = getattr(attention, name), getattr(new, name)
            # Coordinates that only the rounding keeps are zero in q, and so in the logits.
            factor = kept if name == "q_proj" else torch.ones_like(kept)
            fresh.weight.copy_(old.weight[rows] * factor[:, None])
            fresh.bias.copy_(old.bias[rows] * factor)
        new.output_proj.weight.copy_(attention.output_proj.weight[:, rows] * kept)
        new.output_proj.bias.copy_(attention.output_proj.bias)
    return new


def _shrink_skippable(layer: Layer, skippable: SkippableAttention) -> None:
    with torch.no_grad():
        passes = bool(skippable.keep(skippable.scorer(torch.zeros(1, 1, len(skippable.constant)))).item() > 0.5)
    layer.attention = skippable.attention if passes else None
    layer.attention_constant = None if passes else nn.Parameter(skippable.constant.detach())
