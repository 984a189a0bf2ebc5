"""Baselines of paper 002: attention with projected keys and values (Linformer), and with a sparse pattern (BigBird)."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn

from export.models.attention import MASKED_LOGIT, MultiHeadAttention

AttentionT = TypeVar("AttentionT", bound=MultiHeadAttention)

#: Tokens of which Linformer makes one: k = n / 4.
RATIO = 4
#: Tokens of a block. BigBird has 64, which would be a whole sentence.
BLOCK = 4
_RANDOM_BLOCKS = 1


class LinformerAttention(MultiHeadAttention):
    """Keys and values are projected along the text to k = ceil(n / 4) rows: Linformer (arXiv 2006.04768).

    The heads share the projections, one for keys and one for values, which start as means of four neighbours. A text of
    n tokens uses their first k rows and n columns, for texts of up to ``positions`` tokens. Padding is zero before the
    projection, and a row of four padding tokens is masked, so that padding changes nothing.
    """

    def __init__(self, dim: int, num_heads: int, head_dim: int, positions: int, scale: float | None = None) -> None:
        super().__init__(dim, num_heads, head_dim, scale=scale)
        rows = -(-positions // RATIO)
        means = torch.eye(rows).repeat_interleave(RATIO, dim=1)[:, :positions] / RATIO
        self.key_rows, self.value_rows = nn.Parameter(means), nn.Parameter(means.clone())

    def context(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return projected keys and values, [N, H, k, d_k], and the bias of the logits."""
        k, v, _ = super().context(x, mask)
        length = x.shape[1]
        rows = -(-length // RATIO)
        bias = None
        if mask is not None:
            real = mask.to(k.dtype)
            k, v = k * real[:, None, :, None], v * real[:, None, :, None]
            # Padding is at the end: if a row's first token is padding, all of them are.
            bias = (1 - real[:, ::RATIO])[:, None, None, :] * MASKED_LOGIT
        return self.key_rows[:rows, :length] @ k, self.value_rows[:rows, :length] @ v, bias


class SparseAttention(MultiHeadAttention):
    """A token attends to its block and the neighbouring ones, to the first, and to random ones: BigBird (2007.14062).

    The pattern is a mask on dense matrices, so it saves no time: it shows the cost in accuracy alone. The first block
    attends to everything. ``positions`` is the longest text.
    """

    def __init__(
        self, dim: int, num_heads: int, head_dim: int, positions: int, seed: int, scale: float | None = None
    ) -> None:
        super().__init__(dim, num_heads, head_dim, scale=scale)
        self.pattern: Tensor
        self.register_buffer("pattern", (1 - sparse_pattern(positions, seed)) * MASKED_LOGIT, persistent=False)

    def context(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return keys and values, [N, H, T, d_k], and the bias of the logits with the pattern."""
        k, v, bias = super().context(x, mask)
        pattern = self.pattern[: x.shape[1], : x.shape[1]].to(x.dtype)[None, None]
        return k, v, pattern if bias is None else bias + pattern


def sparse_pattern(positions: int, seed: int) -> Tensor:
    """Return the tokens (columns) that each token (row) attends to, [positions, positions] of 0 and 1.

    The random blocks of a row are before it, so that a short text has its share of them.
    """
    blocks = -(-positions // BLOCK)
    index = torch.arange(blocks)
    pattern = ((index[:, None] - index[None]).abs() <= 1).float()
    pattern[0], pattern[:, 0] = 1, 1
    generator = torch.Generator().manual_seed(seed)
    for row in range(1, blocks):
        pattern[row, torch.randint(row, (_RANDOM_BLOCKS,), generator=generator)] = 1
    return pattern.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:positions, :positions]


def like(new: AttentionT, attention: MultiHeadAttention) -> AttentionT:
    """Return ``new`` with the projections of another attention of the same shape."""
    new.load_state_dict(attention.state_dict(), strict=False)
    new.train(attention.training)
    return new
