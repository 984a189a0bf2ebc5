"""Heads in calibrated order, modules that give their scores, and smaller matrices where all inputs have the same.

In calibrated order the outputs are the same, and the first d' coordinates are the best d'. At full rank, the factors of
:mod:`export.reduce.algebra` are an exact change of basis. The new coordinates are sorted by their contribution.
Those of a head's output have mean zero, so that a dropped one is replaced by its mean.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from edge.errors import Raw
from export.data.tokens import Batch
from export.errors import ReductionError
from export.models.attention import MultiHeadAttention
from export.papers.adaptive.attention import FIRST_SCORE_LOGIT, AdaptiveAttention, AdaptiveMode, HeadScorer, hard_keep
from export.papers.adaptive.gate import GatedLayer, HeadT
from export.reduce.algebra import blocks, fill, heads_of, joined, query_key_factors, value_output_factors
from export.reduce.calibration import AttentionStatistics, attention_statistics, check_calibration, check_original
from export.reduce.states import after_feed_forward, embedded, layers_of

#: Widths of heads are rounded up to a multiple of this, so that few groups result.
WIDTH_STEP = 8


def rotated_model(model: HeadT, batches: Sequence[Batch]) -> HeadT:
    """Return a copy of a model with the same outputs and every head's coordinates in calibrated order.

    Args:
        model: in evaluation mode; it is not changed.

    Raises:
        ReductionError: the model is reduced already, or the calibration set is too small.
    """
    check_original(model)
    check_calibration(model.transformer, batches)
    rotated = copy.deepcopy(model)
    states = embedded(model.transformer, batches)
    for original, layer in zip(layers_of(model.transformer), layers_of(rotated.transformer), strict=True):
        statistics, after = attention_statistics(original, states, batches)
        assert original.attention is not None
        layer.attention = rotated_attention(original.attention, statistics)
        states = after_feed_forward(original, after)
    return rotated


def rotated_attention(attention: MultiHeadAttention, statistics: AttentionStatistics) -> MultiHeadAttention:
    """Return an attention with the same outputs and the coordinates of each head in the order of its statistics."""
    heads, width = attention.num_heads, attention.head_dim
    new = copy.deepcopy(attention)
    W_Q, W_K = (heads_of(projection.weight, heads) for projection in (attention.q_proj, attention.k_proj))
    b_Q, b_V, b_O = (p.bias.detach().double() for p in (attention.q_proj, attention.v_proj, attention.output_proj))
    F, G, _ = query_key_factors(statistics.S_q, statistics.S_k, width)
    fill(new.q_proj, joined(W_Q @ F), (torch.unflatten(b_Q, 0, (heads, 1, width)) @ F).flatten())
    # b_K adds the same to all logits of a query.
    fill(new.k_proj, joined(W_K @ G), torch.zeros(heads * width))
    W_O = attention.output_proj.weight.detach().double().T  # [H * d_k, d]
    C = torch.unflatten(torch.unflatten(statistics.C, 0, (heads, width)), 2, (heads, width))
    diagonal = torch.stack([C[head, :, head] for head in range(heads)])  # [H, d_k, d_k]
    E, W_small, _ = value_output_factors(diagonal, torch.unflatten(W_O, 0, (heads, width)), width)
    B = blocks(E)
    # Rows of P sum to 1: subtracting a constant from the values subtracts it from the output.
    fill(new.v_proj, attention.v_proj.weight.detach().double().T @ B, -(statistics.m @ B))
    fill(new.output_proj, W_small.flatten(0, 1), b_O + (statistics.m + b_V) @ W_O)
    return new


class GlobalScores(nn.Module):
    """Learnt scores that are the same for every input."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.full((number,), FIRST_SCORE_LOGIT))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the scores [N, number] for x [N, T, d]."""
        return self.logits.sigmoid().expand(x.shape[0], -1)


class GivenScores(nn.Module):
    """Constant scores."""

    def __init__(self, scores: Tensor) -> None:
        super().__init__()
        self.scores: Tensor
        self.register_buffer("scores", scores.float())

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the scores [N, H] for x [N, T, d]."""
        return self.scores.expand(x.shape[0], -1)


def scored_modules(model: nn.Module) -> list[AdaptiveAttention | GatedLayer]:
    """Return the attentions and layers with a scorer, in order."""
    return [module for module in model.modules() if isinstance(module, AdaptiveAttention | GatedLayer)]


def with_scores(model: HeadT, mode: AdaptiveMode, scorer_of: Callable[[MultiHeadAttention, int], nn.Module]) -> HeadT:
    """Return a copy of a model with scores on every layer that has heads.

    Args:
        model: usually from :func:`rotated_model`; it is not changed.
        scorer_of: returns the scorer for an attention and the number of its layer.
    """
    new = copy.deepcopy(model)
    for number, layer in enumerate(layers_of(new.transformer)):
        if layer.attention is not None:
            layer.attention = AdaptiveAttention(layer.attention, mode, scorer_of(layer.attention, number))
    return new


def scorers(seed: int, *, share: int = 4, pooled: bool = False) -> Callable[[MultiHeadAttention, int], nn.Module]:
    """Return the ``scorer_of`` of :func:`with_scores` for MLPs of width d / ``share``; the paper has d / 4."""

    def scorer(attention: MultiHeadAttention, number: int) -> nn.Module:
        return new_scorer(attention.dim, attention.num_heads, share, seed=1000 * seed + number, pooled=pooled)

    return scorer


def new_scorer(dim: int, scores: int, share: int, *, seed: int, pooled: bool) -> HeadScorer:
    """Return a scorer whose weights depend on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return HeadScorer(dim, scores, share, pooled=pooled)


class GroupedAttention(nn.Module):
    """Attention with groups of heads of different widths, whose outputs are added."""

    def __init__(self, groups: list[MultiHeadAttention]) -> None:
        super().__init__()
        self.groups = nn.ModuleList(groups)

    def forward(self, x: Tensor, mask: Tensor | None = None, *, queries: int | None = None) -> Tensor:
        """Return the output [N, queries, d]."""
        return torch.stack([group(x, mask, queries=queries) for group in self.groups]).sum(dim=0)


def shrunk_model(model: HeadT) -> HeadT:
    """Return a copy of a model with the same outputs, without the coordinates that its scores drop.

    Raises:
        ReductionError: the scores depend on the input.
    """
    new = copy.deepcopy(model)
    new.eval()
    for layer in layers_of(new.transformer):
        if isinstance(layer.attention, AdaptiveAttention):
            layer.attention = cast(MultiHeadAttention, shrunk_attention(layer.attention))
    return new


def shrunk_attention(attention: AdaptiveAttention) -> nn.Module:
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
