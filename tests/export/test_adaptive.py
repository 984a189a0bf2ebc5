import numpy as np
import pytest
import torch

from edge.errors import UsageError
from export.errors import ReductionError
from export.finetune.objectives import outputs_of
from export.finetune.predictions import predict
from export.finetune.recipe import Recipe
from export.models.attention import MultiHeadAttention
from export.papers.adaptive.scores import (
    GivenScores,
    GlobalScores,
    GroupedAttention,
    SkippableAttention,
    rotated_model,
    scored_attentions,
    scorers,
    shrunk_model,
    with_scores,
)
from export.papers.adaptive.term import (
    SHARE,
    Budget,
    CostCurve,
    Penalty,
    Target,
    adaptive_term,
    measured_curve,
    temperature,
)
from export.papers.adaptive.use import head_use
from tests.support.reduction_data import batches, config, inputs, model
from tests.support.task_data import Seen, accuracy_on, fine_tune, make_classifier, same

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
    module, gradients = MultiHeadAttention(16, 4, 64, "budget").train(), []
    for module.rank_temperature in (8.0, 0.1):
        scores = torch.full((1, 4), 0.3, requires_grad=True)
        module.keep(scores)[0, :, 24].sum().backward()
        gradients.append(scores.grad)
    for target in (0.4, 1.1):
        with pytest.raises(UsageError, match=r"got .*, expected 0\.500, a layer without heads, to 1"):
            Budget(CURVE, target)
    assert (gradients[0] > gradients[1]).all(), "warm gates have a gradient some way beyond the last coordinate"


@pytest.mark.slow
def test_a_measured_curve_rises(tmp_path):
    measured = measured_curve(config(), 16, cache=tmp_path / "latency.json", calls=20)
    assert (measured.shares, list(measured.costs)) == ((0, 0.25, 0.5, 0.75, 1), sorted(measured.costs))
    assert 0 < measured.costs[0] < measured.costs[-1] == 1


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
    assert not same(new, original)


def test_the_first_coordinates_are_the_best(original, rotated):
    """Half of the coordinates in calibrated order change the outputs less than half in the original order."""
    rows = inputs(seed=2)
    wanted = predict(original, rows).logits
    half = {
        name: with_scores(one, "fixed", lambda attention, number: GivenScores(torch.full((4,), 0.5)))
        for name, one in (("as they come", original), ("ordered", rotated))
    }
    errors = {name: np.square(predict(one, rows).logits - wanted).mean() for name, one in half.items()}
    assert errors["ordered"] < errors["as they come"] / 2


def test_dropped_coordinates_are_replaced_by_their_mean(rotated):
    attention, sums, tokens = rotated.transformer.layers[0].attention, 0.0, 0
    embed = rotated.transformer.embeddings
    for batch in batches():
        read = []
        handle = attention.output_proj.register_forward_hook(lambda _, rows, output, read=read: read.append(rows[0]))
        with torch.no_grad():
            attention(embed(batch.inputs, batch.segments), batch.mask)
        handle.remove()
        real = read[0][batch.mask.bool()]
        sums, tokens = sums + real.sum(dim=0), tokens + len(real)
    assert (sums / tokens).abs().max() < 1e-4


def test_scorers_depend_on_seed_and_layer_only(rotated):
    one, same, other = (with_scores(rotated, "fixed", scorers(seed)).state_dict() for seed in (0, 0, 1))
    names = [f"transformer.layers.{layer}.attention.scorer.layers.0.weight" for layer in (0, 1)]
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one[names[0]], other[names[0]])
    assert not torch.equal(one[names[0]], one[names[1]])
    models = [with_scores(rotated, "fixed", scorers(0, share=share)) for share in (1, 2, 4, 8)]
    assert [one.transformer.layers[0].attention.scorer.layers[0].out_features for one in models] == [24, 12, 6, 3]


def test_broken_models_and_small_calibration_sets_are_rejected(original):
    broken = model()
    with torch.no_grad():
        broken.classifier.weight[0, 0] = torch.nan
    with pytest.raises(ReductionError, match="finite"):
        rotated_model(broken, batches())
    with pytest.raises(ReductionError, match="more than 48"):
        rotated_model(original, batches(rows=2))


@pytest.fixture(scope="module")
def narrow():
    return rotated_model(model(head_dim=16), batches())


@pytest.mark.parametrize(
    ("scores", "widths"),
    [([0.9] * 4, [16]), ([0.9, 0.1, 0.45, 0.9], [8, 16]), ([0.06] * 4, [8])],  # one coordinate, in a matrix of 8
)
def test_smaller_matrices_return_the_same(narrow, scores, widths):
    masked = with_scores(narrow, "fixed", lambda attention, number: GivenScores(torch.tensor(scores))).eval()
    small = shrunk_model(masked)
    rows = inputs(seed=4)
    np.testing.assert_allclose(predict(small, rows).logits, predict(masked, rows).logits, atol=1e-5)
    attention = small.transformer.layers[0].attention
    groups = attention.groups if isinstance(attention, GroupedAttention) else [attention]
    assert ([group.head_dim for group in groups], sum(group.num_heads for group in groups)) == (widths, 4)


