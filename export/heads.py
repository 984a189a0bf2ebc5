"""Task heads on a :class:`export.transformer.Transformer`: logits for a sequence, or two logits for each token."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn
from torch.nn import functional

from edge.errors import UsageError
from export.transformer import Transformer

Pooling = Literal["mean", "summary"]


class SequenceClassifier(nn.Module):
    """A linear layer over one vector for the whole sequence.

    Args:
        pooling: ``mean`` over the tokens that are not padding, or ``summary``, the first token.
        regression: the one logit is a value, and its loss the squared error.

    Raises:
        UsageError: a regression with another number of labels than 1.
    """

    def __init__(
        self, transformer: Transformer, labels: int, pooling: Pooling = "mean", regression: bool = False
    ) -> None:
        super().__init__()
        if regression and labels != 1:
            fix = "Give labels=1, or leave regression out."
            raise UsageError("labels of a regression", given=labels, expected="1", fix=fix)
        self.transformer, self.pooling, self.regression = transformer, pooling, regression
        self.classifier = nn.Linear(transformer.config.dim, labels)

    def forward(self, inputs: Tensor, mask: Tensor | None = None, segments: Tensor | None = None) -> Tensor:
        """Return the logits [N, labels].

        Args:
            inputs: token ids [N, T], int64, or pixels [N, channels, size, size].
            mask: [N, T], int64, 1 for tokens and 0 for padding; None for images.
            segments: [N, T], int64; None is segment 0 everywhere.
        """
        hidden = self.transformer(inputs, mask, segments)
        pooled = hidden[:, 0] if self.pooling == "summary" else _mean(hidden, mask)
        logits: Tensor = self.classifier(pooled)
        return logits

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy to classes [N], or the mean squared error to values [N]."""
        return (
            functional.mse_loss(logits[:, 0], targets) if self.regression else functional.cross_entropy(logits, targets)
        )


class SpanClassifier(nn.Module):
    """Start and end of a span: two logits for each token, padding included."""

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


def _mean(hidden: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mean over the tokens that are not padding, [N, d]."""
    if mask is None:
        return hidden.mean(dim=1)
    weights = mask.to(hidden.dtype)
    weights = weights / weights.sum(dim=1, keepdim=True).clamp(min=1)  # [N, T]
    # A product, not a sum over tokens: it cannot overflow in FP16, and every runtime adds it up in FP32.
    return (weights[:, None] @ hidden)[:, 0]
