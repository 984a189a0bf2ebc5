"""Backward attention, the head of paper 004: from the logits z of a frozen language model to better ones.

The tokens of the vocabulary attend to each other. Their keys and values come from the model's frozen embeddings E, and
the query at a position from the mean of the values under the model's own probabilities:

    X = g ⊙ E / rms(E),   K = X W_K,   U = X W_V
    p_h = softmax(z / τ_h),   q = [p_1 U_1, …, p_H U_H] W_Q,   s = Σ_h q_h K_hᵀ / √d_h,   z' = z + α s

α starts at 0, so that a new head is exactly the model. It is then the only parameter with a gradient; the others have
one as soon as it has moved. Several layers follow one another, each with parameters of its own. Each layer adds to the
logits a linear map of rank d of the probabilities.

Variations, each for comparison: X W_L with W_L of r columns in place of X, no z in z', means divided by V, means of the
k most likely tokens alone, and dropout of probabilities. Without z, α starts at 1, and the logits have rank d.

The paper itself has another form, ``literal``. There, the weights of the values are the logits divided by V. With
probabilities instead, s would be of the size of 1 / V, for GPT-2 2e-5 at most, and its softmax uniform. What the head
returns is softmax(s), without z, which the paper passes to the cross-entropy as if it were logits. Such a loss is
bounded whatever is learnt:

    ln((e + V - 1) / e)  ≤  CE  ≤  ln(e + V - 1)

The upper bound is reached with probability 1 on a wrong token: the sum of exponentials is convex, so that it is largest
in a corner of the simplex. The lower one has probability 1 on the right token: the loss falls as its probability
grows. For GPT-2, V = 50,257, it lies between 9.825 and 10.825, and a uniform guess has 10.825.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from edge.errors import Raw, UsageError

#: Added to the mean square of an embedding.
_EPS = 1e-8


class HeadConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of a head.

    Attributes:
        vocabulary: V, the tokens of the language model.
        width: of its embeddings.
        dims: d, of the keys and values of all heads together.
        heads: H, which share d; each learns a temperature if there is more than one.
        form: ``literal`` is the paper's own; ``alone`` is without the residual z.
        latent: r, the width between embeddings and both keys and values; None has no such projection.
        divided: whether the mean of the values is divided by V, as in the paper.
        top_k: tokens whose probabilities count, renormalised; 0 is all.
        dropout: share of the probabilities that a training leaves out.
    """

    vocabulary: int
    width: int
    dims: int
    heads: int = 1
    layers: int = 1
    form: Literal["residual", "alone", "literal"] = "residual"
    latent: int | None = None
    divided: bool = False
    top_k: int = 0
    dropout: float = 0.0

    def __post_init__(self) -> None:
        """Raise a UsageError if the shape is impossible."""
        least = dict.fromkeys(("vocabulary", "width", "dims", "heads", "layers"), 1) | {"latent": 1, "top_k": 0}
        for name, smallest in least.items():
            if (value := getattr(self, name)) is not None and value < smallest:
                raise _wrong(name, value, f"at least {smallest}", f"Give a larger {name}.")
        if not 0 <= self.dropout < 1:
            raise _wrong("dropout", self.dropout, "a share from 0 to below 1", "Give 0.1, for example.")
        if self.dims % self.heads:
            raise _wrong("heads", self.heads, f"a divisor of the {self.dims} dims", "Give other heads or dims.")
        if self.form == "literal" and (self.heads, self.layers) != (1, 1):
            given = Raw(f"{self.heads} heads and {self.layers} layers")
            raise _wrong("form literal", given, "one head and one layer, as in the paper", "Give the form residual.")


