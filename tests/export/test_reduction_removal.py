import copy

import pytest
import torch
from torch.nn import functional

from export.reduction.calibration import attention_statistics, feed_forward_statistics
from export.reduction.lowrank import blocks, regularised
from export.reduction.removal import head_removal, kept_columns, least_squares, neuron_removal, output_error
from export.reduction.states import embedded, layers_of, relative_error
from export.reduction.sublayers import AttentionReducer, FeedForwardReducer, with_attention, with_feed_forward
from tests.support.reduction_data import batches, model


def covariance(width, seed=0):
    torch.manual_seed(seed)
    rows = torch.randn(200, width, dtype=torch.float64) @ torch.randn(width, width, dtype=torch.float64)
    return torch.cov(rows.T)


def refitted_error(C, W, kept, group=1):
    """The error of what is kept, fitted anew, on the regularised covariance."""
    C = regularised(C)
    B = kept_columns(len(C), kept, group)
    return output_error(C, W, B, least_squares(C, W, B, ridge=0.0)) if kept else float((W * (C @ W)).sum())


def greedy(C, W, groups):
    """Optimal brain surgery by trying every group and solving anew."""
    left, order = list(range(groups)), []
    while left:
        errors = {g: refitted_error(C, W, tuple(x for x in left if x != g), len(C) // groups) for g in left}
        order.append(min(left, key=errors.__getitem__))
        left.remove(order[-1])
    return tuple(order)


@pytest.mark.parametrize("units", [10, 150])  # of more than one block
def test_neurons_go_as_by_brute_force(units):
    A, W_2 = covariance(units), torch.randn(units, 5, dtype=torch.float64)
    removal = neuron_removal(A, W_2)
    assert sorted(removal.order) == list(range(units))
    if units == 10:
        assert removal.order == greedy(A, W_2, units)
    for number in (0, 1, units // 2, units - 1, units):
        wanted = refitted_error(A, W_2, removal.kept(units - number))
        assert float(removal.errors[number]) == pytest.approx(wanted, rel=1e-6, abs=1e-8)


def test_heads_go_as_by_brute_force():
    C, W_O = covariance(20), torch.randn(20, 7, dtype=torch.float64)
    removal = head_removal(C, W_O, heads=5)
    assert removal.order == greedy(C, W_O, 5)
    for number in range(6):
        wanted = refitted_error(C, W_O, removal.kept(5 - number), group=4)
        assert float(removal.errors[number]) == pytest.approx(wanted, rel=1e-6, abs=1e-8)


def test_least_squares_loses_nothing_where_nothing_is_left_out():
    C, W = covariance(8), torch.randn(8, 4, dtype=torch.float64)
    B = torch.randn(8, 8, dtype=torch.float64)
    torch.testing.assert_close(B @ least_squares(C, W, B), W)


@pytest.fixture(scope="module")
def halves():
    """A layer, the batches, what each half of it reads, and the statistics of both."""
    classifier, data = model(), batches(rows=96)
    states = embedded(classifier.transformer, data)
    layer = layers_of(classifier.transformer)[0]
    statistics, after = attention_statistics(layer, states, data)
    return layer, data, states, after, statistics, feed_forward_statistics(layer, after, data)


def test_a_removed_heads_mean_stays(halves):
    """Without a head, and W_O as it was, the output is that of a head which always returns its mean."""
    layer, data, states, _, statistics, _ = halves
    attention = layer.attention
    mean = statistics.m.float() + attention.v_proj.bias.detach()

    def mask_first(module, read):
        return (torch.cat([mean[:8].expand_as(read[0][..., :8]), read[0][..., 8:]], dim=-1),)

    handle = attention.output_proj.register_forward_pre_hook(mask_first)
    with torch.no_grad():
        masked = attention(states[0], data[0].mask)[0]
    handle.remove()
    # With heads that have nothing to do with each other, no other head can make up for it, and W_O stays as it is.
    apart = statistics._replace(C=statistics.C * blocks(torch.ones(4, 8, 8)))
    found = AttentionReducer(attention, apart).with_heads((1, 2, 3), 8).module(states[0], data[0].mask)[0]
    torch.testing.assert_close(found, masked, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("heads", [3, 2, 0])
def test_predicted_error_of_fewer_heads_is_measured(halves, heads):
    layer, data, states, _, statistics, _ = halves
    reduced = AttentionReducer(layer.attention, statistics).reduced(heads, 8)
    measured = relative_error(layer, with_attention(layer, reduced), "attention", states, data)
    assert measured == pytest.approx(reduced.output_error, rel=1e-4)


@pytest.mark.parametrize("rank", [2, 5])
def test_predicted_error_of_smaller_values_is_measured(halves, rank):
    """Beside the original queries and keys, and padded with zeros to their width."""
    layer, data, states, _, statistics, _ = halves
    reduced = AttentionReducer(layer.attention, statistics).reduced(4, rank)
    mixed = copy.deepcopy(layer.attention)
    W_V, W_O = reduced.module.v_proj.weight, reduced.module.output_proj.weight
    with torch.no_grad():
        mixed.v_proj.weight.copy_(functional.pad(W_V.unflatten(0, (4, rank)), (0, 0, 0, 8 - rank)).flatten(0, 1))
        mixed.v_proj.bias.zero_()
        mixed.output_proj.weight.copy_(functional.pad(W_O.unflatten(1, (4, rank)), (0, 8 - rank)).flatten(1))
        mixed.output_proj.bias.copy_(reduced.module.output_proj.bias)
    new = with_attention(layer, reduced._replace(module=mixed))
    measured = relative_error(layer, new, "attention", states, data)
    assert measured == pytest.approx(reduced.output_error, rel=1e-4)


@pytest.mark.parametrize("units", [40, 24, 8, 0])
def test_predicted_error_of_feed_forward_is_measured(halves, units):
    layer, data, _, after, _, statistics = halves
    reduced = FeedForwardReducer(layer.feed_forward, statistics).reduced(units)
    measured = relative_error(layer, with_feed_forward(layer, reduced), "feed_forward", after, data)
    assert measured == pytest.approx(reduced.output_error, rel=1e-3)


@pytest.mark.parametrize("units", [40, 24, 8])
def test_a_new_fit_beats_plain_removal(halves, units):
    layer, _, _, _, _, (A, _) = halves
    W_2 = layer.feed_forward.down.weight.detach().double().T
    kept = neuron_removal(A, W_2).kept(units)
    B = kept_columns(len(A), kept)
    assert output_error(A, W_2, B, least_squares(A, W_2, B)) < 0.9 * output_error(A, W_2, B, B.T @ W_2)


def test_all_units_reproduce_a_feed_forward(halves):
    layer, _, _, after, _, statistics = halves
    found = with_feed_forward(layer, FeedForwardReducer(layer.feed_forward, statistics).reduced(48))
    torch.testing.assert_close(
        found.after_feed_forward(after[0]), layer.after_feed_forward(after[0]), rtol=0, atol=1e-5
    )
