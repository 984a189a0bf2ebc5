import copy

import numpy as np
import pytest
import torch
from torch import nn

from edge.bundles.expression import tokenize
from export.papers.calculator.networks import NETWORKS, EncoderLayer, Gate, Oracle, Recurrent, TermNetwork, create
from export.papers.calculator.specs import SPECS

#: Those of papers 000 and 001, of paper 000's text in the bidirectional LSTM's case, and of networks that are ours.
PARAMETERS = {
    "calculator-oracle": 511,
    "calculator-gate": 51,
    "calculator-softmax-gate": 116,
    "calculator-term-network": 129,
    "calculator-baseline": 1_501,
    "calculator-fnn2": 6_211,
    "calculator-fnn3": 8_893,
    "calculator-rnn2": 222_464,
    "calculator-lstm": 6_511,
    "calculator-bilstm": 50_561,
    "calculator-gru": 5_216,
    "calculator-transformer4": 38_209,
    "calculator-transformer5": 498_241,
    "calculator-transformer0": 18_915_841,
}


def test_the_numbers_of_parameters_are_those_of_the_papers():
    assert {name: spec.parameters for name, spec in SPECS.items()} == PARAMETERS
    assert {name: create(name, 0).parameter_count for name in NETWORKS} == PARAMETERS
    scorers = create("calculator-transformer4", 0, adaptive="fixed").parameter_count
    assert scorers == PARAMETERS["calculator-transformer4"] + 3 * 408


def test_the_oracle_is_exact_up_to_its_largest_operand(splits):
    for split in splits.values():
        assert np.abs(Oracle().predict(split.tokens)[:, 0] - split.truth).max() == 0.0
    texts = ["1024", "-1024", "1024 - -1024", " + ".join(["1024"] * 8), " - ".join(["-1024"] * 8), "0 - 1023 + 1"]
    assert Oracle().predict(tokenize(texts))[:, 0].tolist() == [1024, -1024, 2048, 8192, 6144, -1022]
    assert Oracle().predict(tokenize(["0 + 2000"]))[0, 0] != 2000
    assert not any(parameter.requires_grad for parameter in Oracle().parameters())


@pytest.mark.parametrize("pooling", ["sum", "softmax"])
def test_the_gate_ignores_padding(pooling):
    model = Gate(pooling=pooling)
    with torch.no_grad():
        model.value.bias.fill_(3.0)  # so that an unmasked padding slot would count
        short = model(torch.from_numpy(tokenize(["2"])))
        torch.testing.assert_close(short, model.gate(torch.ones(1, 1)) * model.value(torch.full((1, 1), 2.0)))


def test_the_term_network_adds_the_values_of_its_terms():
    model = TermNetwork()
    with torch.no_grad():
        terms = model.term(torch.tensor([[1.0, 3.0], [0.0, -4.0]]))  # operator and operand
        torch.testing.assert_close(model(torch.from_numpy(tokenize(["3 - -4"])))[0], terms.sum(dim=0))


def random_recurrent(cell, bidirectional=False):
    """Return a recurrent layer of 5 units for 3 features with random biases, too, and tokens [4, 7, 3]."""
    torch.manual_seed(0)
    layer = Recurrent(cell, 3, 5, bidirectional)
    nn.init.normal_(layer.bias)
    return layer, torch.randn(4, 7, 3)


def gates(layer, *order):
    """Return weights, state weights and biases of each direction, with the gates in another order."""
    rows = [slice(5 * gate, 5 * gate + 5) for gate in order]
    parts = (layer.input_weight, layer.state_weight, layer.bias)
    return [[torch.cat([part[direction][row] for row in rows]) for part in parts] for direction in range(len(parts[0]))]


def torchs(kind, layer, x, *order):
    """Return the states of one of torch's layers with the same weights and without its second bias."""
    other = kind(3, 5, batch_first=True, bidirectional=layer.directions == 2)
    for suffix, parts in zip(("", "_reverse"), gates(layer, *order), strict=False):
        for name, part in zip(("weight_ih_l0", "weight_hh_l0", "bias_ih_l0"), parts, strict=True):
            getattr(other, name + suffix).data.copy_(part)
        nn.init.zeros_(getattr(other, f"bias_hh_l0{suffix}"))
    return other(x)[0]


@pytest.mark.parametrize("bidirectional", [False, True])
def test_states_of_an_rnn_and_an_lstm_are_torchs(bidirectional):
    for cell, kind, order in (("RNN", nn.RNN, (0,)), ("LSTM", nn.LSTM, (0, 2, 3, 1))):  # torch's order is i, f, c, o
        layer, x = random_recurrent(cell, bidirectional)
        torch.testing.assert_close(layer(x), torchs(kind, layer, x, *order))


def test_states_of_a_gru_are_those_of_the_papers_equations():
    layer, x = random_recurrent("GRU")
    (weights,) = gates(layer, 0, 1, 2)
    (w_z, w_r, w_h), (u_z, u_r, u_h), (b_z, b_r, b_h) = (part.chunk(3) for part in weights)
    state, expected = torch.zeros(4, 5), []
    for token in x.unbind(1):
        z = torch.sigmoid(state @ u_z.T + token @ w_z.T + b_z)  # (7)
        r = torch.sigmoid(state @ u_r.T + token @ w_r.T + b_r)  # (8)
        candidate = torch.tanh((r * state) @ u_h.T + token @ w_h.T + b_h)  # (9)
        state = (1 - z) * state + z * candidate  # (10)
        expected.append(state)
    torch.testing.assert_close(layer(x), torch.stack(expected, dim=1))


def test_a_gru_of_torch_gives_z_to_the_old_state_and_resets_after_the_product():
    layer, x = random_recurrent("GRU")
    swapped = copy.deepcopy(layer)
    for part in (swapped.input_weight, swapped.state_weight, swapped.bias):
        part.data[:, :5] *= -1  # 1 - sigmoid(v) is sigmoid(-v)
    assert not torch.allclose(layer(x), torchs(nn.GRU, swapped, x, 1, 0, 2))
    for one in (layer, swapped):  # with a diagonal matrix, the order of reset and product does not matter
        one.state_weight.data[0, 10:] = torch.diag(torch.arange(1.0, 6.0))
    torch.testing.assert_close(layer(x), torchs(nn.GRU, swapped, x, 1, 0, 2))


def test_the_last_layer_computes_only_the_token_that_is_read():
    layer = EncoderLayer(32, 8, 128, None)
    x = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(layer(x, queries=1)[0], layer(x)[0][:, :1])
