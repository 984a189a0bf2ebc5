"""Smaller sub-layers: the choice of heads and units, their width, and their new weights.

The order within an attention: heads are removed, and W_O is fitted for the others; their queries and keys, and their
values and outputs, get rank r; W_O' is fitted once more, for all heads together. Means of removed parts move into the
output's bias, and so does b_V, exactly, because the rows of P sum to 1. b_K adds the same to all logits of a query, and
is dropped. TensorRT fuses a layer if all its heads have one width, for queries, keys and values alike, so there is one
r for both.
"""

from __future__ import annotations

import copy
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from export.models.attention import MultiHeadAttention
from export.models.transformer import FeedForward, Layer
from export.reduce.algebra import (
    Factors,
    Fit,
    Removal,
    blocks,
    fill,
    head_removal,
    heads_of,
    joined,
    kept_columns,
    least_squares,
    neuron_removal,
    query_key_factors,
    value_output_factors,
)
from export.reduce.calibration import AttentionStatistics, Features
from export.reduce.states import Part


class ReducedHalf(NamedTuple):
    """A smaller attention or feed-forward.

    Attributes:
        module: None without heads or hidden units.
        constant: [d], the output without them.
        kept: the original heads or hidden units that stay.
        output_error: mean squared error of the output over its variance, but for that of queries and keys.
        logits_error: of attention, mean squared error of the logits from the new rank, over their mean square.
    """

    module: MultiHeadAttention | FeedForward | None
    constant: Tensor | None
    kept: tuple[int, ...]
    output_error: float
    logits_error: float = 0.0


class AttentionReducer:
    """Makes an attention smaller in several ways; their common part is computed once."""

    def __init__(self, attention: MultiHeadAttention, statistics: AttentionStatistics) -> None:
        self._attention, self._statistics = attention, statistics
        self._W_O = attention.output_proj.weight.detach().cpu().double().T  # [H * d_k, d]

    @cached_property
    def _removal(self) -> Removal:
        return head_removal(self._statistics.C, self._W_O, self._attention.num_heads)

    def reduced(self, heads: int | tuple[int, ...], rank: int, scale: float | None = None) -> ReducedHalf:
        """Return the attention with heads of width ``rank``, or its constant output without heads.

        Args:
            heads: how many stay, or which.
            scale: of the new module's logits; None is 1/sqrt(rank). W_Q compensates for the difference to the old
                scale.
        """
        kept = self._removal.kept(heads) if isinstance(heads, int) else heads
        W_O, attention = self._W_O, self._attention
        b_V, b_O = (p.bias.detach().cpu().double() for p in (attention.v_proj, attention.output_proj))
        if not kept:
            return ReducedHalf(None, (b_O + (b_V + self._statistics.m) @ W_O).float(), (), 1.0)
        B, W_small, queries_keys = self._basis(list(kept), rank)
        fit = Fit.of(W_O, B, W_small, self._statistics.m, self._statistics.C)
        module = self._module(list(kept), rank, scale, B, queries_keys)
        fill(module.output_proj, fit.weight, b_O + b_V @ W_O + fit.shift)
        return ReducedHalf(module, None, kept, fit.error, self._logits_error(list(kept), queries_keys))

    def _basis(self, kept: list[int], rank: int) -> tuple[Tensor, Tensor, Factors | None]:
        """Return B [H * d_k, h * r] and W_O' [h * r, d], and F and G where the rank falls."""
        C, W_O, width = self._statistics.C, self._W_O, self._attention.head_dim
        heads = self._attention.num_heads
        B = kept_columns(len(C), tuple(kept), width)
        W_kept = least_squares(C, W_O, B) if len(kept) < heads else W_O
        if rank == width:
            return B, W_kept, None
        covariances = torch.stack([C[h * width : (h + 1) * width, h * width : (h + 1) * width] for h in kept])
        E = value_output_factors(covariances, torch.unflatten(W_kept, 0, (-1, width)), rank).left
        B = B @ blocks(E)
        S_q, S_k = self._statistics.S_q[kept], self._statistics.S_k[kept]
        return B, least_squares(C, W_O, B), query_key_factors(S_q, S_k, rank)

    def _module(
        self, kept: list[int], rank: int, scale: float | None, B: Tensor, queries_keys: Factors | None
    ) -> MultiHeadAttention:
        attention, width = self._attention, self._attention.head_dim
        relative = attention.relative
        module = MultiHeadAttention(
            attention.dim,
            len(kept),
            rank,
            causal=attention.causal,
            scale=scale,
            relative_buckets=relative.num_embeddings if relative else 0,
        )
        if relative is not None and module.relative is not None:
            module.relative.weight.data = relative.weight.detach()[:, kept].clone()
        W_Q, W_K = (heads_of(p.weight, attention.num_heads)[kept] for p in (attention.q_proj, attention.k_proj))
        b_Q = torch.unflatten(attention.q_proj.bias.detach().cpu().double(), 0, (-1, width))[kept, None]  # [h, 1, d_k]
        if queries_keys is not None:
            F, G = queries_keys.left, queries_keys.right
            W_Q, b_Q, W_K = W_Q @ F, b_Q @ F, W_K @ G
        folded = attention.scale / module.scale
        W_Q, b_Q = W_Q * folded, b_Q * folded
        fill(module.q_proj, joined(W_Q), b_Q.flatten())
        fill(module.k_proj, joined(W_K), torch.zeros(len(kept) * rank))
        fill(module.v_proj, attention.v_proj.weight.detach().cpu().double().T @ B, torch.zeros(len(kept) * rank))
        return module.to(attention.q_proj.weight).train(attention.training)

    def _logits_error(self, kept: list[int], queries_keys: Factors | None) -> float:
        if queries_keys is None:
            return 0.0
        S_q, S_k = self._statistics.S_q[kept], self._statistics.S_k[kept]
        whole = torch.eye(S_q.shape[1], dtype=S_q.dtype).expand_as(S_q)
        lost = whole - queries_keys.left @ queries_keys.right.transpose(1, 2)
        square = _mean_square(S_q, S_k, whole)
        return _mean_square(S_q, S_k, lost) / square if square > 0 else 0.0


