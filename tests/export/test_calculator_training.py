"""The calculators' networks and their training."""

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from edge.bundles.expression import tokenize
from export.errors import TrainingError
from export.papers.calculator.networks import (
    NETWORKS,
    EncoderLayer,
    FeedForward,
    Gate,
    Oracle,
    Recurrent,
    Regressor,
    TermNetwork,
    create,
)
from export.papers.calculator.specs import NAMES, SPECS
from export.papers.calculator.train import CalculatorObjective, train_run
from export.training.optimizers import Optimizers
from export.training.recipe import Recipe, learning_rate
from export.training.trainer import clip, train
from tests.support.task_data import Seen

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
    "calculator-rnn-prelu": 218_698,
    "calculator-lstm": 6_511,
    "calculator-lstm-public": 6_511,
    "calculator-lstm128": 83_329,
    "calculator-bilstm18": 4_285,
    "calculator-bilstm": 50_561,
    "calculator-gru": 5_216,
    "calculator-transformer4": 38_209,
    "calculator-transformer5": 498_241,
    "calculator-transformer0": 18_915_841,
}


def test_the_numbers_of_parameters_are_those_of_the_papers():
    assert {name: create(name, 0).parameter_count for name in NETWORKS} == PARAMETERS
    assert tuple(NETWORKS) == NAMES


def test_the_oracle_is_exact_up_to_its_largest_operand():
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


def test_states_of_an_rnn_with_a_prelu_are_those_of_the_papers_equation():
    layer, x = random_recurrent("PReLU")
    nn.init.normal_(layer.slopes)
    ((w_xh, w_hh, b_h),) = gates(layer, 0)
    state, expected = torch.zeros(4, 5), []
    for token in x.unbind(1):
        inside = token @ w_xh.T + state @ w_hh.T + b_h
        state = torch.where(inside > 0, inside, layer.slopes[0] * inside)
        expected.append(state)
    torch.testing.assert_close(layer(x), torch.stack(expected, dim=1))


def test_the_last_layer_computes_only_the_token_that_is_read():
    layer = EncoderLayer(32, 8, 128)
    x = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(layer(x, queries=1), layer(x)[:, :1])


SHORT = Recipe(epochs=3, peak_learning_rate=1e-3, patience=10)


def fit(model, recipe, learnt, val, *, seed, **options):
    return train(CalculatorObjective(model, learnt, val, seed=seed), recipe, seed=seed, **options)


def test_patience_stops_the_run_and_the_best_weights_are_restored(splits):
    seen = Seen()
    model = create("calculator-gate", 0)
    recipe = Recipe(epochs=40, peak_learning_rate=0.3, patience=3)  # a rate at which the loss rises and falls
    fitted = fit(model, recipe, splits["train"], splits["val"], seed=0, observer=seen)
    error = np.abs(model.predict(splits["val"].tokens)[:, 0] - splits["val"].truth).mean()
    epochs = len(fitted.scores)
    assert epochs == fitted.best_epoch + recipe.patience < recipe.epochs
    assert [epoch.number for epoch in seen.epochs] == list(range(1, epochs + 1))
    assert error == pytest.approx(seen.epochs[fitted.best_epoch - 1].score.printed, rel=1e-5)


def test_the_lstm_of_the_papers_code_learns_a_resample_in_one_order_and_is_scored_by_it(splits, tmp_path):
    seen, model, learnt = Seen(), create("calculator-lstm-public", 3), splits["train"].resampled(3)
    train_run("calculator-lstm-public", tmp_path / "run", seed=3, epochs=2, observer=seen)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-7)
    for epoch in seen.epochs:
        total = 0.0
        for rows in torch.arange(len(learnt.truth)).split(32):
            errors = model(torch.from_numpy(learnt.tokens)[rows])[:, 0] - torch.from_numpy(learnt.truth)[rows]
            optimizer.zero_grad()
            errors.square().mean().backward()
            optimizer.step()
            total += float(errors.detach().square().sum())
        assert epoch.score.value == pytest.approx(-total / len(learnt.truth), rel=1e-3)


