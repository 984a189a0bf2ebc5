"""Heads of a smaller width r < d_k, in closed form: a change of basis that keeps the coordinates with the most signal.

The weights alone do not tell which r coordinates of a head to keep: q·k stays the same when q is multiplied by any
invertible matrix and k by its inverse transposed, so that a slice of coordinates is a random projection. These are the
best rank-r factors for given statistics; they are exact for r = d_k:

- queries and keys: S_q^½ S_k^½ = U Σ Vᵀ, F = S_q^-½ U_r Σ_r^½, G = S_k^-½ V_r Σ_r^½; W_Q F and W_K G have the least
  mean squared error of the logits over pairs of tokens, Σ_{i>r} σ_i²
- values and output: C^½ W_O = U Σ Vᵀ, E = C^-½ U_r; W_V E with W_O' = Σ_r V_rᵀ has the least mean squared error of
  the head's output, Σ_{i>r} σ_i²

S_q = E[q qᵀ], S_k and C are covariances of keys and of the head's output. With statistics of real inputs this is A3
(arXiv 2505.12942). With those of :func:`weight_statistics`, which assume white noise as input, it is the truncated SVD
of W_Q W_Kᵀ and W_V W_O. Everything is float64, and the first dimension of every tensor is the head, H.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from export.models.attention import MultiHeadAttention
from export.reduce.calibration import AttentionStatistics

#: Added to covariances, in units of their mean variance, so that rarely used directions are not amplified.
RIDGE = 1e-4
#: For covariances of zero, as of a head with a constant output.
_FLOOR = 1e-12


class Factors(NamedTuple):
    """Projections that make heads smaller.

    Attributes:
        left: F or E, [H, d_k, r].
        right: G [H, d_k, r], or W_O' [H, r, d].
        error: Σ_{i>r} σ_i² of each head, [H].
    """

    left: Tensor
    right: Tensor
    error: Tensor


def query_key_factors(S_q: Tensor, S_k: Tensor, rank: int, ridge: float = RIDGE) -> Factors:
    """Return F, G and the mean squared error of the unscaled logits.

    Args:
        S_q: second moment of the queries, [H, d_k, d_k].
        S_k: covariance of the keys, [H, d_k, d_k].
        rank: r, 1 to d_k.
    """
    q_root, q_inverse = _roots(regularised(S_q, ridge))
    k_root, k_inverse = _roots(regularised(S_k, ridge))
    U, sigma, Vh = torch.linalg.svd(q_root @ k_root)
    balance = sigma[:, None, :rank].sqrt()
    F = q_inverse @ U[:, :, :rank] * balance
    G = k_inverse @ Vh.transpose(1, 2)[:, :, :rank] * balance
    return Factors(F, G, sigma[:, rank:].square().sum(dim=1))


def value_output_factors(C: Tensor, W_O: Tensor, rank: int, ridge: float = RIDGE) -> Factors:
    """Return E, W_O' and the mean squared error of each head's output, summed over its d coordinates.

    Args:
        C: covariance of each head's output, [H, d_k, d_k].
        W_O: [H, d_k, d].
        rank: r, 1 to d_k.
    """
    root, inverse = _roots(regularised(C, ridge))
    U, sigma, Vh = torch.linalg.svd(root @ W_O, full_matrices=False)
    E = inverse @ U[:, :, :rank]
    return Factors(E, sigma[:, :rank, None] * Vh[:, :rank], sigma[:, rank:].square().sum(dim=1))


def weight_statistics(attention: MultiHeadAttention) -> AttentionStatistics:
    """Return the statistics for white noise as input and heads that return their values unchanged.

    With them, the reduction is the truncated SVD of the weights, the baseline for calibration.
    """
    W_Q, W_K, W_V = (
        heads_of(projection.weight, attention.num_heads)
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    S_q, S_k, C = (W.transpose(1, 2) @ W for W in (W_Q, W_K, W_V))
    return AttentionStatistics(S_q, S_k, blocks(C), torch.zeros(len(C) * C.shape[1], dtype=C.dtype))


def sliced(heads: int, head_dim: int, rank: int) -> Tensor:
    """Return the basis that keeps the first coordinates of each head, [H, d_k, r], as a baseline."""
    return torch.eye(head_dim, rank, dtype=torch.float64).expand(heads, -1, -1)


def heads_of(weight: Tensor, heads: int) -> Tensor:
    """Return W [H, d, d_k] of a projection to heads, whose weight is stored transposed, [H * d_k, d]."""
    return torch.unflatten(weight.detach().to("cpu", torch.float64), 0, (heads, -1)).transpose(1, 2)


def joined(W: Tensor) -> Tensor:
    """Return the matrix [d, H * r] of all heads for W [H, d, r], the inverse of :func:`heads_of`."""
    return W.transpose(0, 1).flatten(1)


def fill(linear: nn.Linear, weight: Tensor, bias: Tensor) -> None:
    """Set the weights of a layer x W + b, W [in, out]."""
    with torch.no_grad():
        linear.weight.copy_(weight.T)
        linear.bias.copy_(bias)


def blocks(parts: Tensor) -> Tensor:
    """Return the matrix [H * a, H * b] that has ``parts`` [H, a, b] on its diagonal and is zero elsewhere."""
    heads, rows, columns = parts.shape
    matrix = torch.zeros(heads, rows, heads, columns, dtype=parts.dtype)
    matrix[torch.arange(heads), :, torch.arange(heads)] = parts
    return matrix.reshape(heads * rows, heads * columns)


def regularised(covariance: Tensor, ridge: float = RIDGE) -> Tensor:
    """Return covariances [..., w, w] with ``ridge`` times their mean variance added to every variance."""
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    added = ridge * variance.mean(dim=-1, keepdim=True) + _FLOOR
    return covariance + torch.diag_embed(added.expand_as(variance))


def _roots(covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Return the square root of covariances [H, w, w] and its inverse."""
    values, vectors = torch.linalg.eigh(covariance)
    roots = values.clamp(min=_FLOOR).sqrt()[:, None, :]
    return vectors * roots @ vectors.transpose(1, 2), vectors / roots @ vectors.transpose(1, 2)
