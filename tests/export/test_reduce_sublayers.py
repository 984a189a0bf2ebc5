import pytest
import torch

from export.errors import ReductionError
from export.reduce.algebra import (
    blocks,
    head_removal,
    kept_columns,
    least_squares,
    neuron_removal,
    output_error,
    query_key_factors,
    regularised,
    value_output_factors,
)
from export.reduce.calibration import Moments, attention_statistics, check_calibration, feed_forward_statistics
from export.reduce.states import embedded, layers_of, relative_error
from export.reduce.sublayers import AttentionReducer, FeedForwardReducer, with_half
from tests.support.reduction_data import batches, model


def calibrated(classifier, data):
    """Return the first layer, what each half of it reads, and the statistics of both."""
    states = embedded(classifier.transformer, data)
    layer = layers_of(classifier.transformer)[0]
    statistics, after = attention_statistics(layer, states, data)
    return layer, states, after, statistics, feed_forward_statistics(layer, after, data)


@pytest.fixture(scope="module")
def data():
    return batches(rows=96)


@pytest.fixture(scope="module")
def halves(data):
    return calibrated(model(), data)


def samples(*shape):
    return torch.randn(*shape, dtype=torch.float64) @ torch.randn(shape[-1], shape[-1], dtype=torch.float64)


# Calibration.


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


def test_statistics_ignore_padding(halves, data):
    layer, states, _, statistics, units = halves
    spoilt = [torch.where(batch.mask[..., None].bool(), state, 7.0) for state, batch in zip(states, data, strict=True)]
    again, after = attention_statistics(layer, spoilt, data)
    for found, wanted in ((again, statistics), (feed_forward_statistics(layer, after, data), units)):
        torch.testing.assert_close(tuple(found), tuple(wanted), rtol=1e-5, atol=1e-5)


def test_calibration_data_that_do_not_fit_are_rejected(halves, data):
    few = batches(rows=3)
    tokens = sum(int(batch.mask.sum()) for batch in few)
    with pytest.raises(ReductionError, match=rf"got {tokens} tokens .* in 3 inputs, expected more than 48"):
        check_calibration(model().transformer, few)
    images = [few[0]._replace(inputs=torch.zeros(2, 3, 8, 8), mask=None)]
    with pytest.raises(ReductionError, match=r"batch 0: got inputs of shape \[2, 3, 8, 8\], expected token ids"):
        check_calibration(model().transformer, images)
    broken = [state * torch.nan for state in halves[1]]
    with pytest.raises(ReductionError, match="activations, by their S_q: got NaN or Inf"):
        attention_statistics(halves[0], broken, data)


# Smaller heads.


def test_factors_of_full_rank_change_nothing():
    torch.manual_seed(0)
    S_q, S_k, C = (rows.transpose(1, 2) @ rows / 100 for rows in (samples(3, 100, 8) for _ in range(3)))
    queries_keys = query_key_factors(S_q, S_k, 8)
    one = torch.eye(8, dtype=torch.float64).expand(3, 8, 8)
    torch.testing.assert_close(queries_keys.left @ queries_keys.right.transpose(1, 2), one)
    W_O = torch.randn(3, 8, 20, dtype=torch.float64)
    values = value_output_factors(C, W_O, 8)
    torch.testing.assert_close(values.left @ values.right, W_O)
    assert max(queries_keys.error.abs().max(), values.error.abs().max()) < 1e-12


@pytest.mark.parametrize("rank", [1, 7])
def test_predicted_errors_of_factors_are_measured(rank):
    torch.manual_seed(1)
    q, k = samples(2, 60, 8), samples(2, 50, 8)
    k = k - k.mean(dim=1, keepdim=True)
    S_q, S_k = q.transpose(1, 2) @ q / 60, k.transpose(1, 2) @ k / 50
    F, G, error = query_key_factors(S_q, S_k, rank, ridge=0.0)
    lost = q @ k.transpose(1, 2) - (q @ F) @ (k @ G).transpose(1, 2)
    torch.testing.assert_close(lost.square().mean(dim=(1, 2)), error)
    W_O = torch.randn(2, 8, 20, dtype=torch.float64)
    E, W_small, error = value_output_factors(S_q, W_O, rank, ridge=0.0)
    torch.testing.assert_close((q @ W_O - q @ E @ W_small).square().sum(dim=2).mean(dim=1), error)


def test_heads_that_return_nothing_stay_finite():
    zero = torch.zeros(1, 8, 8, dtype=torch.float64)
    W_O = torch.randn(1, 8, 20, dtype=torch.float64)
    for factors in (query_key_factors(zero, zero, 4), value_output_factors(zero, W_O, 4)):
        assert all(torch.isfinite(part).all() for part in factors)


@pytest.mark.parametrize("architecture", ["bert", "gpt2"])
def test_full_rank_reproduces_an_attention(architecture):
    data = [batch._replace(segments=None) for batch in batches()]
    layer, states, wanted, statistics, _ = calibrated(model(architecture=architecture), data)
    reduced = AttentionReducer(layer.attention, statistics).reduced(4, 8)
    found = with_half(layer, "attention", reduced).after_attention(states[0], data[0].mask)
    torch.testing.assert_close(found, wanted[0], rtol=0, atol=1e-5)
    # b_V has gone into b_O, and b_K nowhere.
    assert not reduced.module.v_proj.bias.any()
    assert not reduced.module.k_proj.bias.any()
    assert (reduced.output_error, reduced.logits_error) == (pytest.approx(0, abs=1e-12), 0)


