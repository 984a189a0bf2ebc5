"""What models predict for prompts: after each number of pairs, and after each loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
import torch

from edge.datatypes import Array
from export.papers.looped.functions import Prompts
from export.papers.looped.model import PromptTransformer
from export.papers.looped.seeds import generator_of
from export.papers.looped.shifts import Shift
from export.papers.looped.solvers import anderson, residual, states

#: Arrays of a part by name.
Arrays = dict[str, Array]
#: Prompts that run together: their states stay in the processor's cache.
_CHUNK = 128


def errors_by_pairs(model: PromptTransformer, prompts: Prompts, loops: int) -> Array:
    """Return the squared errors [N, n] at all points after a number of loops."""
    found = []
    with torch.no_grad():
        for xs, ys in _chunks(prompts):
            found.append((model(xs, ys[:, :-1], loops, 1)[-1] - ys).square().numpy())
    return np.concatenate(found)


def run_path(model: PromptTransformer, prompts: Prompts, *, trained: int, loops: int) -> Arrays:
    """Return squared errors of a looped model.

    Returns:
        ``pairs`` [N, n]: at all points after ``trained`` loops; ``loops`` [t, N]: at the last point after each loop;
        ``residuals`` [t, N].
    """
    found: dict[str, list[Array]] = {"pairs": [], "loops": [], "residuals": []}
    for xs, ys in _chunks(prompts):
        errors, residuals = [], []
        for number, (state, following) in enumerate(pairwise(states(model, xs, ys[:, :-1], max(trained, loops))), 1):
            with torch.no_grad():
                error = (model.predict(following) - ys).square()
            if number <= loops:
                errors.append(error[:, -1])
                residuals.append(residual(state, following))
            if number == trained:
                found["pairs"].append(error.numpy())
        found["loops"].append(torch.stack(errors).numpy())
        found["residuals"].append(torch.stack(residuals).numpy())
    return {name: np.concatenate(arrays, axis=0 if name == "pairs" else 1) for name, arrays in found.items()}


def anderson_path(model: PromptTransformer, prompts: Prompts, *, loops: int, memory: int) -> Arrays:
    """Return ``loops`` and ``residuals`` like :func:`run_path`, with Anderson acceleration."""
    paths = [anderson(model, xs, ys[:, :-1], loops, memory=memory) for xs, ys in _chunks(prompts)]
    predictions = np.concatenate([path.predictions for path in paths], axis=1)
    return {
        "loops": (predictions - prompts.ys[:, -1].numpy()) ** 2,
        "residuals": np.concatenate([path.residuals for path in paths], axis=1),
    }


def shifted_errors(
    errors_of: Callable[[Prompts], Array], shift: Shift, number: int, points: int, dims: int, seed: int
) -> Arrays:
    """Return squared errors under a shift: ``pairs`` [m], and ``errors`` [N, m] after so many.

    Where only the last point is changed, the numbers of pairs are d - 1 and the most; otherwise all.

    Args:
        errors_of: returns the errors [N, n] of prompts.
        seed: of the prompts; where only the last point is changed, the number of pairs is added.
    """
    if not shift.last_only:
        prompts = shift.draw(number, points, dims, generator_of(seed))
        return {"pairs": np.arange(points), "errors": errors_of(prompts)}
    most = min(points, dims) - 1
    pairs = sorted({most} if shift.below_dims else {most, points - 1})
    columns = [errors_of(shift.draw(number, given + 1, dims, generator_of(seed + given)))[:, -1] for given in pairs]
    return {"pairs": np.array(pairs), "errors": np.stack(columns, axis=1)}


def _chunks(prompts: Prompts) -> Iterator[Prompts]:
    for xs, ys in zip(torch.split(prompts.xs, _CHUNK), torch.split(prompts.ys, _CHUNK), strict=True):
        yield Prompts(xs, ys)
