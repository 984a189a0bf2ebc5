import math

import msgspec
import numpy as np
import pytest
import torch

from export.calculator.evaluate import PAPER
from export.calculator.models import MODELS, Regressor, create
from export.calculator.train import RECIPES, CalculatorObjective, recipe_of, train_run
from export.checkpoint import load
from export.errors import TrainingError
from export.training.recipe import Recipe, learning_rate
from export.training.trainer import clip, train

SHORT = Recipe(epochs=3, peak_learning_rate=1e-3, patience=10)


def fit(model, recipe, train_split, val, *, seed, **options):
    return train(CalculatorObjective(model, train_split, val, seed=seed), recipe, seed=seed, **options)


def test_fnn2_learns_within_ten_epochs(splits):
    model = create("calculator-fnn2", 0)
    recipe = recipe_of("calculator-fnn2", epochs=10)
    assert fit(model, recipe, splits["train"], splits["val"], seed=0).best_epoch == 10
    error = np.abs(model.predict(splits["in_range"].tokens)[:, 0] - splits["in_range"].truth).mean()
    assert error < 0.2 * np.abs(splits["in_range"].truth).mean()


@pytest.mark.parametrize("adaptive", ["literal", "fixed"])
def test_transformer4_learns(adaptive, splits, runs):
    untrained = create("calculator-transformer4", 0, adaptive=adaptive)
    trained = load(runs / adaptive / "calculator-transformer4", MODELS)[0]
    before, after = (
        np.square(m.predict(splits["val"].tokens)[:, 0] - splits["val"].truth) for m in (untrained, trained)
    )
    assert after.mean() < before.mean()


def test_the_same_seed_gives_the_same_weights(splits):
    def weights(seed):
        model = create("calculator-fnn2", 0)
        fit(model, SHORT, splits["train"], splits["val"], seed=seed)
        return torch.nn.utils.parameters_to_vector(model.parameters())

    assert torch.equal(weights(5), weights(5))
    assert not torch.equal(weights(5), weights(6))


def test_patience_stops_the_run_and_the_best_weights_are_restored(splits):
    seen = []
    model = create("calculator-gate", 0)
    recipe = Recipe(epochs=40, peak_learning_rate=0.3, patience=3)  # a rate at which the loss rises and falls
    fitted = fit(model, recipe, splits["train"], splits["val"], seed=0, on_epoch=seen.append)
    error = np.abs(model.predict(splits["val"].tokens)[:, 0] - splits["val"].truth).mean()
    epochs = len(fitted.scores)
    assert epochs == fitted.best_epoch + recipe.patience < recipe.epochs
    assert [epoch.number for epoch in seen] == list(range(1, epochs + 1))
    assert error == pytest.approx(seen[fitted.best_epoch - 1].score.printed, rel=1e-5)


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


def test_learning_rates():
    recipe, peak = RECIPES["calculator-transformer4"], 1.4189e-3
    progress = (0.0, 10.5 / 200, 21 / 200, (21 + 179 / 2) / 200, 1.0)
    assert [learning_rate(recipe, one) for one in progress] == pytest.approx([peak * x for x in (0, 0.5, 1, 0.55, 0.1)])
    assert {learning_rate(SHORT, one) for one in (0.0, 0.3, 1.0)} == {1e-3}


def test_recipes():
    assert recipe_of("calculator-oracle") is None
    assert recipe_of("calculator-transformer4").patience == 20
    assert recipe_of("calculator-transformer4", adaptive="fixed").patience == 200
    assert recipe_of("calculator-fnn2", epochs=7) == msgspec.structs.replace(RECIPES["calculator-fnn2"], epochs=7)


def test_clipping_is_per_tensor():
    large, small = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
    large.grad, small.grad = torch.tensor([3.0, 4.0, 0.0]), torch.tensor([0.3, 0.0, 0.0])
    norm = clip([large, small], Recipe(epochs=1, peak_learning_rate=1.0, clip_norm=1.0, clips="each"))
    assert norm == pytest.approx(math.hypot(5, 0.3))
    torch.testing.assert_close(large.grad, torch.tensor([0.6, 0.8, 0.0]))
    torch.testing.assert_close(small.grad, torch.tensor([0.3, 0.0, 0.0]))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["calculator-fnn2", "calculator-transformer4"])
def test_the_whole_recipe_beats_the_papers_error(name, tmp_path):
    metrics = train_run(name, tmp_path / name, seed=0)
    mae = next(measure.value for measure in metrics.measures if (measure.metric, measure.split) == ("mae", "in_range"))
    assert mae < PAPER[name]["mae", "in_range"]