class FeedForwardReducer:
    """Makes a feed-forward smaller in several ways."""

    def __init__(self, feed_forward: FeedForward, statistics: Features) -> None:
        self._feed_forward, self._statistics = feed_forward, statistics
        self._W_2 = feed_forward.down.weight.detach().cpu().double().T  # [f, d]

    @cached_property
    def _removal(self) -> Removal:
        return neuron_removal(self._statistics.covariance, self._W_2)

    def reduced(self, neurons: int | tuple[int, ...]) -> ReducedHalf:
        """Return the feed-forward with so many hidden units, or with these, or its constant output without any."""
        kept = self._removal.kept(neurons) if isinstance(neurons, int) else neurons
        (A, mean), W_2, original = self._statistics, self._W_2, self._feed_forward
        b_2 = original.down.bias.detach().cpu().double()
        if not kept:
            return ReducedHalf(None, (b_2 + mean @ W_2).float(), (), 1.0)
        B = kept_columns(len(A), kept)
        W_small = least_squares(A, W_2, B) if len(kept) < len(A) else W_2
        module = FeedForward(W_2.shape[1], len(kept), original.approximate == "tanh")
        rows, fit = list(kept), Fit.of(W_2, B, W_small, mean, self._statistics.covariance)
        fill(module.up, original.up.weight.detach().T[:, rows], original.up.bias.detach()[rows])
        fill(module.down, fit.weight, b_2 + fit.shift)
        return ReducedHalf(module.to(original.up.weight).train(original.training), None, kept, fit.error)


def with_half(layer: Layer, part: Part, reduced: ReducedHalf) -> Layer:
    """Return a copy of a layer with another attention or feed-forward."""
    new, constant = copy.deepcopy(layer), reduced.constant
    setattr(new, part, reduced.module)
    like = layer.attention_norm.weight
    setattr(new, f"{part}_constant", None if constant is None else nn.Parameter(constant.to(like)))
    return new


def _mean_square(S_q: Tensor, S_k: Tensor, D: Tensor) -> float:
    """Return Σ_h E[(q D k)²] = Σ_h tr(S_q D S_k Dᵀ) for independent q and k, D [H, d_k, d_k]."""
    return float((S_q @ D @ S_k * D).sum())
