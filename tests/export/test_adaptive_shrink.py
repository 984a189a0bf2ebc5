import numpy as np
import pytest
import torch

from export.adaptive.rotation import rotated_model
from export.adaptive.scores import GivenScores, SkippableAttention, scorers, with_scores
from export.adaptive.shrink import GroupedAttention, shrunk_model
from export.attention import MultiHeadAttention
from export.errors import ReductionError
from export.tasks.predictions import predict
from tests.support.reduction_data import batches, inputs, model


@pytest.fixture(scope="module")
def rotated():
    return rotated_model(model(head_dim=16), batches())


@pytest.mark.parametrize(
    ("scores", "widths"),
    [
        ([0.5] * 4, [8]),
        ([0.9] * 4, [16]),
        ([0.9, 0.1, 0.45, 0.9], [8, 16]),
        ([0.06] * 4, [8]),  # one coordinate of 16, in a matrix of 8
    ],
)
def test_smaller_matrices_return_the_same(rotated, scores, widths):
    masked = with_scores(rotated, "fixed", lambda attention, number: GivenScores(torch.tensor(scores))).eval()
    small = shrunk_model(masked)
    rows = inputs(seed=4)
    np.testing.assert_allclose(predict(small, rows).logits, predict(masked, rows).logits, atol=1e-5)
    attention = small.transformer.layers[0].attention
    groups = attention.groups if isinstance(attention, GroupedAttention) else [attention]
    assert [group.head_dim for group in groups] == widths
    assert sum(group.num_heads for group in groups) == 4


@pytest.mark.parametrize("passes", [True, False])
def test_a_gate_folds_into_an_attention_or_a_constant(rotated, passes):
    gated = shrunk_model(rotated)  # a copy
    layer = gated.transformer.layers[1]
    layer.attention = SkippableAttention(layer.attention, torch.arange(24) / 24)
    layer.attention.scorer.logits.data.fill_(1.0 if passes else -1.0)
    small = shrunk_model(gated)
    rows = inputs(seed=5)
    np.testing.assert_allclose(predict(small, rows).logits, predict(gated.eval(), rows).logits, atol=1e-5)
    assert isinstance(small.transformer.layers[1].attention, MultiHeadAttention if passes else type(None))


def test_a_gate_has_the_gradient_of_its_score(rotated):
    attention = SkippableAttention(rotated.transformer.layers[0].attention, torch.zeros(24)).train()
    attention(torch.randn(2, 5, 24))[0].square().sum().backward()
    assert attention.scorer.logits.grad.abs() > 0


def test_scores_that_depend_on_the_input_are_rejected(rotated):
    with pytest.raises(ReductionError, match="HeadScorer in mode fixed"):
        shrunk_model(with_scores(rotated, "fixed", scorers(0)))
