from itertools import product

import pytest
import torch

from export.papers.looped.functions import FUNCTION_CLASSES, SPARSITY, TREE_DEPTH, draw_prompts
from export.papers.looped.seeds import (
    CALIBRATION,
    EVALUATION,
    GOLDEN,
    JUDGED,
    REDUCTION,
    VALIDATION,
    generator_of,
    training_generator,
)


def prompts(name, number=64, points=40, dims=20, seed=0, **options):
    return draw_prompts(name, number, points, dims, torch.Generator().manual_seed(seed), **options)


@pytest.mark.parametrize("name", FUNCTION_CLASSES)
def test_values_have_the_variance_of_the_normaliser(name):
    xs, ys = prompts(name, number=4000)
    assert xs.shape == (4000, 40, 20)
    assert ys.shape == (4000, 40)
    assert float(ys.square().mean()) == pytest.approx(FUNCTION_CLASSES[name].normaliser(20), rel=0.1)
    assert float(xs.var()) == pytest.approx(1, rel=0.02)


@pytest.mark.parametrize("name", FUNCTION_CLASSES)
def test_prompts_depend_on_the_seed_alone(name):
    first, again, other = prompts(name), prompts(name), prompts(name, seed=1)
    assert torch.equal(first.ys, again.ys)
    assert not torch.equal(first.ys, other.ys)


def test_every_purpose_and_every_stage_of_a_training_draws_prompts_of_its_own():
    purposes = (EVALUATION, VALIDATION, GOLDEN, CALIBRATION, JUDGED, REDUCTION)
    generators = [generator_of(seed) for seed in purposes]
    generators += [training_generator(*one) for one in product((0, 1, 2**32), (0, 1), (0, 1, 1000))]
    first = {float(draw_prompts("linear", 1, 2, 3, generator).ys[0, 0]) for generator in generators}
    assert len(first) == len(generators)


def weights_of(xs, ys):
    return torch.linalg.lstsq(xs, ys[..., None]).solution[..., 0]


def test_linear_values_come_from_one_weight_vector():
    xs, ys = prompts("linear")
    weights = weights_of(xs, ys)
    torch.testing.assert_close((xs @ weights[..., None])[..., 0], ys, rtol=0, atol=1e-3)
    assert float(weights.var()) == pytest.approx(1, rel=0.1)


def test_sparse_weights_have_three_coordinates():
    found = weights_of(*prompts("sparse")).abs() > 1e-3
    assert (found.sum(dim=1) == SPARSITY).all()
    assert found.any(dim=0).sum() > 15  # not always the same ones


def test_sparse_weights_are_among_the_active_coordinates():
    xs, ys = prompts("sparse", number=200, points=10, active_dims=5)
    counts = (weights_of(xs[..., :5], ys).abs() > 1e-3).sum(dim=1)
    assert counts.max() == SPARSITY
    assert counts.float().mean() > 0.98 * SPARSITY  # few weights are close to zero


def test_a_tree_compares_coordinates_with_zero_on_each_level():
    xs, ys = prompts("tree", number=8, points=500, dims=5)
    for x, y in zip(xs, ys, strict=True):
        signs = (x > 0).int().tolist()
        by_signs = {}
        for sign, value in zip(map(tuple, signs), y.tolist(), strict=True):
            assert by_signs.setdefault(sign, value) == value  # only the signs decide
        assert 2 <= len(set(y.tolist())) <= 2**TREE_DEPTH


def test_a_network_is_positively_homogeneous():
    generator = torch.Generator().manual_seed(0)
    xs = torch.randn(4, 10, 6, generator=generator)
    draw = FUNCTION_CLASSES["relu"].draw
    values = [draw(scale * xs, torch.Generator().manual_seed(1)) for scale in (1.0, 2.5, -1.0)]
    torch.testing.assert_close(values[1], 2.5 * values[0])
    assert not torch.allclose(values[2], -values[0])  # as a linear function would be


def test_inactive_dimensions_are_zero():
    xs, ys = prompts("linear", active_dims=3)
    assert (xs[..., 3:] == 0).all()
    assert (xs[..., :3] != 0).all()
    assert float(ys.square().mean()) == pytest.approx(3, rel=0.5)
