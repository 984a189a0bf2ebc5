import numpy as np
import pytest
import torch

from export.adaptive.budget import SHARE
from export.adaptive.rotation import rotated_model
from export.adaptive.scores import GlobalScores, scored_attentions, scorers, with_scores
from export.adaptive.term import Penalty, Target, adaptive_term
from export.adaptive.use import head_use
from export.tasks.finetune import fine_tune
from export.tasks.objectives import outputs_of
from export.tasks.predictions import predict
from export.tasks.recipe import Recipe
from tests.support.task_data import accuracy_on, interrupt_at, make_classifier, same

RECIPE = Recipe(epochs=2, batch_size=32, peak_learning_rate=2e-3)


@pytest.fixture(scope="module")
def rotated(train, holdout):
    dense = make_classifier()
    recipe = Recipe(epochs=3, batch_size=32, peak_learning_rate=2e-2)
    fine_tune(dense, train, recipe, seed=0, evaluate=accuracy_on(dense, holdout))
    return rotated_model(dense, [train.batch(np.arange(64))])


def trained(rotated, train, holdout, mode, how, recipe=RECIPE, scorer=None, **options):
    model = with_scores(rotated, mode, scorer or scorers(0))
    before = head_use(model, holdout)
    with adaptive_term(model, how) as term:
        tuned = fine_tune(model, train, recipe, seed=0, evaluate=accuracy_on(model, holdout), extra=term, **options)
    return model, before, head_use(model, holdout), tuned


@pytest.mark.parametrize(
    ("how", "least", "most"), [(Penalty("fixed", weight=0.1), -1, -0.1), (Penalty("literal"), 0.02, 1)]
)
def test_the_repaired_loss_lowers_scores_and_the_papers_raises_them(rotated, train, holdout, how, least, most):
    _, before, after, _ = trained(rotated, train, holdout, how.mode, how)
    assert least < np.mean(after.scores) - np.mean(before.scores) < most
    kept = np.mean(before.kept), np.mean(after.kept)
    assert kept == (1, 1) if how.mode == "literal" else kept[1] <= kept[0]


def globally(attention, number):
    return GlobalScores(attention.num_heads)


@pytest.mark.parametrize(("scorer", "epochs", "rate"), [(None, 6, 30), (globally, 4, 100)])
def test_a_budget_reaches_its_target(rotated, train, holdout, scorer, epochs, rate):
    recipe = Recipe(epochs=epochs, batch_size=32, peak_learning_rate=2e-3)
    how = Target(SHARE, 0.6, rate=rate)
    model, _, after, tuned = trained(rotated, train, holdout, "budget", how, recipe, scorer, stop_below=0.0)
    assert np.mean(after.kept) == pytest.approx(0.6, abs=0.1)
    assert "budget" not in dict(model.named_children()), "it is part of the training only"
    if scorer is None:
        assert tuned.scores[-1] > 0.9
    else:
        assert (after.spread, after.places) == (pytest.approx(0, abs=1e-6), ())


def test_the_task_trains_the_scorer_in_the_modes_with_a_gradient(rotated, train):
    batch = train.batch(np.arange(16))
    for mode, expected in (("literal", False), ("fixed", True), ("budget", True)):
        model = with_scores(rotated, mode, scorers(0)).train()
        model.loss(outputs_of(model, batch), batch.targets).backward()
        gradients = [p.grad for a in scored_attentions(model) for p in a.scorer.parameters()]
        assert any(g is not None and g.abs().sum() > 0 for g in gradients) is expected


def test_padding_changes_neither_scores_nor_answers(rotated, train):
    model = with_scores(rotated, "budget", scorers(0, pooled=True)).eval()
    alone = train.batch(np.array([0]))
    longest = int(train.lengths.argmax())
    assert train.lengths[0] < train.lengths[longest]
    together = train.batch(np.array([0, longest]))
    with torch.no_grad():
        torch.testing.assert_close(outputs_of(model, alone)[0], outputs_of(model, together)[0])


@pytest.mark.parametrize("stop", [4, 13])
def test_an_interrupted_budget_ends_with_the_same_bits(stop, rotated, train, holdout, tmp_path):
    how = Target(SHARE, 0.6)
    whole = trained(rotated, train, holdout, "budget", how)[0]

    options = {"state": tmp_path / "state", "save_every": 3}
    with pytest.raises(KeyboardInterrupt):
        trained(rotated, train, holdout, "budget", how, on_step=interrupt_at(stop), **options)
    resumed = trained(rotated, train, holdout, "budget", how, **options)[0]
    assert same(whole, resumed)


def test_a_run_stops_below_its_floor_and_keeps_the_epoch_before(train):
    model = make_classifier()
    scores = iter([0.9, 0.8, 0.6, 0.95])
    recipe = Recipe(epochs=4, batch_size=64)
    tuned = fine_tune(model, train, recipe, seed=0, evaluate=lambda: next(scores), stop_below=0.7)
    assert (tuned.scores, tuned.best_epoch, tuned.steps) == ((0.9, 0.8, 0.6), 2, 15)
    tuned = fine_tune(model, train, recipe, seed=0, evaluate=lambda: 0.5, stop_below=0.7)
    assert (tuned.scores, tuned.best_epoch) == ((0.5,), 1)


def test_use_counts_places_and_real_tokens(rotated, train):
    model = with_scores(rotated, "fixed", scorers(0))
    use = head_use(model, train)
    assert len(use.places) == len(use.scores) == 2
    assert len(use.places[0]) == train.lengths.max()
    assert all(0.5 < score < 1 for layer in use.places for score in layer)
    assert head_use(rotated, train) is None
    assert len(predict(model, train).logits) == len(train.targets)
