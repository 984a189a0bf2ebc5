"""Removal of heads or hidden units, with the rest adjusted to compensate.

Both are the same problem: y = z W + b for inputs z [w] with covariance C, some of which are removed. Their means move
into b. The others get new weights by least squares, and the loss of removing group j next is that of optimal brain
surgery: L_j = tr(W_jᵀ ([P]_jj)^-1 W_j), with P = C^-1 and W of the remaining inputs. ZipLM, arXiv 2302.04089, does so
with second moments instead of covariances and means.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from export.reduce.algebra import RIDGE, regularised

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


def kept_columns(width: int, kept: tuple[int, ...], group: int = 1) -> Tensor:
    """Return the columns of the identity [w, w] that belong to the kept groups of ``group`` inputs each."""
    columns = [index * group + offset for index in kept for offset in range(group)]
    return torch.eye(width, dtype=torch.float64)[:, columns]