class BackwardAttention(nn.Module):
    """One layer; its parameters are named after the W of the module's equations."""

    alpha: Tensor
    latent: nn.Parameter | None
    log_temperature: Tensor | None

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        self.gain = nn.Parameter(torch.ones(config.width))
        self.latent = _matrix(config.width, config.latent) if config.latent else None
        self.key = _matrix(config.latent or config.width, config.dims)
        self.value = _matrix(config.latent or config.width, config.dims)
        self.query = _matrix(config.dims, config.dims)
        if config.form != "literal":
            self.alpha = nn.Parameter(torch.zeros(()) if config.form == "residual" else torch.ones(()))
        self.log_temperature = nn.Parameter(torch.zeros(config.heads)) if config.heads > 1 else None

    @property
    def temperatures(self) -> Tensor:
        """τ, [H]."""
        return self.gain.new_ones(1) if self.log_temperature is None else self.log_temperature.exp()

    @property
    def scale(self) -> float:
        """1 / √d_h."""
        return 1 / math.sqrt(self.config.dims // self.config.heads)

    def forward(self, logits: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Return z' [N, V] for z [N, V]; in the literal form, softmax(s)."""
        config = self.config
        if config.form == "literal":
            query = logits @ values / config.vocabulary @ self.query
            return functional.softmax(self.scale * query @ keys.T, dim=1)
        by_head, dropout = split_heads(values, config.heads), config.dropout if self.training else 0.0
        # The backward pass computes the probabilities again: they are as large as the logits, for each head.
        means = [
            checkpoint(_mean, logits, *pair, config.top_k, dropout, use_reentrant=False)
            for pair in zip(self.temperatures, by_head, strict=True)
        ]
        query = self.scaled_query(torch.cat(means, dim=1))
        # The sum over heads is one product, and it needs no memory beside its result.
        return query @ keys.T if config.form == "alone" else torch.addmm(logits, query, keys.T)

    def scaled_query(self, mean: Tensor) -> Tensor:
        """Return α q / √d_h [N, d], whose product with the keys is α s, of the mean of the values [N, d]."""
        return self.alpha * self.scale * (mean @ self.query) / (self.config.vocabulary if self.config.divided else 1)


class BackwardHead(nn.Module):
    """A head on a frozen language model; see the module.

    The embeddings are no weights of the head: they are neither trained nor in its ``state_dict``.

    Args:
        embeddings: of the language model, [V, E].
    """

    embeddings: Tensor
    inverse_rms: Tensor

    def __init__(self, config: HeadConfig, embeddings: Tensor) -> None:
        super().__init__()
        self.config = config
        embeddings = embeddings.detach().float()
        self.register_buffer("embeddings", embeddings, persistent=False)
        inverse_rms = (embeddings.square().mean(dim=1, keepdim=True) + _EPS).rsqrt()
        self.register_buffer("inverse_rms", inverse_rms, persistent=False)
        self.layers = nn.ModuleList(BackwardAttention(config) for _ in range(config.layers))

    def forward(self, logits: Tensor, hidden: Tensor | None = None) -> Tensor:
        """Return z' [..., V] in FP32 for z [..., V], or in the literal form a distribution over the vocabulary.

        Args:
            hidden: unused, as most modules on logits do not need the last hidden states.
        """
        rows = logits.float().flatten(0, -2)
        for layer, keys_and_values in zip(self.layers, self.keys_and_values(), strict=True):
            rows = layer(rows, *keys_and_values)
        return rows.reshape(logits.shape)

    @property
    def attentions(self) -> list[BackwardAttention]:
        """The layers, with their type."""
        return [layer for layer in self.layers if isinstance(layer, BackwardAttention)]

    def keys_and_values(self) -> list[tuple[Tensor, Tensor]]:
        """Return K and U of each layer, [V, d] each."""
        return [(self._project(layer, layer.key), self._project(layer, layer.value)) for layer in self.attentions]

    @property
    def parameter_count(self) -> int:
        """Number of trainable parameters."""
        return sum(parameter.numel() for parameter in self.parameters())

    def _project(self, layer: BackwardAttention, matrix: Tensor) -> Tensor:
        matrix = matrix if layer.latent is None else layer.latent @ matrix
        # Normalised after the product, and the gain on the matrix, so that there is no second [V, E].
        return self.inverse_rms * (self.embeddings @ (layer.gain[:, None] * matrix))


def create(embeddings: Tensor, **arguments: Any) -> BackwardHead:
    """Return a head with random weights, from the embeddings and the fields of its configuration."""
    try:
        return BackwardHead(msgspec.convert(arguments["config"], HeadConfig), embeddings)
    except (KeyError, msgspec.ValidationError) as error:
        raise TypeError(str(error)) from None  # export.training.checkpoint expects this of wrong arguments


def _mean(logits: Tensor, temperature: Tensor, values: Tensor, top_k: int, dropout: float) -> Tensor:
    chosen, tokens = logits.topk(min(top_k, logits.shape[1]), dim=1) if top_k else (logits, None)
    probabilities = functional.softmax(chosen / temperature, dim=1)
    if dropout:
        probabilities = functional.dropout(probabilities, dropout)
    return probabilities @ values if tokens is None else torch.einsum("nk,nkd->nd", probabilities, values[tokens])


def split_heads(matrix: Tensor, heads: int) -> Tensor:
    """Return [V, d] as [H, V, d_h]."""
    return torch.unflatten(matrix, 1, (heads, -1)).transpose(0, 1)


def _matrix(inputs: int, outputs: int) -> nn.Parameter:
    # With it, each product keeps the variance, so that s has about unit variance where the model is sure of a token.
    return nn.Parameter(torch.randn(inputs, outputs) / math.sqrt(inputs))


def _wrong(name: str, given: object, expected: str, fix: str) -> UsageError:
    return UsageError(f"{name} of a backward head", given=given, expected=expected, fix=fix)
