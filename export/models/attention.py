"""Multi-head attention with separate projections."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

#: Added to the logits of padding: exp() of it is zero in FP32, and FP16 can hold it.
MASKED_LOGIT = -1e4
#: Distance, in tokens, from which on all share the last bucket.
_FARTHEST = 128


class MultiHeadAttention(nn.Module):
    """Self-attention with separate projections.

    Args:
        head_dim: d_k, the width of a head; H * d_k need not be d.
        causal: whether a token attends only to itself and those before it.
        scale: of the logits; None is 1/sqrt(d_k).
        relative_buckets: of distances, each with a bias of the logits for every head; 0 is none.
    """

    table: Tensor | None

    def __init__(
        self,
        dim: int,
        num_heads: int,
        head_dim: int,
        *,
        causal: bool = False,
        scale: float | None = None,
        relative_buckets: int = 0,
    ) -> None:
        super().__init__()
        self.dim, self.num_heads, self.head_dim, self.causal = dim, num_heads, head_dim, causal
        self.scale = head_dim**-0.5 if scale is None else scale
        width = num_heads * head_dim
        self.q_proj = nn.Linear(dim, width)
        self.k_proj = nn.Linear(dim, width)
        self.v_proj = nn.Linear(dim, width)
        self.output_proj = nn.Linear(width, dim)
        self.relative = nn.Embedding(relative_buckets, num_heads) if relative_buckets else None
        # A buffer moves to a GPU with the weights, not in each call.
        self.register_buffer("table", bucket_table(relative_buckets) if relative_buckets else None, persistent=False)

    def forward(self, x: Tensor, mask: Tensor | None = None, *, queries: int | None = None) -> Tensor:
        """Return [N, queries, d].

        Args:
            x: [N, T, d].
            mask: [N, T], 1 for tokens and 0 for padding; None when nothing is padding.
            queries: number of tokens, from the first on, that attend; None is all, T.
        """
        output: Tensor = self.output_proj(self.attend(self.q_proj(x[:, :queries]), x, mask))
        return output

    def attend(self, q: Tensor, x: Tensor, mask: Tensor | None) -> Tensor:
        """Return the outputs of all heads side by side, [N, queries, H * d_k], for their queries, of the same shape."""
        q, k, v = (self._heads(rows) for rows in (q, self.k_proj(x), self.v_proj(x)))
        # On a processor, the backward pass of the fused kernel takes half the time in FP32, but six times as long in
        # bfloat16. The exporter, which runs there, wraps it in reshapes that cost a served request an eighth.
        fused = q.is_cuda or (self.training and q.dtype == torch.float32)
        attend: Any = functional.scaled_dot_product_attention if fused else _attend
        heads: Tensor = attend(q, k, v, self._bias(x, mask), scale=self.scale)
        return heads.transpose(1, 2).flatten(2)

    def _bias(self, x: Tensor, mask: Tensor | None) -> Tensor | None:
        """Return the bias of the logits: [N, 1, 1, T] for padding, [1, 1, T, T] for the future, or their sum."""
        bias = None if mask is None else (1 - mask.to(x.dtype))[:, None, None, :] * MASKED_LOGIT
        length = x.shape[1]
        if self.relative is not None and self.table is not None:
            relative = self.relative(buckets(length, self.table))  # [T, T, H]
            relative = relative.permute(2, 0, 1)[None].to(x.dtype)
            bias = relative if bias is None else bias + relative
        if not self.causal:
            return bias
        future = torch.triu(torch.full((length, length), MASKED_LOGIT, dtype=x.dtype, device=x.device), diagonal=1)
        return future[None, None] if bias is None else bias + future

    def _heads(self, x: Tensor) -> Tensor:
        # [N, T, H * d_k] -> [N, H, T, d_k]
        return torch.unflatten(x, -1, (self.num_heads, self.head_dim)).transpose(1, 2)


def buckets(length: int, table: Tensor) -> Tensor:
    """Return the bucket of each pair of a query and a key, [T, T], by :func:`bucket_table`."""
    position = torch.arange(length, device=table.device)
    distance = (position[None, :] - position[:, None]).clamp(-_FARTHEST, _FARTHEST)
    return table[distance + _FARTHEST]


@cache
def bucket_table(number: int) -> Tensor:
    """Return the bucket of each distance from the query to the key, from the farthest key before it on, on the CPU.

    Half of the buckets are for keys behind the query. Of each half, one half has single distances, and the other
    logarithmic ranges of them: Raffel et al. 2020, "Exploring the Limits of Transfer Learning with a Unified
    Text-to-Text Transformer", section 2.1. A table, because a logarithm in FP16 would move their edges.
    """
    half, exact = number // 2, number // 4
    far = np.log(np.arange(exact, _FARTHEST + 1, dtype=np.float32) / exact) / math.log(_FARTHEST / exact)
    table = [*range(exact), *np.minimum(exact + (far * (half - exact)).astype(int), half - 1).tolist()]
    buckets = [*reversed(table[1:]), 0, *(half + bucket for bucket in table[1:])]
    return torch.tensor(buckets, device="cpu")


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *, scale: float) -> Tensor:
    logits = (q * scale) @ k.transpose(-1, -2)  # [N, H, queries, T]
    if bias is not None:
        logits = logits + bias
    return torch.softmax(logits, dim=-1) @ v  # [N, H, queries, d_k]