@pytest.mark.parametrize("passes", [True, False])
def test_a_gate_folds_into_an_attention_or_a_constant(narrow, passes):
    gated = shrunk_model(narrow)  # a copy
    layer = gated.transformer.layers[1]
    layer.attention = SkippableAttention(layer.attention, torch.arange(24) / 24)
    layer.attention.scorer.logits.data.fill_(1.0 if passes else -1.0)
    small = shrunk_model(gated)
    rows = inputs(seed=5)
    np.testing.assert_allclose(predict(small, rows).logits, predict(gated.eval(), rows).logits, atol=1e-5)
    assert isinstance(small.transformer.layers[1].attention, MultiHeadAttention if passes else type(None))


def test_scores_that_depend_on_the_input_are_rejected(narrow):
    with pytest.raises(ReductionError, match="HeadScorer in mode fixed"):
        shrunk_model(with_scores(narrow, "fixed", scorers(0)))


RECIPE = Recipe(epochs=2, batch_size=32, peak_learning_rate=2e-3)


@pytest.fixture(scope="module")
def learnt(train, holdout):
    dense = make_classifier()
    recipe = Recipe(epochs=3, batch_size=32, peak_learning_rate=2e-2)
    fine_tune(dense, train, recipe, evaluate=accuracy_on(dense, holdout))
    return rotated_model(dense, [train.batch(np.arange(64))])


def trained(learnt, train, holdout, mode, how, recipe=RECIPE, scorer=None, **options):
    model = with_scores(learnt, mode, scorer or scorers(0))
    before = head_use(model, holdout)
    with adaptive_term(model, how) as term:
        tuned = fine_tune(model, train, recipe, evaluate=accuracy_on(model, holdout), extra=term, **options)
    return model, before, head_use(model, holdout), tuned


@pytest.mark.parametrize(
    ("how", "least", "most"), [(Penalty("fixed", weight=0.1), -1, -0.1), (Penalty("literal"), 0.02, 1)]
)
def test_the_repaired_loss_lowers_scores_and_the_papers_raises_them(learnt, train, holdout, how, least, most):
    _, before, after, _ = trained(learnt, train, holdout, how.mode, how)
    assert (len(before.places), len(before.places[0])) == (2, holdout.lengths.max())
    assert least < np.mean(after.scores) - np.mean(before.scores) < most
    kept = np.mean(before.kept), np.mean(after.kept)
    assert kept == (1, 1) if how.mode == "literal" else kept[1] <= kept[0]


@pytest.mark.parametrize(
    ("scorer", "epochs", "rate"), [(None, 6, 30), (lambda attention, _: GlobalScores(attention.num_heads), 4, 100)]
)
def test_a_budget_reaches_its_target(learnt, train, holdout, scorer, epochs, rate):
    recipe = Recipe(epochs=epochs, batch_size=32, peak_learning_rate=2e-3)
    how = Target(SHARE, 0.6, rate=rate)
    model, _, after, tuned = trained(learnt, train, holdout, "budget", how, recipe, scorer, stop_below=0.0)
    assert np.mean(after.kept) == pytest.approx(0.6, abs=0.1)
    assert "budget" not in dict(model.named_children()), "it is part of the training only"
    if scorer is None:
        assert tuned.scores[-1] > 0.9
    else:
        assert (after.spread, after.places) == (pytest.approx(0, abs=1e-6), ())


def test_the_task_trains_the_scorer_in_the_modes_with_a_gradient(learnt, train):
    assert head_use(learnt, train) is None
    batch = train.batch(np.arange(16))
    for mode, expected in (("literal", False), ("fixed", True), ("budget", True)):
        model = with_scores(learnt, mode, scorers(0)).train()
        model.loss(outputs_of(model, batch), batch.targets).backward()
        gradients = [p.grad for a in scored_attentions(model) for p in a.scorer.parameters()]
        assert any(g is not None and g.abs().sum() > 0 for g in gradients) is expected


def test_an_interrupted_budget_ends_with_the_same_bits(learnt, train, holdout, tmp_path):
    how = Target(SHARE, 0.6)
    whole = trained(learnt, train, holdout, "budget", how)[0]
    options = {"state": tmp_path / "state", "save_every": 3}
    with pytest.raises(KeyboardInterrupt):
        trained(learnt, train, holdout, "budget", how, observer=Seen(4), **options)
    assert same(whole, trained(learnt, train, holdout, "budget", how, **options)[0])


def test_a_run_stops_below_its_floor_and_keeps_the_epoch_before(train):
    model = make_classifier()
    scores = iter([0.9, 0.8, 0.6, 0.95])
    recipe = Recipe(epochs=4, batch_size=64)
    tuned = fine_tune(model, train, recipe, evaluate=lambda: next(scores), stop_below=0.7)
    assert (tuned.scores, tuned.best_epoch, tuned.steps) == ((0.9, 0.8, 0.6), 2, 15)
