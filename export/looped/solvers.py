"""Running a looped model as an iterative solver: for many loops, until its state settles, or with acceleration.

The state's change is that of the last two tokens, the last pair's value and the point to predict:
‖Y_(t+1) - Y_t‖ / ‖Y_(t+1)‖. The served model reports the same number as its residual.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from edge.datatypes import Array
from export.papers.looped.model import PromptTransformer

#: Tokens whose change is the residual.
RESIDUAL_TOKENS = 2
#: Keeps normal equations solvable where a state no longer changes.
_TINY = 1e-30


class Trajectory(NamedTuple):
    """Predictions [t, N] at the last point after each loop, and the residuals [t, N]."""

    predictions: Array
    residuals: Array


class Stopped(NamedTuple):
    """Predictions [N] at the last point, and the loops [N] that each took."""

    predictions: Array
    loops: Array


def residual(state: Tensor, next_state: Tensor) -> Tensor:
    """Return the relative change of the last tokens, [N], of states [N, T, D]."""
    change, size = (x[:, -RESIDUAL_TOKENS:].flatten(1).norm(dim=1) for x in (next_state - state, next_state))
    relative: Tensor = change / size
    return relative


@torch.no_grad()
def states(model: PromptTransformer, xs: Tensor, ys: Tensor, loops: int) -> Iterator[Tensor]:
    """Yield the states Y_0, Y_1, … [N, T, D]; arguments as :meth:`export.papers.looped.model.PromptTransformer.forward`."""
    prompt = model.embed(xs, ys)
    state = model.first_state(prompt)
    yield state
    for _ in range(loops):
        state = model.step(state, prompt)
        yield state


@torch.no_grad()
def trajectory(model: PromptTransformer, xs: Tensor, ys: Tensor, loops: int) -> Trajectory:
    """Run a number of loops; arguments as :func:`states`."""
    predictions, residuals = [], []
    for state, next_state in pairwise(states(model, xs, ys, loops)):
        predictions.append(model.predict(next_state)[:, -1])
        residuals.append(residual(state, next_state))
    return Trajectory(torch.stack(predictions).cpu().numpy(), torch.stack(residuals).cpu().numpy())


def stopped(path: Trajectory, tolerance: float) -> Stopped:
    """Return where each prompt's trajectory has its first residual of at most ``tolerance``, else its end."""
    settled = path.residuals <= tolerance
    settled[-1] = True
    first = settled.argmax(axis=0)
    return Stopped(path.predictions[first, range(len(first))], first + 1)


@torch.no_grad()
def anderson(
    model: PromptTransformer, xs: Tensor, ys: Tensor, loops: int, *, memory: int = 5, ridge: float = 1e-4
) -> Trajectory:
    """Run loops with Anderson acceleration: the next state combines the last ones so that the residual is least.

    Anderson 1965, "Iterative Procedures for Nonlinear Integral Equations"; as in deep equilibrium models (Bai et al.
    2019, arXiv 1909.01377).

    Args:
        memory: number of states that are combined.
        ridge: added to the normal equations, relative to their trace.
    """
    prompt = model.embed(xs, ys)
    state = model.first_state(prompt)
    states: list[Tensor] = []
    images: list[Tensor] = []
    predictions, residuals = [], []
    for _ in range(loops):
        image = model.step(state, prompt)
        predictions.append(model.predict(image)[:, -1])
        residuals.append(residual(state, image))
        states, images = [*states, state][-memory:], [*images, image][-memory:]
        changes = torch.stack([(b - a).flatten(1) for a, b in zip(states, images, strict=True)], dim=1)  # [N, m, T * D]
        gram = changes @ changes.transpose(1, 2)
        size = gram.diagonal(dim1=1, dim2=2).mean(dim=1)[:, None, None]
        eye = torch.eye(len(states), device=gram.device)
        weights = torch.linalg.solve(gram + (ridge * size + _TINY) * eye, torch.ones_like(gram[..., :1]))  # [N, m, 1]
        weights = weights / weights.sum(dim=1, keepdim=True)
        state = torch.einsum("nm,nmtd->ntd", weights[..., 0], torch.stack(images, dim=1))
    return Trajectory(torch.stack(predictions).cpu().numpy(), torch.stack(residuals).cpu().numpy())
