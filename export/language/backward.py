"""Backward attention, the head of paper 004: from the logits z of a frozen language model to better ones.

The tokens of the vocabulary attend to each other. Their keys and values come from the model's frozen embeddings E, and
the query at a position from the mean of the values under the model's own probabilities:

    X = g ⊙ E / rms(E),   L = X W_L  or  silu(X W_G) ⊙ X W_L,   K = L W_K,   U = L W_V
    p_h = softmax(z / τ_h),   q = [p_1 U_1, …, p_H U_H] W_Q,   s = Σ_h q_h K_hᵀ / √d_h,   z' = z + α s

Without a latent projection, L is X. α starts at 0, so that a new head is exactly the model. It is then the only
parameter with a gradient; the others have one as soon as it has moved. Several layers follow one another, each with
parameters of its own. Each layer adds to the logits a linear map of rank d of the probabilities.

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
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional

from edge.errors import Raw, UsageError
from export.papers.backward.head import HeadConfig, weighted_means

#: Added to the mean square of an embedding.
_EPS = 1e-8


class BackwardAttention(nn.Module):
    """One layer; its parameters are named after the W of the module's equations."""

    alpha: Tensor
    log_temperature: Tensor | None

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        inputs = config.latent or config.width
        self.gain = nn.Parameter(torch.ones(config.width))
        self.latent = _matrix(config.width, config.latent) if config.latent else None
        self.gate = _matrix(config.width, config.latent) if config.latent and config.gated else None
        self.key = _matrix(inputs, config.dims)
        self.value = _matrix(inputs, config.dims)
        self.query = _matrix(config.dims, config.dims)
        if config.form == "residual":
            self.alpha = nn.Parameter(torch.zeros(()))
        self.log_temperature = nn.Parameter(torch.zeros(config.heads)) if config.heads > 1 else None

    @property
    def temperatures(self) -> Tensor:
        """τ, [H]."""
        return self.gain.new_ones(1) if self.log_temperature is None else self.log_temperature.exp()

    @property
    def scale(self) -> float:
        """1 / √d_h."""
        return 1 / math.sqrt(self.config.dims // self.config.heads)

    def keys_and_values(self, project: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Return K and U, [V, d] each, where ``project`` multiplies the normalised embeddings by a matrix."""

        def projected(matrix: Tensor) -> Tensor:
            return project(self.gain[:, None] * matrix)  # the gain costs less here than on [V, E]

        if self.latent is None:
            return projected(self.key), projected(self.value)
        latent = projected(self.latent)
        if self.gate is not None:
            latent = functional.silu(projected(self.gate)) * latent
        return latent @ self.key, latent @ self.value

    def forward(self, logits: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Return z' [N, V] for z [N, V]; in the literal form, softmax(s)."""
        if self.config.form == "literal":
            query = logits @ values / self.config.vocabulary @ self.query
            return functional.softmax(self.scale * query @ keys.T, dim=1)
        by_head = split_heads(values, self.config.heads)
        means = weighted_means(logits, self.temperatures, by_head, self.config.chunk_bytes)
        query = means.transpose(0, 1).flatten(1) @ self.query
        # The sum over heads is one product, and it needs no memory beside its result.
        return torch.addmm(logits, self.alpha * self.scale * query, keys.T)


class BackwardHead(nn.Module):
    """A head on a frozen language model; see the module.

    The embeddings are no weights of the head: they are neither trained nor in its ``state_dict``.

    Args:
        embeddings: of the language model, [V, E].

    Raises:
        UsageError: the embeddings have another shape.
    """

    embeddings: Tensor
    inverse_rms: Tensor

    def __init__(self, config: HeadConfig, embeddings: Tensor) -> None:
        super().__init__()
        if embeddings.shape != (config.vocabulary, config.width):
            expected = f"[{config.vocabulary}, {config.width}], vocabulary and width of the head"
            raise _misshapen("embeddings", embeddings, expected)
        self.config = config
        embeddings = embeddings.detach().float()
        self.register_buffer("embeddings", embeddings, persistent=False)
        inverse_rms = (embeddings.square().mean(dim=1, keepdim=True) + _EPS).rsqrt()
        self.register_buffer("inverse_rms", inverse_rms, persistent=False)
        self.layers = nn.ModuleList(BackwardAttention(config) for _ in range(config.layers))

    def forward(self, logits: Tensor) -> Tensor:
        """Return z' [..., V] in FP32 for z [..., V], or in the literal form a distribution over the vocabulary.

        Raises:
            UsageError: the last dimension of z is not V.
        """
        if logits.shape[-1:] != (self.config.vocabulary,):
            expected = f"[..., {self.config.vocabulary}], for the vocabulary of the head"
            raise _misshapen("logits", logits, expected)
        rows = logits.float().reshape(-1, self.config.vocabulary)
        for layer, keys_and_values in zip(self.layers, self.keys_and_values(), strict=True):
            rows = layer(rows, *keys_and_values)
        return rows.reshape(logits.shape)

    @property
    def attentions(self) -> list[BackwardAttention]:
        """The layers, with their type."""
        return [layer for layer in self.layers if isinstance(layer, BackwardAttention)]

    def keys_and_values(self) -> list[tuple[Tensor, Tensor]]:
        """Return K and U of each layer, [V, d] each."""
        return [layer.keys_and_values(self._project) for layer in self.attentions]

    @property
    def parameter_count(self) -> int:
        """Number of trainable parameters."""
        return sum(parameter.numel() for parameter in self.parameters())

    def _project(self, matrix: Tensor) -> Tensor:
        # Normalised after the product, so that there is no second [V, E].
        return self.inverse_rms * (self.embeddings @ matrix)


def create(embeddings: Tensor, **arguments: Any) -> BackwardHead:
    """Return a head with random weights, from the embeddings and the fields of its configuration."""
    try:
        return BackwardHead(msgspec.convert(arguments["config"], HeadConfig), embeddings)
    except (KeyError, msgspec.ValidationError) as error:
        raise TypeError(str(error)) from None  # export.training.checkpoint expects this of wrong arguments


def split_heads(matrix: Tensor, heads: int) -> Tensor:
    """Return [V, d] as [H, V, d_h]."""
    return torch.unflatten(matrix, 1, (heads, -1)).transpose(0, 1)


def _matrix(inputs: int, outputs: int) -> nn.Parameter:
    # With it, each product keeps the variance, so that s has about unit variance where the model is sure of a token.
    return nn.Parameter(torch.randn(inputs, outputs) / math.sqrt(inputs))


def _misshapen(name: str, tensor: Tensor, expected: str) -> UsageError:
    given, fix = Raw(f"the shape {list(tensor.shape)}"), "Give the head's own language model."
    return UsageError(f"{name} of a backward head", given=given, expected=expected, fix=fix)
