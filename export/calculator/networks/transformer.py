"""Transformers: an encoder that reads the value from a summary token before the expression."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from edge.bundles.expression import TOKENS
from export.models.attention import AdaptiveMode, MultiHeadAttention
from export.papers.calculator.networks import Regressor, glorot, sinusoids


class EncoderLayer(nn.Module):
    """A post-LN transformer encoder layer: attention, then two linear layers with a ReLU between."""

    def __init__(self, dim: int, num_heads: int, hidden: int, adaptive: AdaptiveMode | None) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(dim, num_heads, dim // num_heads, adaptive)
        self.attention_norm = nn.LayerNorm(dim, eps=1e-3)  # Keras' epsilon, as in the original
        self.feed_forward = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, dim))
        self.feed_forward_norm = nn.LayerNorm(dim, eps=1e-3)

    def forward(self, x: Tensor, queries: int | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the first ``queries`` tokens (None: all), [N, queries, dim], and the head scores [N, H] or None."""
        attended, scores = self.attention(x, queries=queries)
        x = self.attention_norm(x[:, :queries] + attended)
        return self.feed_forward_norm(x + self.feed_forward(x)), scores


class Transformer(Regressor):
    """The transformers of papers 000 and 001: post-LN encoder layers.

    Args:
        dim: features of a token, d.
        num_layers: of the encoder.
        num_heads: of each layer; a head has d / num_heads features.
        hidden: width of the feed-forward networks.
        adaptive: how heads shrink (paper 002); None is the network of paper 000.
    """

    def __init__(
        self, dim: int, num_layers: int, num_heads: int, hidden: int, adaptive: AdaptiveMode | None = None
    ) -> None:
        super().__init__()
        self.adaptive = adaptive
        self.embedding = nn.Linear(1, dim)
        self.layers = nn.ModuleList(EncoderLayer(dim, num_heads, hidden, adaptive) for _ in range(num_layers))
        self.output = nn.Linear(dim, 1)
        self.positions: Tensor
        self.register_buffer("positions", sinusoids(TOKENS + 1, dim), persistent=False)
        glorot(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return the value."""
        return self.scored(x)[0]

    def scored(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the value [N, 1], and the head scores [N, H] of each layer if it is adaptive."""
        x = functional.pad(x, (1, 0), value=15.0)[:, :, None]  # the summary token's value; [N, 16, 1]
        x = self.embedding(x) * math.sqrt(self.embedding.out_features) + self.positions  # [N, 16, d]
        scores = []
        for index, layer in enumerate(self.layers, start=1):
            # Only the summary token is read in the end, so the last layer computes no other.
            x, layer_scores = layer(x, queries=1 if index == len(self.layers) else None)
            if layer_scores is not None:
                scores.append(layer_scores)
        return self.output(x[:, 0]), scores

    def kept(self, scores: list[Tensor]) -> Tensor:
        """Return which head coordinates each layer uses, [layers, N, H, d_k] of 0 and 1, for its scores."""
        attentions = [module for module in self.modules() if isinstance(module, MultiHeadAttention)]
        return torch.stack(
            [attention.keep(layer_scores) for attention, layer_scores in zip(attentions, scores, strict=True)]
        )
