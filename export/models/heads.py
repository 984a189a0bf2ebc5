"""Task heads on a transformer: for a sequence, its tokens, a span of them, or an embedding."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeAlias

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from edge.bundles.steps import (
    LabelPostprocess,
    Postprocess,
    ScorePostprocess,
    SpanPostprocess,
    TokenLabelPostprocess,
)
from edge.datatypes import Array
from edge.errors import UsageError
from export.models.transformer import Transformer

Pooling = Literal["mean", "summary"]
Activation = Literal["identity", "tanh", "relu"]
Outputs: TypeAlias = "Tensor | tuple[Tensor, Tensor]"
#: The one label of a regression.
SCORE = "score"
_ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "tanh": torch.tanh,
    "relu": torch.relu,
}
#: Most tokens of an answer to a question, as in the script of BERT for SQuAD.
LONGEST_ANSWER = 30
#: Target of a token that has no label; the default of torch's cross entropy.
NO_LABEL = -100


class Head(nn.Module):
    """Base of all heads: a transformer and what makes its outputs of the hidden states.

    Attributes:
        outputs: names of the tensors that it returns, in their order, and ``width`` the columns of each.
        by_token: whether they have a value for each token, and ``padding`` that of padding.
        agreement: name of the measure of equal answers.
    """

    outputs: ClassVar[tuple[str, ...]] = ("logits",)
    by_token: ClassVar[bool] = False
    padding: ClassVar[float] = 0.0
    agreement: str = "agreement"
    width: int

    def __init__(self, transformer: Transformer) -> None:
        super().__init__()
        self.transformer = transformer

    @property
    def layers(self) -> dict[str, nn.Linear]:
        """The linear layers behind the transformer, by their names."""
        return {
            name: layer
            for name, layer in self.named_modules()
            if isinstance(layer, nn.Linear) and not name.startswith("transformer.")
        }

    def postprocess(self, labels: tuple[str, ...]) -> Postprocess | None:
        """Return the step of a bundle that makes texts or a score of the outputs; None without such a step."""
        return None

    def joined(self, outputs: Sequence[Tensor]) -> Outputs:
        """Return tensors in the order of ``outputs`` as the head returns them."""
        return outputs[0]

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        """Return the mean loss of outputs, a scalar."""
        raise NotImplementedError

    def imitation(self, outputs: Any, teacher: Any, temperature: float) -> Tensor:
        """Return the distance of outputs to a teacher's, a scalar.

        For logits, the Kullback-Leibler divergence at a temperature, times its square so that the gradient keeps its
        size: Hinton et al. 2015, "Distilling the Knowledge in a Neural Network". For a regression, the squared error,
        and for embeddings the squared distance. It is a mean over texts, for labels of tokens over tokens.
        """
        # Without the flattening, a sum over tokens. The logits of padding are 0 in both, and add nothing.
        return _divergence(outputs.flatten(0, -2), teacher.flatten(0, -2), temperature)

    def answers(self, outputs: Sequence[Any]) -> Array:
        """Return the answers that are the outputs for each row, without padding.

        Returns:
            Classes [n] or [n, T] with :data:`NO_LABEL` for padding, scores [n], embeddings [n, width], or first and
            last tokens [n, 2].
        """
        raise NotImplementedError

    def agreements(self, answers: Array, others: Array) -> Array:
        """Return the agreement of two sets of :meth:`answers`, [n]: 1 or 0, of tokens a share, of embeddings a cosine.

        Labels of tokens where ``others`` have :data:`NO_LABEL` do not count.
        """
        return np.asarray(answers == others, dtype=np.float64)


class SequenceClassifier(Head):
    """A linear layer over one vector for the whole sequence.

    Args:
        pooling: ``mean`` over the tokens that are not padding, or ``summary``, the first token.
        regression: the one logit is a value, and its loss the squared error.
        pooler: activation of a layer d -> d between pooling and classifier; None without that layer.

    Raises:
        UsageError: a regression with another number of labels than 1.
    """

    def __init__(
        self,
        transformer: Transformer,
        labels: int,
        pooling: Pooling = "mean",
        regression: bool = False,
        pooler: Activation | None = None,
    ) -> None:
        super().__init__(transformer)
        if regression and labels != 1:
            fix = "Give labels=1, or leave regression out."
            raise UsageError("labels of a regression", given=labels, expected="1", fix=fix)
        self.pooling, self.regression, self.width = pooling, regression, labels
        self.agreement = "pearson" if regression else "agreement"
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
        summary = pooled(self.transformer(inputs, mask, segments), mask, self.pooling)
        if self.pooler is not None:
            summary = _ACTIVATIONS[self.activation](self.pooler(summary))
        logits: Tensor = self.classifier(summary)
        return logits

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy to classes [N], or the mean squared error to values [N]."""
        if self.regression:
            return functional.mse_loss(outputs[:, 0], targets)
        return functional.cross_entropy(outputs, targets)

    def imitation(self, outputs: Tensor, teacher: Tensor, temperature: float) -> Tensor:
        """Return the squared error of scores, or the divergence of logits."""
        return functional.mse_loss(outputs, teacher) if self.regression else _divergence(outputs, teacher, temperature)

    def postprocess(self, labels: tuple[str, ...]) -> Postprocess:
        """Return the step for the score, or the label."""
        if self.regression:
            return ScorePostprocess(logits=self.outputs[0], output=SCORE)
        return LabelPostprocess(logits=self.outputs[0], output="label", labels=labels)

    def answers(self, outputs: Sequence[Tensor]) -> Array:
        """Return scores or classes, [n]."""
        stacked = torch.stack(list(outputs))
        return (stacked[:, 0] if self.regression else stacked.argmax(dim=1)).numpy()


