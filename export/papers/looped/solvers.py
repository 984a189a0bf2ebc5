"""Anderson acceleration of a looped model's fixed point: fewer loops, and a state that combines several."""

from __future__ import annotations

import torch
from torch import Tensor

from export.papers.looped.model import PromptTransformer, Trajectory, residual_of

#: States that are combined.
_MEMORY = 5
#: Added to the diagonal of the normal equations, relative to its mean, and where a state no longer changes.
_RIDGE, _TINY = 1e-4, 1e-30


@torch.no_grad()
def anderson(model: PromptTransformer, xs: Tensor, ys: Tensor, loops: int) -> Trajectory:
    """Run loops as :func:`export.papers.looped.model.trajectory`, each from the combination with the least residual.

    Anderson 1965, "Iterative Procedures for Nonlinear Integral Equations", as in deep equilibrium models (Bai et al.
    2019, arXiv 1909.01377).
    """
    prompt = model.embed(xs, ys)
    state = model.first_state(prompt)
    states, images = list[Tensor](), list[Tensor]()
    predictions, residuals = [], []
    for _ in range(loops):
        image = model.step(state, prompt)
        predictions.append(model.predict(image)[:, -1])
        residuals.append(residual_of(state, image))
        states, images = [*states, state][-_MEMORY:], [*images, image][-_MEMORY:]
        changes = torch.stack([(b - a).flatten(1) for a, b in zip(states, images, strict=True)], dim=1)  # [N, m, T * D]
        gram = changes @ changes.transpose(1, 2)
        size = gram.diagonal(dim1=1, dim2=2).mean(dim=1)[:, None, None]
        eye = torch.eye(len(states), device=gram.device)
        weights = torch.linalg.solve(gram + (_RIDGE * size + _TINY) * eye, torch.ones_like(gram[..., :1]))  # [N, m, 1]
        weights = weights / weights.sum(dim=1, keepdim=True)
        state = torch.einsum("nm,nmtd->ntd", weights[..., 0], torch.stack(images, dim=1))
    return Trajectory(torch.stack(predictions).cpu().numpy(), torch.stack(residuals).cpu().numpy())
