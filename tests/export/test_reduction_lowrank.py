import pytest
import torch

from export.reduction.calibration import attention_statistics
from export.reduction.lowrank import blocks, query_key_factors, value_output_factors
from export.reduction.states import embedded, layers_of, relative_error
from export.reduction.sublayers import AttentionReducer, with_attention
from tests.support.reduction_data import batches, model


@pytest.fixture(scope="module")
def calibrated():
    """A layer, what it reads, the batches and its statistics."""
    classifier, data = model(), batches(rows=96)
    states = embedded(classifier.transformer, data)
    layer = layers_of(classifier.transformer)[0]
    return layer, states, data, attention_statistics(layer, states, data)[0]


def samples(*shape):
    return torch.randn(*shape, dtype=torch.float64) @ torch.randn(shape[-1], shape[-1], dtype=torch.float64)


def test_factors_of_full_rank_change_nothing():
    torch.manual_seed(0)
    S_q, S_k, C = (rows.transpose(1, 2) @ rows / 100 for rows in (samples(3, 100, 8) for _ in range(3)))
    queries_keys = query_key_factors(S_q, S_k, 8)
    one = torch.eye(8, dtype=torch.float64).expand(3, 8, 8)
    torch.testing.assert_close(queries_keys.left @ queries_keys.right.transpose(1, 2), one)
    W_O = torch.randn(3, 8, 20, dtype=torch.float64)
    values = value_output_factors(C, W_O, 8)
    torch.testing.assert_close(values.left @ values.right, W_O)
    assert queries_keys.error.abs().max() < 1e-12
    assert values.error.abs().max() < 1e-12


@pytest.mark.parametrize("rank", [1, 3, 7])
def test_predicted_error_of_logits_is_that_of_all_pairs(rank):
    torch.manual_seed(1)
    q, k = samples(2, 60, 8), samples(2, 50, 8)
    k = k - k.mean(dim=1, keepdim=True)
    S_q, S_k = q.transpose(1, 2) @ q / 60, k.transpose(1, 2) @ k / 50
    F, G, error = query_key_factors(S_q, S_k, rank, ridge=0.0)
    lost = q @ k.transpose(1, 2) - (q @ F) @ (k @ G).transpose(1, 2)
    torch.testing.assert_close(lost.square().mean(dim=(1, 2)), error)


@pytest.mark.parametrize("rank", [1, 3, 7])
def test_predicted_error_of_a_heads_output_is_measured(rank):
    torch.manual_seed(2)
    o, W_O = samples(2, 60, 8), torch.randn(2, 8, 20, dtype=torch.float64)
    E, W_small, error = value_output_factors(o.transpose(1, 2) @ o / 60, W_O, rank, ridge=0.0)
    lost = o @ W_O - o @ E @ W_small
    torch.testing.assert_close(lost.square().sum(dim=2).mean(dim=1), error)


def test_heads_that_return_nothing_stay_finite():
    zero = torch.zeros(1, 8, 8, dtype=torch.float64)
    W_O = torch.randn(1, 8, 20, dtype=torch.float64)
    for factors in (query_key_factors(zero, zero, 4), value_output_factors(zero, W_O, 4)):
        assert all(torch.isfinite(part).all() for part in factors)


def test_blocks_are_on_the_diagonal():
    parts = torch.randn(3, 2, 4)
    assert torch.equal(blocks(parts), torch.block_diag(*parts))


@pytest.mark.parametrize("architecture", ["bert", "gpt2"])
def test_full_rank_reproduces_an_attention(architecture):
    classifier, data = model(architecture=architecture), [batch._replace(segments=None) for batch in batches()]
    states = embedded(classifier.transformer, data)
    layer = layers_of(classifier.transformer)[0]
    statistics, wanted = attention_statistics(layer, states, data)
    reduced = AttentionReducer(layer.attention, statistics).reduced(4, 8)
    found = with_attention(layer, reduced).after_attention(states[0], data[0].mask)
    torch.testing.assert_close(found, wanted[0], rtol=0, atol=1e-5)
    # b_V has gone into b_O, and b_K nowhere.
    assert not reduced.module.v_proj.bias.any()
    assert not reduced.module.k_proj.bias.any()
    assert reduced.output_error == pytest.approx(0, abs=1e-12)
    assert reduced.logits_error == 0


def test_biases_of_keys_count_for_nothing(calibrated):
    layer, states, data, statistics = calibrated
    wanted = AttentionReducer(layer.attention, statistics).reduced(4, 5).module
    other = model().transformer.layers[0]
    with torch.no_grad():
        other.attention.k_proj.bias += 3
    shifted, _ = attention_statistics(other, states, data)
    found = AttentionReducer(other.attention, shifted).reduced(4, 5).module
    x, mask = states[0], data[0].mask
    torch.testing.assert_close(found(x, mask)[0], wanted(x, mask)[0], rtol=1e-4, atol=1e-4)


def test_scale_of_the_new_logits_may_be_chosen(calibrated):
    layer, states, data, statistics = calibrated
    reducer = AttentionReducer(layer.attention, statistics)
    one, other = reducer.reduced(4, 5).module, reducer.reduced(4, 5, scale=1.0).module
    assert (one.scale, other.scale) == (5**-0.5, 1.0)
    torch.testing.assert_close(one(states[0], data[0].mask)[0], other(states[0], data[0].mask)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rank", [6, 4, 2])
def test_calibration_beats_the_weights_alone_which_beat_a_slice(calibrated, rank):
    layer, states, data, statistics = calibrated
    errors = {}
    for method in ("calibrated", "weights", "slice"):
        reduced = AttentionReducer(layer.attention, statistics, method).reduced(4, rank)
        measured = relative_error(layer, with_attention(layer, reduced), "attention", states, data)
        errors[method] = (reduced.logits_error, reduced.output_error, measured)
    for better, worse in (("calibrated", "weights"), ("weights", "slice")):
        assert errors[better] < errors[worse], errors
        assert errors[better][1] < errors[worse][1], errors
    assert errors["calibrated"][2] < min(errors["weights"][2], errors["slice"][2]), errors