class TokenClassifier(Head):
    """A linear layer over each token."""

    by_token: ClassVar[bool] = True

    def __init__(self, transformer: Transformer, labels: int) -> None:
        super().__init__(transformer)
        self.width, self.classifier = labels, nn.Linear(transformer.config.dim, labels)

    def forward(self, inputs: Tensor, mask: Tensor | None = None, segments: Tensor | None = None) -> Tensor:
        """Return the logits [N, T, labels], which are 0 for padding."""
        logits: Tensor = self.classifier(self.transformer(inputs, mask, segments))
        return logits if mask is None else logits * mask[:, :, None].to(logits.dtype)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy to classes [N, T] over the tokens that have one, not :data:`NO_LABEL`."""
        return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=NO_LABEL)

    def postprocess(self, labels: tuple[str, ...]) -> Postprocess:
        """Return the step for the label of each token."""
        return TokenLabelPostprocess(logits=self.outputs[0], output="labels", labels=labels)

    def answers(self, outputs: Sequence[Tensor]) -> Array:
        """Return the class of each token, [n, T]."""
        return pad_sequence([logits.argmax(dim=1) for logits in outputs], True, NO_LABEL).numpy()

    def agreements(self, answers: Array, others: Array) -> Array:
        """Return the share of equal labels, [n]; 1 for a text without any."""
        counted = others != NO_LABEL
        tokens = counted.sum(axis=1)
        return np.where(tokens, ((answers == others) & counted).sum(axis=1) / np.maximum(tokens, 1), 1.0)


class SpanClassifier(Head):
    """Start and end of a span: two logits for each token, padding included.

    Args:
        no_answer: whether some questions have none: the span is then the first token alone, the summary.
    """

    outputs: ClassVar[tuple[str, ...]] = ("start_logits", "end_logits")
    by_token: ClassVar[bool] = True
    padding: ClassVar[float] = -1e4  # exp() of it is 0

    def __init__(self, transformer: Transformer, *, no_answer: bool = False) -> None:
        super().__init__(transformer)
        self.width, self.classifier = 2, nn.Linear(transformer.config.dim, 2)
        self.no_answer = no_answer

    def postprocess(self, labels: tuple[str, ...] = ()) -> SpanPostprocess:
        """Return the step for the likeliest spans of the context."""
        start_logits, end_logits = self.outputs
        return SpanPostprocess(
            start_logits=start_logits,
            end_logits=end_logits,
            answer="answer",
            score="score",
            start="start",
            end="end",
            most_tokens=LONGEST_ANSWER,
            no_answer=self.no_answer,
        )

    def forward(
        self, inputs: Tensor, mask: Tensor | None = None, segments: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the logits of a span's first and last token, [N, T] each."""
        logits = self.classifier(self.transformer(inputs, mask, segments))  # [N, T, 2]
        return logits[..., 0], logits[..., 1]

    def loss(self, outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
        """Return the mean cross entropy to the positions of the first and of the last token, [N, 2]."""
        start, end = (functional.cross_entropy(*pair) for pair in zip(outputs, targets.unbind(dim=1), strict=True))
        return (start + end) / 2

    def imitation(self, outputs: tuple[Tensor, Tensor], teacher: tuple[Tensor, Tensor], temperature: float) -> Tensor:
        """Return the mean of both divergences."""
        start, end = (_divergence(*pair, temperature) for pair in zip(outputs, teacher, strict=True))
        return (start + end) / 2

    def joined(self, outputs: Sequence[Tensor]) -> Outputs:
        """Return the logits of first and last tokens."""
        return outputs[0], outputs[1]

    def answers(self, outputs: Sequence[tuple[Tensor, Tensor]]) -> Array:
        """Return first and last tokens, [n, 2]."""
        return np.array([[int(logits.argmax()) for logits in span] for span in outputs])

    def agreements(self, answers: Array, others: Array) -> Array:
        """Return 1 where both tokens are equal, else 0, [n]."""
        return np.asarray((answers == others).all(axis=1), dtype=np.float64)


class DenseShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A linear layer of an embedder, to ``width``, and the activation behind it."""

    width: int
    activation: Activation = "identity"
    bias: bool = True


class Embedding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What follows the pooling of an embedder: dense layers, and with ``normalised`` a division by the length."""

    dense: tuple[DenseShape, ...] = ()
    normalised: bool = False


class SentenceEmbedder(Head):
    """One vector for the whole sequence, whose angles to others tell how similar their meanings are."""

    outputs: ClassVar[tuple[str, ...]] = ("embedding",)
    agreement: str = "cosine"

    def __init__(self, transformer: Transformer, pooling: Pooling, embedding: Embedding) -> None:
        super().__init__(transformer)
        self.pooling, self.embedding = pooling, embedding
        widths = [transformer.config.dim, *(layer.width for layer in embedding.dense)]
        self.width = widths[-1]
        self.dense = nn.ModuleList(
            nn.Linear(before, layer.width, bias=layer.bias)
            for before, layer in zip(widths[:-1], embedding.dense, strict=True)
        )

    def forward(self, inputs: Tensor, mask: Tensor | None = None, segments: Tensor | None = None) -> Tensor:
        """Return the embeddings [N, width]; see :meth:`SequenceClassifier.forward`."""
        embedding = pooled(self.transformer(inputs, mask, segments), mask, self.pooling)
        for layer, shape in zip(self.dense, self.embedding.dense, strict=True):
            embedding = _ACTIVATIONS[shape.activation](layer(embedding))
        if not self.embedding.normalised:
            return embedding
        length = torch.linalg.vector_norm(embedding, dim=1, keepdim=True)
        # Not clamp(), which becomes Clip without a maximum, about which TensorRT warns in FP16.
        return embedding / torch.maximum(length, torch.full_like(length, 1e-12))

    def fingerprint(self) -> str:
        """Return a name for the space of the embeddings: a SHA-256, cut short, of weights, pooling and what follows."""
        after = [self.pooling, self.embedding.normalised, *(layer.activation for layer in self.embedding.dense)]
        digest = hashlib.sha256(json.dumps(after).encode())
        for name, tensor in sorted(self.state_dict().items()):
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
            digest.update(tensor.numpy(force=True).tobytes())
        return digest.hexdigest()[:16]

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean squared distance to embeddings [N, width]."""
        return (outputs - targets).square().sum(dim=1).mean()

    def imitation(self, outputs: Tensor, teacher: Tensor, temperature: float) -> Tensor:
        """Return the loss; there is no temperature."""
        return self.loss(outputs, teacher)

    def answers(self, outputs: Sequence[Tensor]) -> Array:
        """Return the embeddings, [n, width]."""
        return torch.stack(list(outputs)).numpy()

    def agreements(self, answers: Array, others: Array) -> Array:
        """Return the cosines, [n]."""
        lengths = np.linalg.norm(answers, axis=1) * np.linalg.norm(others, axis=1)
        return np.asarray((answers * others).sum(axis=1) / lengths)


def tensors_of(outputs: Outputs) -> tuple[Tensor, ...]:
    """Return the outputs of a head in the order of their names; the inverse of :meth:`Head.joined`."""
    return (outputs,) if isinstance(outputs, Tensor) else outputs


def _divergence(logits: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    student, target = (functional.log_softmax(values / temperature, dim=-1) for values in (logits, teacher))
    return temperature**2 * functional.kl_div(student, target, reduction="batchmean", log_target=True)


def pooled(hidden: Tensor, mask: Tensor | None, pooling: Pooling) -> Tensor:
    """Return one vector for each sequence, [N, d], of hidden states [N, T, d]: the first, or the mean of the tokens."""
    if pooling == "summary":
        return hidden[:, 0]
    if mask is None:
        return hidden.mean(dim=1)
    weights = mask.to(hidden.dtype)
    weights = weights / weights.sum(dim=1, keepdim=True).clamp(min=1)  # [N, T]
    # A product, not a sum over tokens: it cannot overflow in FP16, and every runtime adds it up in FP32.
    return (weights[:, None] @ hidden)[:, 0]
