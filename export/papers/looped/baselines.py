"""Methods that learn each prompt from scratch: the baselines of paper 003, by its public code or Garg et al. 2022.

A baseline predicts the value at a point from the pairs before it; without any, the prediction is 0.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from edge.datatypes import Array
from export.papers.looped.prompts import HIDDEN_UNITS, generator_of

LASSO_PENALTIES = (1.0, 0.1, 0.01, 0.001, 0.0001)
_NEIGHBOURS = 3


class Pairs(NamedTuple):
    """Pairs of N prompts before a point: xs [N, k, d], ys [N, k], and the points [N, d]; k is at least 1."""

    xs: Tensor
    ys: Tensor
    points: Tensor


#: Returns the values at the points, [N].
Predict = Callable[[Pairs], Tensor]


class Predictor(NamedTuple):
    """A method, and whether it takes seconds for a thousand prompts of one length."""

    predict: Predict
    slow: bool = False


def least_squares(pairs: Pairs) -> Tensor:
    """Fit by least squares, and of all solutions the one of least norm."""
    # gelsd finds the rank by itself; the default driver assumes that it is full.
    return _dot(pairs.points, torch.linalg.lstsq(pairs.xs, pairs.ys[..., None], driver="gelsd").solution[..., 0])


def nearest(pairs: Pairs) -> Tensor:
    """Average the values of the three nearest points, or of all if there are fewer."""
    distances = (pairs.xs - pairs.points[:, None]).square().sum(dim=2)
    rows = distances.topk(min(_NEIGHBOURS, pairs.xs.shape[1]), dim=1, largest=False).indices
    return pairs.ys.gather(1, rows).mean(dim=1)


def averaging(pairs: Pairs) -> Tensor:
    """Estimate the weights as the mean of x y."""
    return _dot(pairs.points, (pairs.xs * pairs.ys[..., None]).mean(dim=1))


def gradient_descent(pairs: Pairs, steps: int, rate: float = 0.1) -> Tensor:
    """Descend from zero weights along the gradient of the mean squared error.

    Where the rate would diverge, as it does with few pairs, the largest curvature's inverse takes its place.
    """
    xs, ys = pairs.xs, pairs.ys[..., None]
    curvature = 2 / xs.shape[1] * xs.mT @ xs
    target = 2 / xs.shape[1] * xs.mT @ ys
    rates = (1 / torch.linalg.eigvalsh(curvature)[:, -1]).clamp(max=rate)[:, None, None]
    weights = torch.zeros_like(target)
    for _ in range(steps):
        weights = weights - rates * (curvature @ weights - target)
    return _dot(pairs.points, weights[..., 0])


def lasso(pairs: Pairs, penalty: float) -> Tensor:
    """Fit with scikit-learn's penalty on the sum of absolute weights, without an intercept."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import Lasso

    with warnings.catch_warnings():
        # With the smallest penalty and too few pairs, the last digits take more steps than they are worth.
        warnings.simplefilter("ignore", ConvergenceWarning)
        return _each(lambda: Lasso(alpha=penalty, fit_intercept=False, max_iter=10_000), pairs)


def greedy_tree(pairs: Pairs, depth: int) -> Tensor:
    """Fit scikit-learn's decision tree, which chooses one split after the other."""
    from sklearn.tree import DecisionTreeRegressor

    return _each(lambda: DecisionTreeRegressor(max_depth=depth, random_state=0), pairs)


def boosted_trees(pairs: Pairs) -> Tensor:
    """Fit 50 trees of depth 4 by XGBoost with a learning rate of 0.1."""
    from xgboost import XGBRegressor

    # The exact method tries every split, as the histograms do for so few points, and takes less time.
    return _each(
        lambda: XGBRegressor(n_estimators=50, max_depth=4, learning_rate=0.1, tree_method="exact", n_jobs=1), pairs
    )


