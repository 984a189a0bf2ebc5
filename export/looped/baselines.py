"""Methods that learn each prompt from scratch, with scikit-learn and XGBoost: the baselines of paper 003.

The prediction at a point is made from the pairs before it; without any, it is 0. Settings are those of Garg et al. 2022
and of the paper's public code, where they differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.linear_model import Lasso, LinearRegression
from sklearn.neighbors import KNeighborsRegressor
from sklearn.tree import DecisionTreeRegressor
from torch.nn import functional

from edge.datatypes import Array
from export.looped.functions import HIDDEN_UNITS

LASSO_PENALTIES = (1.0, 0.1, 0.01, 0.001, 0.0001)


class Prompt(NamedTuple):
    """Pairs of one prompt before a point: x [i, d] and y [i], and the point [d]."""

    xs: Array
    ys: Array
    x: Array


#: Returns the value at the point of a prompt.
Baseline = Callable[[Prompt], float]


def least_squares(prompt: Prompt) -> float:
    """Fit by least squares, and of all solutions the one with the smallest norm."""
    return _fitted(LinearRegression(fit_intercept=False), prompt)


def nearest(prompt: Prompt, neighbours: int = 3) -> float:
    """Average the values of the nearest points."""
    return _fitted(KNeighborsRegressor(min(neighbours, len(prompt.ys))), prompt)


def averaging(prompt: Prompt) -> float:
    """Estimate the weights as the mean of x y."""
    return float(prompt.x @ (prompt.xs * prompt.ys[:, None]).mean(axis=0))


def gradient_descent(prompt: Prompt, steps: int, rate: float = 0.1) -> float:
    """Descend from zero weights along the gradient of half the mean squared error."""
    weights = np.zeros_like(prompt.x)
    for _ in range(steps):
        weights -= rate * (prompt.xs.T @ (prompt.xs @ weights - prompt.ys)) / len(prompt.ys)
    return float(prompt.x @ weights)


def lasso(prompt: Prompt, penalty: float) -> float:
    """Fit with a penalty on the sum of the absolute weights."""
    return _fitted(Lasso(alpha=penalty, fit_intercept=False, max_iter=10_000), prompt)


def greedy_tree(prompt: Prompt, *, signs: bool = False, depth: int | None = None) -> float:
    """Fit a decision tree greedily, on the points or on their signs."""
    return _fitted(DecisionTreeRegressor(max_depth=depth, random_state=0), _signed(prompt) if signs else prompt)


def boosted_trees(prompt: Prompt, *, signs: bool = False) -> float:
    """Fit 50 trees of depth 4 by XGBoost with a learning rate of 0.1, on the points or on their signs."""
    from xgboost import XGBRegressor  # half a second

    model = XGBRegressor(max_depth=4, learning_rate=0.1, n_estimators=50, n_jobs=1)
    return _fitted(model, _signed(prompt) if signs else prompt)


#: By function class and name.
BASELINES: dict[str, dict[str, Baseline]] = {
    "linear": {
        "least squares": least_squares,
        "3-NN": nearest,
        "averaging": averaging,
        "gradient descent, 12 steps": partial(gradient_descent, steps=12),
        "gradient descent, 50 steps": partial(gradient_descent, steps=50),
    },
    "sparse": {
        "least squares": least_squares,
        "3-NN": nearest,
        "averaging": averaging,
        **{f"Lasso {penalty:g}": partial(lasso, penalty=penalty) for penalty in LASSO_PENALTIES},
    },
    "tree": {
        "least squares": least_squares,
        "3-NN": nearest,
        "averaging": averaging,
        "greedy tree": greedy_tree,
        "greedy tree, signs": partial(greedy_tree, signs=True, depth=4),
        "XGBoost": boosted_trees,
        "XGBoost, signs": partial(boosted_trees, signs=True),
    },
    "relu": {"least squares": least_squares, "3-NN": nearest, "averaging": averaging},
}


def predict(
    baseline: Baseline, xs: Array, ys: Array, pairs: Sequence[int], on_prompt: Callable[[], None] = lambda: None
) -> Array:
    """Return a baseline's predictions [N, len(pairs)] after different numbers of pairs.

    Args:
        xs: [N, n, d].
        ys: [N, n].
        on_prompt: called after each prompt.
    """
    found = np.zeros((len(xs), len(pairs)))
    for row, (x, y) in enumerate(zip(xs, ys, strict=True)):
        for place, number in enumerate(pairs):
            if number:
                found[row, place] = baseline(Prompt(x[:number], y[:number], x[number]))
        on_prompt()
    return found


def two_layer_network(xs: Array, ys: Array, pairs: Sequence[int], *, steps: int = 1000, rate: float = 5e-3) -> Array:
    """Return predictions like :func:`predict` of one ReLU network per prompt, trained with Adam on its pairs.

    The networks of all prompts are trained side by side. Each step takes ten random pairs, or all if there are fewer.
    """
    number, _, dims = xs.shape
    points, values = torch.from_numpy(xs).float(), torch.from_numpy(ys).float()
    found = np.zeros((number, len(pairs)))
    for place, given in enumerate(pairs):
        if not given:
            continue
        generator = torch.Generator().manual_seed(given)
        # PyTorch's initialisation of linear layers: even, with the bound 1 / sqrt(inputs).
        shapes = ((dims, HIDDEN_UNITS), (1, HIDDEN_UNITS), (HIDDEN_UNITS, 1), (1, 1))
        bounds = (dims, dims, HIDDEN_UNITS, HIDDEN_UNITS)
        weights = [
            ((2 * torch.rand(number, *shape, generator=generator) - 1) * bound**-0.5).requires_grad_()
            for shape, bound in zip(shapes, bounds, strict=True)
        ]
        optimizer = torch.optim.Adam(weights, lr=rate)
        for _ in range(steps):
            rows = torch.randint(given, (min(10, given),), generator=generator)
            loss = (_network(weights, points[:, rows]) - values[:, rows]).square().mean(dim=1).sum()
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        with torch.no_grad():
            found[:, place] = _network(weights, points[:, given : given + 1])[:, 0].numpy()
    return found


def _network(weights: Sequence[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    first, first_bias, second, second_bias = weights
    return (functional.relu(x @ first + first_bias) @ second + second_bias)[..., 0]


def _fitted(model: Any, prompt: Prompt) -> float:
    return float(model.fit(prompt.xs, prompt.ys).predict(prompt.x[None])[0])


def _signed(prompt: Prompt) -> Prompt:
    return Prompt(np.sign(prompt.xs), prompt.ys, np.sign(prompt.x))
