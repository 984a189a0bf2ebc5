import pytest
import torch

from edge.errors import UsageError
from export.adaptive.budget import SHARE, Budget, CostCurve, measured_curve, temperature
from export.attention import MultiHeadAttention, soft_keep
from tests.support.reduction_data import config

CURVE = CostCurve((0.0, 0.25, 0.5, 1.0), (0.5, 0.55, 0.7, 1.0))


def test_the_cost_is_the_line_between_the_points():
    shares = torch.tensor([[0.0, 0.1, 0.25], [0.375, 0.75, 1.0]], dtype=torch.float64)
    expected = torch.tensor([[0.5, 0.52, 0.55], [0.625, 0.85, 1.0]], dtype=torch.float64)
    torch.testing.assert_close(CURVE.at(shares), expected)


def test_gradients_of_cost_and_loss_are_those_of_finite_differences():
    torch.manual_seed(0)
    shares = torch.rand(2, 5, dtype=torch.float64).requires_grad_()
    budget = Budget(CURVE, 0.7).double()
    budget.multipliers.copy_(torch.tensor([0.3, 2.0]))

    def loss(shares):
        return budget.loss(budget.cost(list(shares)), 0.8)

    assert torch.autograd.gradcheck(loss, (shares,))


def test_gradients_through_warm_gates_are_those_of_finite_differences():
    scores = torch.tensor([[0.2, 0.45, 0.7]], dtype=torch.float64, requires_grad=True)
    for warmth in (8.0, 2.0, 1.0):
        assert torch.autograd.gradcheck(lambda s, warmth=warmth: soft_keep(s, 8, 8, warmth).mean(), (scores,))


@pytest.mark.parametrize(("share", "sign"), [(0.9, 1), (0.3, -1)])
def test_scores_are_pushed_down_only_above_the_target(share, sign):
    budget = Budget(SHARE, 0.5)
    scores = torch.full((4, 3), share, requires_grad=True)
    budget.loss(budget.cost([scores.mean(dim=1)]), 1.0).backward()
    assert (scores.grad.sign() == sign).all()


def test_multipliers_rise_above_the_target_and_the_first_falls_below_it():
    budget = Budget(SHARE, 0.5)
    budget.ascend(torch.tensor(0.9), 1.0)
    above = budget.multipliers.clone()
    assert (above > torch.tensor([0.0, 1.0])).all()
    budget.ascend(torch.tensor(0.4), 1.0)
    assert 0 < budget.multipliers[0] < above[0]
    assert budget.multipliers[1] == above[1]
    budget.ascend(torch.tensor(0.0), 1.0)
    assert budget.multipliers[0] == 0, "an inequality's multiplier"


def test_the_target_falls_and_the_gates_cool():
    budget = Budget(SHARE, 0.5)
    assert [budget.target_at(p) for p in (0, 0.1, 0.3, 0.5, 1)] == pytest.approx([1, 1, 0.75, 0.5, 0.5])
    assert [temperature(p) for p in (0, 0.5, 1)] == [8, 4.5, 1]
    module = MultiHeadAttention(16, 4, 64, "budget").train()
    module.rank_temperature = 8.0
    scores = torch.full((1, 4), 0.3, requires_grad=True)
    module.keep(scores)[0, :, 24].sum().backward()
    warm = scores.grad.clone()
    module.rank_temperature, scores.grad = 0.1, None
    module.keep(scores)[0, :, 24].sum().backward()
    assert (warm > scores.grad).all(), "warm gates tell a score of coordinates some way beyond the last"


@pytest.mark.parametrize("target", [0.4, 1.1])
def test_a_target_out_of_reach_is_rejected(target):
    with pytest.raises(UsageError, match=r"got .*, expected 0\.500, a layer without heads, to 1"):
        Budget(CURVE, target)


@pytest.mark.slow
def test_a_measured_curve_rises(tmp_path):
    measured = measured_curve(config(), 16, cache=tmp_path / "latency.json", calls=20)
    assert measured.shares == (0, 0.25, 0.5, 0.75, 1)
    assert list(measured.costs) == sorted(measured.costs)
    assert 0 < measured.costs[0] < measured.costs[-1] == 1