def test_the_lstm_of_the_papers_code_stops_after_five_epochs_that_gain_too_little(splits):
    model, split = create("calculator-lstm-public", 0), splits["train"]
    truth = model.predict(split.tokens[:32])[:, 0] + 0.1  # the loss begins at 0.01
    few = msgspec.structs.replace(split, tokens=split.tokens[:32], truth=truth)
    fitted = fit(model, SPECS["calculator-lstm-public"].recipe, few, None, seed=0)
    kept, losses = 0, [-score for score in fitted.scores]
    for epoch, loss in enumerate(losses):
        kept = epoch if loss < losses[kept] - 1e-3 else kept
    assert fitted.best_epoch == kept + 1 == len(losses) - 5
    assert min(losses) < losses[kept]


def test_weights_depend_on_the_seed_alone(splits):
    def weights(name, seed, recipe=None):
        model = create(name, seed)
        if recipe:
            fit(model, recipe, splits["train"], splits["val"], seed=seed)
        return nn.utils.parameters_to_vector(model.parameters())

    for name, recipe in (("calculator-gate", None), ("calculator-transformer4", None), ("calculator-fnn2", SHORT)):
        torch.manual_seed(99)
        state = torch.get_rng_state()
        first, again, other = (weights(name, seed, recipe) for seed in (5, 5, 6))
        assert (torch.equal(first, again), torch.equal(first, other)) == (True, False)
        assert recipe or torch.equal(torch.get_rng_state(), state)


class Exploding(Regressor):
    """A network whose output overflows after a few steps."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x[:, :1] * self.weight.exp().exp().exp().exp()


def test_a_loss_that_is_not_finite_ends_the_run(splits):
    recipe = Recipe(epochs=3, peak_learning_rate=1.0, patience=3)
    with pytest.raises(TrainingError, match=r"(loss|norm) in step \d+: got (nan|inf), expected a finite number"):
        fit(Exploding(), recipe, splits["train"], splits["val"], seed=0)


def test_muon_has_all_matrices_but_the_last_of_a_dense_network_and_refuses_one_without(splits):
    recipe = Recipe(epochs=1, peak_learning_rate=1e-3, optimizer="muon")

    def by_muon(model):
        objective = CalculatorObjective(model, splits["train"], splits["val"], seed=0)
        _, state = Optimizers(objective, recipe).state_dict()
        return len(state["param_groups"][0]["params"])

    assert by_muon(create("calculator-fnn2", 0)) == 1
    assert by_muon(FeedForward(units=[4, 4, 4])) == 3
    with pytest.raises(TrainingError, match=r"muon: got a Exploding without hidden matrices.*Take another optimizer"):
        by_muon(Exploding())


def test_learning_rates_of_recipes():
    recipe, peak = SPECS["calculator-transformer4"].recipe, 1.4189e-3
    progress = (0.0, 10.5 / 200, 21 / 200, (21 + 179 / 2) / 200, 1.0)
    assert [learning_rate(recipe, one) for one in progress] == pytest.approx([peak * x for x in (0, 0.5, 1, 0.55, 0.1)])
    assert {learning_rate(SHORT, one) for one in (0.0, 0.3, 1.0)} == {1e-3}


def test_clipping_is_per_tensor():
    large, small = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
    large.grad, small.grad = torch.tensor([3.0, 4.0, 0.0]), torch.tensor([0.3, 0.0, 0.0])
    norm = clip([large, small], Recipe(epochs=1, peak_learning_rate=1.0, clip_norm=1.0, clips="each"))
    assert norm == pytest.approx(np.hypot(5, 0.3))
    torch.testing.assert_close(large.grad, torch.tensor([0.6, 0.8, 0.0]))
    torch.testing.assert_close(small.grad, torch.tensor([0.3, 0.0, 0.0]))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["calculator-fnn2", "calculator-transformer4"])
def test_the_whole_recipe_beats_the_papers_error(name, tmp_path):
    metrics = train_run(name, tmp_path / name, seed=0)
    mae = next(measure.value for measure in metrics.measures if (measure.metric, measure.split) == ("mae", "in_range"))
    assert mae < SPECS[name].paper.mae_in_range
