import numpy as np
import pytest
import torch
from sklearn.linear_model import LinearRegression
from sklearn.neighbors import KNeighborsRegressor

from export.papers.looped.baselines import (
    BASELINES,
    Pairs,
    averaging,
    boosted_trees,
    gradient_descent,
    greedy_tree,
    lasso,
    least_squares,
    nearest,
    on_signs,
    predict_after,
    ridge,
    two_layer_network,
)
from export.papers.looped.functions import draw_prompts


def drawn(name, pairs, dims, number=50, seed=0):
    """Pairs of prompts, and the values of their last points."""
    xs, ys = (x.double() for x in draw_prompts(name, number, pairs + 1, dims, torch.Generator().manual_seed(seed)))
    return Pairs(xs[:, :-1], ys[:, :-1], xs[:, -1]), ys[:, -1]


def error(predict, *prompts):
    pairs, values = drawn(*prompts)
    return float((predict(pairs) - values).square().mean())


def fitted(model, pairs):
    arrays = (tensor.numpy() for tensor in pairs)
    return [model.fit(xs, ys).predict(x[None])[0] for xs, ys, x in zip(*arrays, strict=True)]


def test_least_squares_is_exact_with_as_many_pairs_as_dimensions_and_of_least_norm_with_fewer():
    assert error(least_squares, "linear", 20, 20) < 1e-6
    pairs, _ = drawn("linear", 8, 20)
    np.testing.assert_allclose(least_squares(pairs), fitted(LinearRegression(fit_intercept=False), pairs), atol=1e-9)


@pytest.mark.parametrize("pairs", [2, 12])
def test_the_nearest_points_are_those_of_scikit_learn(pairs):
    prompts, _ = drawn("relu", pairs, 4)
    np.testing.assert_allclose(nearest(prompts), fitted(KNeighborsRegressor(min(3, pairs)), prompts))


def test_averaging_and_descent_begin_alike_and_descent_goes_on_to_least_squares():
    pairs, _ = drawn("linear", 40, 5)
    torch.testing.assert_close(gradient_descent(pairs, steps=1, rate=0.01), 0.02 * averaging(pairs))
    torch.testing.assert_close(gradient_descent(pairs, steps=2000), least_squares(pairs))
    few, _ = drawn("linear", 1, 5)
    torch.testing.assert_close(gradient_descent(few, steps=50), least_squares(few), atol=0.1, rtol=0)  # no divergence


def test_ridge_beats_least_squares_where_values_are_noisy():
    pairs, values = drawn("linear", 12, 10, number=400)
    noise = torch.randn(pairs.ys.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    noisy = pairs._replace(ys=pairs.ys + noise)
    errors = [float((found - values).square().mean()) for found in (ridge(noisy, 1.0), least_squares(noisy))]
    assert errors[0] < 0.5 * errors[1]


def test_lasso_finds_the_coordinates_of_a_sparse_vector_that_least_squares_cannot():
    assert error(lambda pairs: lasso(pairs, 0.01), "sparse", 15, 20) < 0.05
    assert error(least_squares, "sparse", 15, 20) > 0.3


@pytest.mark.parametrize("predict", [lambda pairs: greedy_tree(pairs, depth=4), boosted_trees])
def test_trees_on_signs_learn_a_step_with_one_split(predict):
    pairs, _ = drawn("linear", 30, 3)
    step = pairs._replace(ys=(pairs.xs[..., 1] > 0).double())
    assert float((on_signs(predict)(step) - (pairs.points[:, 1] > 0).double()).abs().max()) < 0.05


def test_a_network_learns_a_network():
    learned = error(lambda pairs: two_layer_network(pairs, steps=300), "relu", 40, 2)
    assert learned < 0.1 * error(averaging, "relu", 40, 2)


def test_a_prediction_uses_the_pairs_before_its_point_alone():
    xs, ys = draw_prompts("linear", 20, 6, 3, torch.Generator().manual_seed(0))
    found = predict_after(BASELINES["linear"]["least squares"].predict, xs, ys[:, :-1], range(6))
    assert (found[:, 0] == 0).all()
    np.testing.assert_allclose(found[:, 3:], ys[:, 3:], atol=1e-3)
    assert np.abs(found[:, 1] - ys[:, 1].numpy()).mean() > 0.1
