"""Transformers with a shape for each layer: BERT (post-LN), ViT (pre-LN) and GPT-2 (causal).

- token, position and segment embeddings, or image patches with a summary token
- attention with separate projections, h heads of width r; h * r need not be the model's width
- feed-forward of width f; without heads or hidden units, a layer lacks that sub-layer and its cost
- learned positions, exact or tanh GELU, biases
- dropout in training, where BERT has it, except on attention weights
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional

from export.models.attention import MultiHeadAttention

Architecture = Literal["bert", "vit", "gpt2"]


class LayerShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Shape of one layer.

    Attributes:
        num_heads: h; 0 leaves the attention sub-layer out.
        head_dim: r, of queries, keys and values alike, so that TensorRT can fuse them.
        ffn_dim: f; 0 leaves the feed-forward sub-layer out.
        scale: of the logits; None is 1/sqrt(r). A layer whose heads were cut keeps the scale that it was trained with.
    """

    num_heads: int
    head_dim: int
    ffn_dim: int
    scale: float | None = None


class TransformerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Shape of a whole model; saved with the weights, so that a reduced checkpoint loads at its own shapes.

    Attributes:
        architecture: decides the embeddings and the place of the normalisation.
        dim: d, the width of a token.
        vocab_size: number of tokens; unused for images.
        max_positions: the longest sequence; for images patches and one.
        segments: number of segment embeddings; 0 is none.
        norm_eps: of every layer normalisation.
        tanh_gelu: GELU by its tanh approximation, as GPT-2 has it.
        relative_buckets: of distances, for a learned bias of the attention logits, as MPNet has it; 0 is none.
    """

    architecture: Architecture
    dim: int
    layers: tuple[LayerShape, ...]
    vocab_size: int = 0
    max_positions: int = 512
    segments: int = 0
    image_size: int = 0
    patch_size: int = 0
    channels: int = 0
    norm_eps: float = 1e-12
    tanh_gelu: bool = False
    relative_buckets: int = 0

    @property
    def pre_norm(self) -> bool:
        """Whether sub-layers normalise their input; post-LN normalises the sum with their output."""
        return self.architecture != "bert"

    @property
    def causal(self) -> bool:
        """Whether a token sees only those before it."""
        return self.architecture == "gpt2"


class FeedForward(nn.Module):
    """Two linear layers with a GELU between: d -> f -> d."""

    def __init__(self, dim: int, hidden: int, tanh_gelu: bool) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)
        self.approximate = "tanh" if tanh_gelu else "none"

    def hidden(self, x: Tensor) -> Tensor:
        """Return the activations of the hidden units, [N, T, f]."""
        return functional.gelu(self.up(x), approximate=self.approximate)

    def forward(self, x: Tensor) -> Tensor:
        """Return [N, T, d]."""
        output: Tensor = self.down(self.hidden(x))
        return output


class Layer(nn.Module):
    """Attention and feed-forward, each with its residual and its normalisation.

    Post-LN keeps the normalisation of a sub-layer that is left out, because later layers expect its output.
    """

    def __init__(self, config: TransformerConfig, shape: LayerShape) -> None:
        super().__init__()
        self.pre_norm, self.dropout = config.pre_norm, 0.0
        self.attention = (
            MultiHeadAttention(
                config.dim,
                shape.num_heads,
                shape.head_dim,
                causal=config.causal,
                scale=shape.scale,
                relative_buckets=config.relative_buckets,
            )
            if shape.num_heads
            else None
        )
        self.attention_norm = nn.LayerNorm(config.dim, eps=config.norm_eps)
        self.feed_forward = FeedForward(config.dim, shape.ffn_dim, config.tanh_gelu) if shape.ffn_dim else None
        self.feed_forward_norm = nn.LayerNorm(config.dim, eps=config.norm_eps)
        # A removed sub-layer is replaced by its mean output, a constant.
        self.attention_constant = nn.Parameter(torch.zeros(config.dim)) if self.attention is None else None
        self.feed_forward_constant = nn.Parameter(torch.zeros(config.dim)) if self.feed_forward is None else None

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return [N, T, d] for x [N, T, d] and mask [N, T] (1 is a token, 0 padding)."""
        return self.after_feed_forward(self.after_attention(x, mask))

    def after_attention(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Return the output of the first half, [N, T, d]."""
        if self.pre_norm:
            return x + self._attend(self.attention_norm(x), mask)
        normalised: Tensor = self.attention_norm(x + self._attend(x, mask))
        return normalised

    def after_feed_forward(self, x: Tensor) -> Tensor:
        """Return the output of the second half, [N, T, d], for that of the first."""
        if self.pre_norm:
            return x + self._feed(self.feed_forward_norm(x))
        normalised: Tensor = self.feed_forward_norm(x + self._feed(x))
        return normalised

    def _attend(self, x: Tensor, mask: Tensor | None) -> Tensor:
        if self.attention is None:
            assert self.attention_constant is not None
            return self.attention_constant
        return _dropped(self, self.attention(x, mask))

    def _feed(self, x: Tensor) -> Tensor:
        if self.feed_forward is None:
            assert self.feed_forward_constant is not None
            return self.feed_forward_constant
        return _dropped(self, self.feed_forward(x))


class TextEmbeddings(nn.Module):
    """Token, position and, for BERT, segment embeddings; BERT normalises their sum."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.word = nn.Embedding(config.vocab_size, config.dim)
        self.position = nn.Embedding(config.max_positions, config.dim)
        self.segment = nn.Embedding(config.segments, config.dim) if config.segments else None
        self.norm = None if config.pre_norm else nn.LayerNorm(config.dim, eps=config.norm_eps)
        self.dropout = 0.0

    def forward(self, tokens: Tensor, segments: Tensor | None = None) -> Tensor:
        """Return [N, T, d] for tokens [N, T]; segments [N, T] are all 0 when None."""
        x = self.word(tokens) + self.position.weight[: tokens.shape[1]]
        if self.segment is not None:
            alone = segments is None or self.segment.num_embeddings == 1  # RoBERTa has one, whatever its tokenizer says
            x = x + (self.segment.weight[0] if alone else self.segment(segments))
        return _dropped(self, x if self.norm is None else self.norm(x))


class ImageEmbeddings(nn.Module):
    """Square patches, linearly projected, behind a learned summary token."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.patch = nn.Conv2d(config.channels, config.dim, config.patch_size, stride=config.patch_size)
        self.summary = nn.Parameter(torch.zeros(1, 1, config.dim))
        self.position = nn.Embedding((config.image_size // config.patch_size) ** 2 + 1, config.dim)
        self.dropout = 0.0

    def forward(self, pixels: Tensor) -> Tensor:
        """Return [N, patches + 1, d] for pixels [N, channels, size, size]."""
        patches = self.patch(pixels).flatten(2).transpose(1, 2)  # [N, patches, d]
        summary = self.summary.expand(pixels.shape[0], -1, -1)
        return _dropped(self, torch.cat([summary, patches], dim=1) + self.position.weight)


class Transformer(nn.Module):
    """Embeddings, layers, and for pre-LN a last normalisation."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings: nn.Module = ImageEmbeddings(config) if config.architecture == "vit" else TextEmbeddings(config)
        self.layers = nn.ModuleList(Layer(config, shape) for shape in config.layers)
        self.final_norm = nn.LayerNorm(config.dim, eps=config.norm_eps) if config.pre_norm else None

    def set_dropout(self, probability: float) -> None:
        """Set the dropout in training of the embeddings, and of each sub-layer's output; it is 0 in a new model."""
        for module in (self.embeddings, *self.layers):
            module.dropout = probability

    def forward(self, inputs: Tensor, mask: Tensor | None = None, segments: Tensor | None = None) -> Tensor:
        """Return the hidden states [N, T, d].

        Args:
            inputs: token ids [N, T], or pixels [N, channels, size, size].
            mask: [N, T], 1 for tokens and 0 for padding.
            segments: [N, T], which segment each token belongs to.
        """
        x = self.embeddings(inputs) if segments is None else self.embeddings(inputs, segments)
        for layer in self.layers:
            x = layer(x, mask)
        hidden: Tensor = x if self.final_norm is None else self.final_norm(x)
        return hidden


def _dropped(module: Any, x: Tensor) -> Tensor:
    """Return x after its module's dropout; in evaluation x itself, so that exported graphs have no trace of it."""
    return functional.dropout(x, module.dropout) if module.training and module.dropout else x
