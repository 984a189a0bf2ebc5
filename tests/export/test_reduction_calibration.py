import pytest
import torch

from export.errors import ReductionError
from export.reduction.calibration import Moments, attention_statistics, check_calibration, feed_forward_statistics
from export.reduction.states import embedded, head_gradients, layers_of, recorded
from tests.support.reduction_data import batches, model


def test_moments_of_parts_are_those_of_the_whole():
    rows = torch.randn(50, 6, dtype=torch.float64) + 100
    moments = Moments(2, 3)
    for part in rows.split(7):
        moments.add(part)
    assert moments.count == 50
    for group in range(2):
        x = rows[:, 3 * group : 3 * group + 3]
        torch.testing.assert_close(moments.mean[group], x.mean(dim=0))
        torch.testing.assert_close(moments.second_moment[group], x.T @ x / 50)
        torch.testing.assert_close(moments.covariance[group], torch.cov(x.T, correction=0))


def test_statistics_ignore_padding():
    classifier, data = model(), batches()
    layer, states = layers_of(classifier.transformer)[0], embedded(classifier.transformer, data)
    statistics, after = attention_statistics(layer, states, data)
    units = feed_forward_statistics(layer, after, data)
    spoilt = [torch.where(batch.mask[..., None].bool(), state, 7.0) for state, batch in zip(states, data, strict=True)]
    again, after = attention_statistics(layer, spoilt, data)
    torch.testing.assert_close(tuple(again), tuple(statistics), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(tuple(feed_forward_statistics(layer, after, data)), tuple(units), rtol=1e-5, atol=1e-5)


def test_head_statistics_leave_the_values_bias_out():
    classifier, data = model(), batches()
    layer, states = layers_of(classifier.transformer)[0], embedded(classifier.transformer, data)
    statistics, _ = attention_statistics(layer, states, data)
    with torch.no_grad():
        layer.attention.v_proj.bias += 5
    shifted, _ = attention_statistics(layer, states, data)
    torch.testing.assert_close(shifted.m, statistics.m, rtol=1e-4, atol=1e-5)


def test_head_gradients_are_those_of_a_factor_on_each_head():
    classifier, data = model(), batches(rows=5)
    found = head_gradients(classifier, data)
    wanted = torch.zeros(4)
    layer = layers_of(classifier.transformer)[1]
    for row in range(5):
        one = [tensor[row : row + 1] for tensor in data[0]]
        factor = torch.ones(4, requires_grad=True)
        scale = layer.attention.output_proj.register_forward_pre_hook(
            lambda _, read, factor=factor: (read[0] * factor.repeat_interleave(8),)
        )
        loss = classifier.loss(classifier(*one[:3]), one[3])
        scale.remove()
        wanted += torch.autograd.grad(loss, factor)[0].abs() / 5
    torch.testing.assert_close(found[1], wanted, rtol=1e-4, atol=1e-6)


def test_recorder_leaves_no_hooks():
    linear = torch.nn.Linear(2, 2)
    with pytest.raises(ZeroDivisionError), recorded([linear]):
        raise ZeroDivisionError
    assert not linear._forward_hooks


def test_too_few_tokens_and_inputs_of_another_kind_are_rejected():
    data = batches(rows=3)
    tokens = sum(int(batch.mask.sum()) for batch in data)
    with pytest.raises(ReductionError, match=rf"got {tokens} tokens .* in 3 inputs, expected more than 48"):
        check_calibration(model().transformer, data)
    images = [batches()[0]._replace(inputs=torch.zeros(2, 3, 8, 8), mask=None)]
    with pytest.raises(ReductionError, match=r"batch 0: got inputs of shape \[2, 3, 8, 8\], expected token ids"):
        check_calibration(model().transformer, images)


def test_activations_that_are_not_finite_are_rejected():
    classifier, data = model(), batches()
    layer, states = layers_of(classifier.transformer)[0], embedded(classifier.transformer, data)
    states[1][0, 0, 0] = torch.nan
    with pytest.raises(ReductionError, match="activations, by their S_q: got NaN or Inf"):
        attention_statistics(layer, states, data)