def test_scale_of_the_new_logits_may_be_chosen(halves, data):
    layer, states, _, statistics, _ = halves
    reducer = AttentionReducer(layer.attention, statistics)
    one, other = reducer.reduced(4, 5).module, reducer.reduced(4, 5, scale=1.0).module
    assert (one.scale, other.scale) == (5**-0.5, 1.0)
    torch.testing.assert_close(one(states[0], data[0].mask), other(states[0], data[0].mask), rtol=1e-4, atol=1e-4)


# Fewer heads and neurons.


def refitted_error(C, W, kept, group=1):
    """Return the error of what is kept, fitted anew, on the regularised covariance."""
    C = regularised(C)
    B = kept_columns(len(C), kept, group)
    return output_error(C, W, B, least_squares(C, W, B, ridge=0.0)) if kept else float((W * (C @ W)).sum())


def greedy(C, W, groups):
    """Remove as optimal brain surgery does, but try every group and solve anew."""
    left, order = list(range(groups)), []
    while left:
        errors = {g: refitted_error(C, W, tuple(x for x in left if x != g), len(C) // groups) for g in left}
        order.append(min(left, key=errors.__getitem__))
        left.remove(order[-1])
    return tuple(order)


@pytest.mark.parametrize(("width", "groups"), [(10, 10), (150, 150), (20, 5)])  # 150 are more than one block
def test_neurons_and_heads_go_as_by_brute_force(width, groups):
    torch.manual_seed(0)
    C, W = torch.cov(samples(200, width).T), torch.randn(width, 5, dtype=torch.float64)
    removal = neuron_removal(C, W) if width == groups else head_removal(C, W, heads=groups)
    assert removal.order == greedy(C, W, groups) if width < 150 else sorted(removal.order) == list(range(150))
    for number in (0, 1, groups // 2, groups - 1, groups):
        wanted = refitted_error(C, W, removal.kept(groups - number), width // groups)
        assert float(removal.errors[number]) == pytest.approx(wanted, rel=1e-6, abs=1e-8)


def test_least_squares_loses_nothing_where_nothing_is_left_out():
    torch.manual_seed(0)
    C, W, B = torch.cov(samples(200, 8).T), torch.randn(8, 4).double(), torch.randn(8, 8).double()
    torch.testing.assert_close(B @ least_squares(C, W, B), W)


def test_a_removed_heads_mean_stays(halves, data):
    """Without a head, and W_O as it was, the output is that of a head which always returns its mean."""
    layer, states, _, statistics, _ = halves
    attention = layer.attention
    mean = statistics.m.float() + attention.v_proj.bias.detach()

    def mask_first(module, read):
        return (torch.cat([mean[:8].expand_as(read[0][..., :8]), read[0][..., 8:]], dim=-1),)

    handle = attention.output_proj.register_forward_pre_hook(mask_first)
    with torch.no_grad():
        masked = attention(states[0], data[0].mask)
    handle.remove()
    # With heads that have nothing to do with each other, no other head can make up for it, and W_O stays as it is.
    apart = statistics._replace(C=statistics.C * blocks(torch.ones(4, 8, 8)))
    found = AttentionReducer(attention, apart).reduced((1, 2, 3), 8).module(states[0], data[0].mask)
    torch.testing.assert_close(found, masked, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("heads", [3, 0])
def test_predicted_error_of_fewer_heads_is_measured(halves, data, heads):
    layer, states, _, statistics, _ = halves
    reduced = AttentionReducer(layer.attention, statistics).reduced(heads, 8)
    measured = relative_error(layer, with_half(layer, "attention", reduced), "attention", states, data)
    assert measured == pytest.approx(reduced.output_error, rel=1e-4)


@pytest.mark.parametrize("units", [48, 24, 0])
def test_predicted_error_of_feed_forward_is_measured(halves, data, units):
    layer, _, after, _, statistics = halves
    reduced = FeedForwardReducer(layer.feed_forward, statistics).reduced(units)
    measured = relative_error(layer, with_half(layer, "feed_forward", reduced), "feed_forward", after, data)
    assert measured == pytest.approx(reduced.output_error, rel=1e-3, abs=1e-9)


def test_heads_that_go_take_their_bias_of_distances_along(data):
    classifier = model(relative_buckets=8)
    layer, states, _, statistics, _ = calibrated(classifier, data)
    torch.nn.init.normal_(layer.attention.relative.weight)
    reducer = AttentionReducer(layer.attention, statistics)
    whole, half = (reducer.reduced(heads, layer.attention.head_dim).module for heads in (4, (0, 2)))
    torch.testing.assert_close(half.relative.weight, layer.attention.relative.weight[:, [0, 2]])
    x, mask = states[0], data[0].mask
    torch.testing.assert_close(whole(x, mask), layer.attention(x, mask), rtol=1e-4, atol=1e-4)
