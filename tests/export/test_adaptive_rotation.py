import numpy as np
import pytest
import torch

from export.adaptive.rotation import rotated_model
from export.adaptive.scores import GivenScores, scored_attentions, scorers, with_scores
from export.errors import ReductionError
from export.tasks.objectives import outputs_of
from export.tasks.predictions import predict
from tests.support.reduction_data import batches, inputs, model


@pytest.fixture(scope="module")
def original():
    return model()


@pytest.fixture(scope="module")
def rotated(original):
    return rotated_model(original, batches())


@pytest.mark.parametrize("architecture", ["bert", "gpt2"])
def test_full_rank_reproduces_every_output(architecture):
    original = model(architecture=architecture).double()
    new = rotated_model(original, batches())
    for batch in batches(seed=1):  # other inputs than those of the calibration
        if architecture == "gpt2":
            batch = batch._replace(segments=None)
        torch.testing.assert_close(outputs_of(new, batch), outputs_of(original, batch), atol=1e-9, rtol=1e-7)
    assert not torch.equal(new.transformer.layers[0].attention.q_proj.weight, _first(original).q_proj.weight)


def test_the_first_coordinates_are_the_best(original, rotated):
    """Half of the coordinates in calibrated order answer more alike than half as they come."""
    rows = inputs(seed=2)
    wanted = predict(original, rows).logits
    half = {
        name: with_scores(one, "fixed", lambda attention, number: GivenScores(torch.full((4,), 0.5)))
        for name, one in (("as they come", original), ("ordered", rotated))
    }
    errors = {name: np.square(predict(one, rows).logits - wanted).mean() for name, one in half.items()}
    assert errors["ordered"] < errors["as they come"] / 2


def test_dropped_coordinates_are_replaced_by_their_mean(rotated):
    attention, sums, tokens = _first(rotated), 0.0, 0
    embed = rotated.transformer.embeddings
    for batch in batches():
        read = []
        handle = attention.output_proj.register_forward_hook(
            lambda module, inputs, output, read=read: read.append(inputs[0])
        )
        with torch.no_grad():
            attention(embed(batch.inputs, batch.segments), batch.mask)
        handle.remove()
        real = read[0][batch.mask.bool()]
        sums, tokens = sums + real.sum(dim=0), tokens + len(real)
    assert (sums / tokens).abs().max() < 1e-4


def test_scores_change_nothing_at_the_start(original, rotated):
    rows = inputs(seed=3)
    adaptive = with_scores(rotated, "fixed", scorers(0))
    np.testing.assert_allclose(predict(adaptive, rows).logits, predict(original, rows).logits, atol=2e-4)
    assert len(list(scored_attentions(adaptive))) == 2
    assert [p.shape for p in original.parameters()] == [p.shape for p in rotated.parameters()]


def test_scorers_depend_on_seed_and_layer_only(rotated):
    one, same, other = (with_scores(rotated, "fixed", scorers(seed)).state_dict() for seed in (0, 0, 1))
    names = [f"transformer.layers.{layer}.attention.scorer.layers.0.weight" for layer in (0, 1)]
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one[names[0]], other[names[0]])
    assert not torch.equal(one[names[0]], one[names[1]])
    models = [with_scores(rotated, "fixed", scorers(0, share=share)) for share in (1, 2, 4, 8)]
    assert [_first(one).scorer.layers[0].out_features for one in models] == [24, 12, 6, 3]


def test_broken_models_and_small_calibration_sets_are_rejected(original):
    broken = model()
    with torch.no_grad():
        broken.classifier.weight[0, 0] = torch.nan
    with pytest.raises(ReductionError, match="finite"):
        rotated_model(broken, batches())
    with pytest.raises(ReductionError, match="more than 48"):
        rotated_model(original, batches(rows=2))


def _first(one):
    return one.transformer.layers[0].attention
