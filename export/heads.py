"""Task heads on a :class:`export.models.transformer.Transformer`: for a sequence, its tokens, a span of them, or an embedding.

``outputs`` names the tensors that a head returns, in their order, and ``width`` is the number of columns of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar, Literal

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional

from edge.errors import UsageError
from export.models.transformer import Transformer

Pooling = Literal["mean", "summary"]
Activation = Literal["identity", "tanh", "relu"]
_ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "tanh": torch.tanh,
    "relu": torch.relu,
}
#: Target of a token that has no label; the default of torch's cross entropy.
NO_LABEL = -100


class SequenceClassifier(nn.Module):
    """A linear layer over one vector for the whole sequence.

    Args:
        pooling: ``mean`` over the tokens that are not padding, or ``summary``, the first token.
        regression: the one logit is a value, and its loss the squared error.
        pooler: activation of a layer d -> d between pooling and classifier; None without that layer.

    Raises:
        UsageError: a regression with another number of labels than 1.
    """

    outputs: ClassVar[tuple[str, ...]] = ("logits",)

    def __init__(
        self,
        transformer: Transformer,
        labels: int,
        pooling: Pooling = "mean",
        regression: bool = False,
        pooler: Activation | None = None,
    ) -> None:
        super().__init__()
        if regression and labels != 1:
            fix = "Give labels=1, or leave regression out."
            raise UsageError("labels of a regression", given=labels, expected="1", fix=fix)
        self.transformer, self.pooling, self.regression = transformer, pooling, regression
        dim = transformer.config.dim
        self.pooler = nn.Linear(dim, dim) if pooler else None
        self.activation: Activation = pooler or "identity"
        self.classifier = nn.Linear(dim, labels)

    def forward(self, inputs: Tensor, mask: Tensor | None = None, segments: Tensor | None = None) -> Tensor:
        """Return the logits [N, labels].

        Args:
            inputs: token ids [N, T], int64, or pixels [N, channels, size, size].
            mask: [N, T], int64, 1 for tokens and 0 for padding; None for images.
            segments: [N, T], int64; None is segment 0 everywhere.
        """
        pooled = _pooled(self.transformer(inputs, mask, segments), mask, self.pooling)
        if self.pooler is not None:
            pooled = _ACTIVATIONS[self.activation](self.pooler(pooled))
        logits: Tensor = self.classifier(pooled)
        return logits

    @property
    def width(self) -> int:
        """The number of labels."""
        return self.classifier.out_features

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy to classes [N], or the mean squared error to values [N]."""
        return (
            functional.mse_loss(logits[:, 0], targets) if self.regression else functional.cross_entropy(logits, targets)
        )


class TokenClassifier(nn.Module):
    """A linear layer over each token."""

    outputs: ClassVar[tuple[str, ...]] = ("logits",)

    def __init__(self, transformer: Transformer, labels: int) -> None:
        super().__init__()
        self.transformer = transformer
        self.classifier = nn.Linear(transformer.config.dim, labels)

    def forward(self, inputs: Tensor, mask: Tensor | None = None, segments: Tensor | None = None) -> Tensor:
        """Return the logits [N, T, labels], which are 0 for padding."""
        logits: Tensor = self.classifier(self.transformer(inputs, mask, segments))
        return logits if mask is None else logits * mask[:, :, None].to(logits.dtype)

    @property
    def width(self) -> int:
        """The number of labels."""
        return self.classifier.out_features

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy to classes [N, T] over the tokens that have one, not :data:`NO_LABEL`."""
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=NO_LABEL)


class SpanClassifier(nn.Module):
    """Start and end of a span: two logits for each token, padding included."""

    outputs: ClassVar[tuple[str, ...]] = ("start_logits", "end_logits")
    width: ClassVar[int] = 2

    def __init__(self, transformer: Transformer) -> None:
        super().__init__()
        self.transformer = transformer
        self.classifier = nn.Linear(transformer.config.dim, 2)

    def forward(
        self, inputs: Tensor, mask: Tensor | None = None, segments: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the logits of a span's first and last token, [N, T] each."""
        hidden = self.transformer(inputs, mask, segments)
        logits = self.classifier(hidden)  # [N, T, 2]
        return logits[..., 0], logits[..., 1]

    def loss(self, logits: tuple[Tensor, Tensor], targets: tuple[Tensor, Tensor]) -> Tensor:
        """Return the mean cross entropy to the positions of the first and of the last token, [N] each."""
        start, end = (functional.cross_entropy(*pair) for pair in zip(logits, targets, strict=True))
        return (start + end) / 2


class DenseShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A linear layer of an embedder, to ``width``, and the activation behind it."""

    width: int
    activation: Activation = "identity"
    bias: bool = True


class Embedding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What follows the pooling of an embedder: dense layers, and with ``normalised`` a division by the length."""

    dense: tuple[DenseShape, ...] = ()
    normalised: bool = False


class SentenceEmbedder(nn.Module):
    """One vector for the whole sequence, whose angles to others tell how similar their meanings are."""

    outputs: ClassVar[tuple[str, ...]] = ("embedding",)

    def __init__(self, transformer: Transformer, pooling: Pooling, embedding: Embedding) -> None:
        super().__init__()
        self.transformer, self.pooling, self.embedding = transformer, pooling, embedding
        widths = [transformer.config.dim, *(layer.width for layer in embedding.dense)]
        self.width = widths[-1]
        self.dense = nn.ModuleList(
            nn.Linear(before, layer.width, bias=layer.bias)
            for before, layer in zip(widths[:-1], embedding.dense, strict=True)
        )

    def forward(self, inputs: Tensor, mask: Tensor | None = None, segments: Tensor | None = None) -> Tensor:
        """Return the embeddings [N, width]; see :meth:`SequenceClassifier.forward`."""
        embedding = _pooled(self.transformer(inputs, mask, segments), mask, self.pooling)
        for layer, shape in zip(self.dense, self.embedding.dense, strict=True):
            embedding = _ACTIVATIONS[shape.activation](layer(embedding))
        if not self.embedding.normalised:
            return embedding
        length = torch.linalg.vector_norm(embedding, dim=1, keepdim=True)
        # Not clamp(), which becomes Clip without a maximum, about which TensorRT warns in FP16.
        return embedding / torch.maximum(length, torch.full_like(length, 1e-12))

    def loss(self, embeddings: Tensor, targets: Tensor) -> Tensor:
        """Return the mean squared distance to embeddings [N, width]."""
        return (embeddings - targets).square().sum(dim=1).mean()


def _pooled(hidden: Tensor, mask: Tensor | None, pooling: Pooling) -> Tensor:
    """Return one vector for each sequence, [N, d], of hidden states [N, T, d]."""
    return hidden[:, 0] if pooling == "summary" else _mean(hidden, mask)


def _mean(hidden: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mean over the tokens that are not padding, [N, d]."""
    if mask is None:
        return hidden.mean(dim=1)
    weights = mask.to(hidden.dtype)
    weights = weights / weights.sum(dim=1, keepdim=True).clamp(min=1)  # [N, T]
    # A product, not a sum over tokens: it cannot overflow in FP16, and every runtime adds it up in FP32.
    return (weights[:, None] @ hidden)[:, 0]
