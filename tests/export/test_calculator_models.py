import numpy as np
import pytest
import torch
from torch import nn

from edge.bundles.expression import tokenize
from export.calculator.models import MODELS, EncoderLayer, Gate, Oracle, Transformer4, create
from export.calculator.train import train_run
from export.checkpoint import load

PARAMETERS = dict(zip(MODELS, (511, 51, 6_211, 38_209), strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_parameters_and_output(name, splits):
    model = create(name, 0)
    assert model.parameter_count == PARAMETERS[name]
    value = model.predict(splits["val"].tokens[:3])
    assert (value.shape, value.dtype) == ((3, 1), np.float32)
    scorers = create("calculator-transformer4", 0, adaptive="fixed").parameter_count
    assert scorers == PARAMETERS["calculator-transformer4"] + 3 * 408


@pytest.mark.parametrize("name", ["calculator-gate", "calculator-fnn2", "calculator-transformer4"])
def test_initial_weights_depend_on_the_seed_alone(name):
    torch.manual_seed(99)
    state = torch.get_rng_state()
    first, again, other = (nn.utils.parameters_to_vector(create(name, seed).parameters()) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_oracle_is_exact_up_to_its_largest_operand(splits):
    for split in splits.values():
        assert np.abs(Oracle().predict(split.tokens)[:, 0] - split.truth).max() == 0.0
    texts = ["1024", "-1024", "1024 - -1024", " + ".join(["1024"] * 8), " - ".join(["-1024"] * 8), "0 - 1023 + 1"]
    assert Oracle().predict(tokenize(texts))[:, 0].tolist() == [1024, -1024, 2048, 8192, 6144, -1022]
    assert Oracle().predict(tokenize(["0 + 2000"]))[0, 0] != 2000
    assert not any(parameter.requires_grad for parameter in Oracle().parameters())


def test_the_gate_ignores_padding():
    model = Gate()
    with torch.no_grad():
        model.value.bias.fill_(3.0)  # so that an unmasked padding slot would count
        short = model(torch.from_numpy(tokenize(["2"])))
        gate = model.gate(torch.ones(1, 1))
        torch.testing.assert_close(short, gate * model.value(torch.full((1, 1), 2.0)))


def test_the_gate_learns_the_rule(splits, runs):
    model = load(runs / "calculator-gate", MODELS)[0]
    for split in splits.values():
        assert (np.rint(model.predict(split.tokens)[:, 0]) == split.truth).all()


def test_the_last_layer_computes_only_the_token_that_is_read():
    layer = EncoderLayer(32, 8, 128, None)
    x = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(layer(x, queries=1)[0], layer(x)[0][:, :1])


def test_lower_scores_keep_fewer_coordinates():
    model = Transformer4("fixed").eval()
    assert model.kept([torch.full((1, 8), 0.26)] * 3).mean() == 0.25  # floor(4 * 0.26) = 1 of 4
    assert model.kept([torch.full((1, 8), 0.9)] * 3).mean() == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_the_gate_learns_the_rule_from_every_seed(seed, tmp_path):
    metrics = train_run("calculator-gate", tmp_path / "run", seed=seed)
    assert {m.value for m in metrics.measures if m.metric == "exact_match"} == {1.0}
