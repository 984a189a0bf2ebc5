"""Attention with fewer keys and values: Linformer (Wang et al. 2020, arXiv 2006.04768), which paper 002 compares."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from export.models.attention import MultiHeadAttention
from export.papers.adaptive.gate import HeadT
from export.reduce.states import layers_of

#: Tokens of which one key and value is made.
RATIO = 4


class LinformerAttention(MultiHeadAttention):
    """Attention to ceil(T / 4) mixtures of the tokens; heads, keys and values share the mixing weights.

    These start as means of four neighbours. A text of T tokens uses the first rows and columns of them. Padding counts
    as zero, and a mixture whose four own tokens are all padding is masked, so that padding changes nothing.

    Args:
        attention: the projections and the shape.
        positions: the longest text.
    """

    def __init__(self, attention: MultiHeadAttention, positions: int) -> None:
        super().__init__(attention.dim, attention.num_heads, attention.head_dim, scale=attention.scale)
        self.load_state_dict(attention.state_dict())
        rows = -(-positions // RATIO)
        self.mixing = nn.Parameter(torch.eye(rows).repeat_interleave(RATIO, dim=1)[:, :positions] / RATIO)
        self.train(attention.training)

    def attend(self, q: Tensor, x: Tensor, mask: Tensor | None) -> Tensor:
        """Return the outputs of all heads; arguments as for :class:`export.models.attention.MultiHeadAttention`."""
        mixing = self.mixing[: x[:, ::RATIO].shape[1], : x.shape[1]]
        if mask is not None:
            # Padding is at the end, so that the first of a mixture's own tokens tells.
            x, mask = x * mask.to(x.dtype)[:, :, None], mask[:, ::RATIO]
        return super().attend(q, mixing.to(x.dtype) @ x, mask)


def with_linformer(model: HeadT) -> HeadT:
    """Return a copy of a model that has this attention in each layer with heads."""
    new = copy.deepcopy(model)
    for layer in layers_of(new.transformer):
        if layer.attention is not None:
            layer.attention = LinformerAttention(layer.attention, new.transformer.config.max_positions)
    return new