def on_signs(predict: Predict) -> Predict:
    """Return a method that sees the signs of the coordinates alone."""
    return lambda pairs: predict(Pairs(pairs.xs.sign(), pairs.ys, pairs.points.sign()))


def two_layer_network(pairs: Pairs, *, steps: int = 1000, rate: float = 5e-3) -> Tensor:
    """Train a ReLU network on each prompt by Adam, all side by side; a step takes ten random pairs, if there are."""
    number, given, dims = pairs.xs.shape
    xs, ys, generator = pairs.xs.float(), pairs.ys.float(), generator_of(given)
    # PyTorch's initialisation of linear layers: even, with the bound 1 / sqrt(inputs).
    shapes = ((dims, HIDDEN_UNITS), (1, HIDDEN_UNITS), (HIDDEN_UNITS, 1), (1, 1))
    bounds = (dims, dims, HIDDEN_UNITS, HIDDEN_UNITS)
    weights = [
        ((2 * torch.rand(number, *shape, generator=generator) - 1) * bound**-0.5).requires_grad_()
        for shape, bound in zip(shapes, bounds, strict=True)
    ]
    optimizer = torch.optim.Adam(weights, lr=rate, fused=True)
    for _ in range(steps):
        rows = torch.randperm(given, generator=generator)[:10]
        # A sum over prompts, so that no network's gradient depends on how many there are.
        loss = (_network(weights, xs[:, rows]) - ys[:, rows]).square().mean(dim=1).sum()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    with torch.no_grad():
        return _network(weights, pairs.points[:, None].float())[:, 0]


_ALL = {"least squares": Predictor(least_squares), "3-NN": Predictor(nearest), "averaging": Predictor(averaging)}
#: By function class and name.
BASELINES: dict[str, dict[str, Predictor]] = {
    "linear": {
        **_ALL,
        "gradient descent, 12 steps": Predictor(partial(gradient_descent, steps=12)),
        "gradient descent, 50 steps": Predictor(partial(gradient_descent, steps=50)),
    },
    "sparse": {
        **_ALL,
        **{f"Lasso {penalty:g}": Predictor(partial(lasso, penalty=penalty), slow=True) for penalty in LASSO_PENALTIES},
    },
    "tree": {
        **_ALL,
        "greedy tree": Predictor(partial(greedy_tree, depth=2), slow=True),
        "greedy tree, signs": Predictor(on_signs(partial(greedy_tree, depth=4)), slow=True),
        "XGBoost": Predictor(boosted_trees, slow=True),
        "XGBoost, signs": Predictor(on_signs(boosted_trees), slow=True),
    },
    "relu": {**_ALL, "two-layer network": Predictor(two_layer_network, slow=True)},
}


def predict_after(predict: Predict, xs: Tensor, ys: Tensor, pairs: Sequence[int]) -> Array:
    """Return a method's predictions [N, len(pairs)] after different numbers of pairs, for xs [N, n, d], ys [N, n]."""
    xs, ys = xs.double(), ys.double()
    predictions = np.zeros((len(xs), len(pairs)))
    for column, given in enumerate(pairs):
        if given:
            predictions[:, column] = predict(Pairs(xs[:, :given], ys[:, :given], xs[:, given])).numpy()
    return predictions


def _each(make: Callable[[], Any], pairs: Pairs) -> Tensor:
    arrays = (tensor.numpy() for tensor in pairs)
    predictions = [float(make().fit(xs, ys).predict(point[None])[0]) for xs, ys, point in zip(*arrays, strict=True)]
    return torch.tensor(predictions, dtype=torch.float64)


def _network(weights: Sequence[Tensor], x: Tensor) -> Tensor:
    first, first_bias, second, second_bias = weights
    return (functional.relu(x @ first + first_bias) @ second + second_bias)[..., 0]


def _dot(points: Tensor, weights: Tensor) -> Tensor:
    return (points * weights).sum(dim=1)
