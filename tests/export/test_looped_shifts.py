import pytest
import torch

from export.papers.looped.shifts import SHIFTS


def draw(name, points=400, dims=6, number=40):
    return SHIFTS[name].draw(number, points, dims, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", SHIFTS)
def test_values_have_the_variance_of_their_normaliser(name):
    points = 5 if SHIFTS[name].below_dims else 40
    _, ys = draw(name, points=points, number=4000)
    assert float(ys.square().mean()) == pytest.approx(SHIFTS[name].normaliser(6), rel=0.1)


def covariances(xs):
    return torch.linalg.eigvalsh(xs.mT @ xs / xs.shape[1]).mean(dim=0).flip(0)


def test_points_are_skewed_as_one_over_the_square():
    expected = 1 / torch.arange(1, 7) ** 2
    torch.testing.assert_close(
        covariances(draw("skewed covariance").xs), 6 * expected / expected.sum(), rtol=0.15, atol=0
    )


def test_a_half_subspace_has_half_the_dimensions():
    xs, _ = draw("half-subspace")
    assert (torch.linalg.matrix_rank(xs, rtol=1e-4) == 3).all()
    assert float(xs.square().sum(dim=2).mean()) == pytest.approx(6, rel=0.1)


def test_points_and_values_are_scaled():
    plain, points, values = draw("none"), draw("points × 3"), draw("values × 1/2")
    torch.testing.assert_close(points.xs, 3 * plain.xs)
    torch.testing.assert_close(points.ys, 3 * plain.ys)
    torch.testing.assert_close(values.xs, plain.xs)
    torch.testing.assert_close(values.ys, plain.ys / 2)


@pytest.mark.parametrize(("name", "noise"), [("noise 0.1", 0.1), ("noise 1, renormalised", (6 / 7) ** 0.5)])
def test_noise_is_what_no_linear_function_explains(name, noise):
    xs, ys = draw(name)
    rest = ys - (xs @ torch.linalg.lstsq(xs, ys[..., None]).solution)[..., 0]
    assert float(rest.std()) == pytest.approx(noise, rel=0.05)


def test_the_last_point_is_outside_the_quadrant_span_or_set_of_the_others():
    xs, _ = draw("quadrants")
    assert (xs[:, :-1].sign() == xs[:, :1].sign()).all()
    assert not (xs[:, -1].sign() == xs[:, 0].sign()).all()
    xs, _ = draw("orthogonal last point", points=6)
    torch.testing.assert_close(xs[:, :-1] @ xs[:, -1:].mT, torch.zeros(40, 5, 1), atol=1e-3, rtol=0)
    assert float(xs[:, -1].square().sum(dim=1).mean()) == pytest.approx(6, rel=0.3)
    xs, ys = draw("repeated point", points=6)
    same = (xs[:, :-1] == xs[:, -1:]).all(dim=2)
    assert (same.sum(dim=1) == 1).all()
    torch.testing.assert_close(ys[:, :-1][same], ys[:, -1])
