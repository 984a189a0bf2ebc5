"""Smaller heads in closed form, and the removal of heads or hidden units with the rest adjusted.

A width r < d_k is a change of basis that keeps the coordinates with the most signal.

The weights alone do not tell which r coordinates of a head to keep: q·k stays the same when q is multiplied by any
invertible matrix and k by its inverse transposed, so that a slice of coordinates is a random projection. These are the
best rank-r factors for given statistics; they are exact for r = d_k:

- queries and keys: S_q^½ S_k^½ = U Σ Vᵀ, F = S_q^-½ U_r Σ_r^½, G = S_k^-½ V_r Σ_r^½; W_Q F and W_K G have the least
  mean squared error of the logits over pairs of tokens, Σ_{i>r} σ_i²
- values and output: C^½ W_O = U Σ Vᵀ, E = C^-½ U_r; W_V E with W_O' = Σ_r V_rᵀ has the least mean squared error of
  the head's output, Σ_{i>r} σ_i²

S_q = E[q qᵀ], S_k and C are covariances of keys and of the head's output. With statistics of real inputs this is A3
(arXiv 2505.12942). Everything is float64, and the first dimension of these tensors is the head, H.

The removal of heads and that of hidden units are the same problem: y = z W + b for inputs z [w] with covariance C, some
of which are removed. Their means move into b. The others get new weights by least squares, and the loss of removing
group j next is that of optimal brain surgery: L_j = tr(W_jᵀ ([P]_jj)^-1 W_j), with P = C^-1 and W of the remaining
inputs. ZipLM, arXiv 2302.04089, does so with second moments instead of covariances and means.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

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


#: Columns of P that are subtracted at once: a matrix product of so many is faster than as many products of one.
_BLOCK = 64


class Removal(NamedTuple):
    """An order of removal; any start of it is a choice.

    Attributes:
        order: all indices, the most dispensable first.
        errors: mean squared error of the output after each removal, [w + 1] with a 0 first; with the ridge's share.
    """

    order: tuple[int, ...]
    errors: Tensor

    def kept(self, number: int) -> tuple[int, ...]:
        """Return the ``number`` indices that stay, ascending."""
        return tuple(sorted(self.order[len(self.order) - number :]))


def head_removal(C: Tensor, W_O: Tensor, heads: int) -> Removal:
    """Return the greedy order of heads for their covariance C [H * d_k, H * d_k] and W_O [H * d_k, d]."""
    P, W = torch.linalg.inv(regularised(C)), W_O.clone()
    width = len(C) // heads
    left, order, errors = list(range(heads)), [], [0.0]
    while left:
        losses = {}
        for head in left:
            rows = slice(head * width, (head + 1) * width)
            losses[head] = float((W[rows] * torch.linalg.solve(P[rows, rows], W[rows])).sum())
        head = min(left, key=losses.__getitem__)
        rows = slice(head * width, (head + 1) * width)
        # The rows of a removed head stay behind as zeros, and are never looked at again.
        step = torch.linalg.solve(P[rows, rows], P[rows, :]).T  # [H * d_k, d_k]
        W = W - step @ W[rows]
        P = P - step @ P[rows, :]
        left.remove(head)
        order.append(head)
        errors.append(errors[-1] + losses[head])
    return Removal(tuple(order), torch.tensor(errors))


def removal_of(C: Tensor, W: Tensor, groups: int) -> Removal:
    """Return the greedy order of heads or, where each group is one input, of hidden units."""
    return neuron_removal(C, W) if groups == len(C) else head_removal(C, W, groups)


def neuron_removal(A: Tensor, W_2: Tensor) -> Removal:
    """Return the greedy order of hidden units for their covariance A [f, f] and W_2 [f, d].

    The inverse is updated once in :data:`_BLOCK` steps by a matrix product, and only the column that is needed in
    between: 1536 units take seconds, where an update at each step takes a minute.
    """
    P, W = torch.linalg.inv(regularised(A)), W_2.clone()
    units = torch.arange(len(A))  # which units the rows of P and W belong to
    order: list[int] = []
    errors = [0.0]
    while len(units):
        steps = min(_BLOCK, len(units))
        U = torch.zeros(len(units), steps, dtype=P.dtype)  # P now is P - U Uᵀ
        V = torch.zeros(steps, W.shape[1], dtype=P.dtype)  # W now is W - U V
        variance, norms = P.diagonal().clone(), W.square().sum(dim=1)
        gone = torch.zeros(len(units), dtype=torch.bool)
        for step in range(steps):
            losses = torch.where(gone, torch.inf, norms / variance)
            row = int(losses.argmin())
            gone[row] = True
            order.append(int(units[row]))
            errors.append(errors[-1] + float(losses[row]))
            before = slice(0, step)
            u = (P[:, row] - U[:, before] @ U[row, before]) / variance[row].sqrt()
            v = (W[row] - U[row, before] @ V[before]) / variance[row].sqrt()
            # ‖w - u v‖² of every row w, and of the diagonal, without touching the matrices
            norms = norms - 2 * u * (W @ v - U[:, before] @ (V[before] @ v)) + u.square() * v.square().sum()
            variance = variance - u.square()
            U[:, step], V[step] = u, v
        stay = ~gone
        U, units = U[stay], units[stay]
        P, W = P[stay][:, stay] - U @ U.T, W[stay] - U @ V
    return Removal(tuple(order), torch.tensor(errors))


def least_squares(C: Tensor, W: Tensor, B: Tensor, ridge: float = RIDGE) -> Tensor:
    """Return W' [r, d] such that z B W' is nearest to z W: (Bᵀ C B)^-1 Bᵀ C W.

    Args:
        C: covariance of z, [w, w]; the ridge counts as part of it, so that an invertible B loses nothing.
        W: [w, d].
        B: the kept part of z, [w, r]: some columns of the identity, or a smaller basis.
    """
    CB = regularised(C, ridge) @ B
    W_small: Tensor = torch.linalg.solve(B.T @ CB, CB.T @ W)
    return W_small


def output_error(C: Tensor, W: Tensor, B: Tensor, W_small: Tensor) -> float:
    """Return E‖(z - E[z]) (W - B W')‖², the error of W' when the means are in the bias; letters as above."""
    D = W - B @ W_small
    return float((D * (C @ D)).sum())


class Fit(NamedTuple):
    """A projection z W + b whose z has become z B.

    Attributes:
        weight: W', [r, d].
        shift: what b takes up of the mean of z, [d].
        error: mean squared error of the output over its variance, or over its mean square for statistics about zero.
    """

    weight: Tensor
    shift: Tensor
    error: float

    @classmethod
    def of(cls, W: Tensor, B: Tensor, weight: Tensor, mean: Tensor, C: Tensor) -> Fit:
        """Return the fit of a weight for the mean that is known of z and its covariance, which measures the error."""
        whole = float((W * (C @ W)).sum())
        return cls(weight, mean @ (W - B @ weight), output_error(C, W, B, weight) / whole if whole > 0 else 0.0)


def kept_columns(width: int, kept: tuple[int, ...], group: int = 1) -> Tensor:
    """Return the columns of the identity [w, w] that belong to the kept groups of ``group`` inputs each."""
    columns = [index * group + offset for index in kept for offset in range(group)]
    return torch.eye(width, dtype=torch.float64)[:, columns]
