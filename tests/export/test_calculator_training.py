import numpy as np
import pytest
import torch
from torch import nn

from export.errors import TrainingError
from export.papers.calculator.networks import NETWORKS, Regressor, create
from export.papers.calculator.specs import SPECS
from export.papers.calculator.train import CalculatorObjective, recipe_of, train_run
from export.training.checkpoint import load
from export.training.recipe import Recipe, learning_rate
from export.training.trainer import clip, train
from tests.support.task_data import Seen

SHORT = Recipe(epochs=3, peak_learning_rate=1e-3, patience=10)


def fit(model, recipe, learnt, val, *, seed, **options):
    return train(CalculatorObjective(model, learnt, val, seed=seed), recipe, seed=seed, **options)


def test_the_gate_learns_the_rule(splits, runs):
    model = load(runs / "calculator-gate", NETWORKS)[0]
    for split in splits.values():
        assert (np.rint(model.predict(split.tokens)[:, 0]) == split.truth).all()


@pytest.mark.parametrize("adaptive", ["literal", "fixed"])
def test_transformer4_learns(adaptive, splits, runs):
    trained = load(runs / adaptive / "calculator-transformer4", NETWORKS)[0]
    untrained, x = create("calculator-transformer4", 0, adaptive=adaptive), splits["val"]
    before, after = (np.square(m.predict(x.tokens)[:, 0] - x.truth).mean() for m in (untrained, trained))
    assert after < before


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


def test_recipes_and_learning_rates():
    assert recipe_of("calculator-oracle") is None
    assert [recipe_of("calculator-transformer4", adaptive=mode).patience for mode in (None, "fixed")] == [20, 200]

    recipe, peak = recipe_of("calculator-transformer4"), 1.4189e-3
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
