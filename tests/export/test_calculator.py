import numpy as np
import onnx
import pytest
import torch
from torch import nn

from edge.bundles import expression
from edge.bundles.bundle import Bundle
from edge.bundles.expression import tokenize
from edge.bundles.golden import check_runner
from edge.runtimes.onnxruntime_runner import OnnxRuntimeRunner
from export.calculator import data
from export.calculator.bundle import export_run
from export.calculator.evaluate import PAPER, evaluate
from export.calculator.networks import EncoderLayer, Gate, Oracle, Regressor, create
from export.calculator.train import RECIPES, CalculatorObjective, recipe_of, train_run
from export.checkpoint import load
from export.errors import DataError, TrainingError
from export.training.recipe import Recipe, learning_rate
from export.training.trainer import clip, train
from tests.support.task_data import Seen


def test_splits_have_the_documented_sizes_starts_and_ranges(splits):
    assert {name: len(split.expressions) for name, split in splits.items()} == data.SIZES
    assert (splits["long"].expressions[0], splits["out_of_range"].expressions[0]) == ("-5 + 1", "-8 + -8 + -8")
    assert -15 <= splits["train"].truth.min() <= splits["train"].truth.max() <= 14
    means = [np.abs(splits[name].truth).mean() for name in ("in_range", "out_of_range")]
    assert means == pytest.approx([4.02, 9.75], abs=0.01)
    assert (np.diff(splits["long"].terms) >= 0).all()
    assert not splits["train"].has_unseen_operand.any()


def test_tokens_and_truth_match_the_expressions(splits):
    for split in splits.values():
        assert split.tokens.shape == (len(split.expressions), 15)
        assert split.tokens.dtype == split.truth.dtype == np.float32
        assert split.truth.tolist() == [expression.evaluate(text) for text in split.expressions]


def test_the_three_term_splits_share_nothing_and_cover_all(splits):
    parts = [set(splits[name].expressions) for name in ("train", "val", "in_range")]
    assert len(set.union(*parts)) == sum(map(len, parts)) == 10**3 * 4
    assert sum(text in parts[0] | parts[1] for text in splits["long"].expressions) == 49


def test_another_generator_is_rejected(monkeypatch):
    monkeypatch.setitem(data.SIZES, "long", 701)
    with pytest.raises(DataError, match=r"splits: got .*'long': 700.* expected .*'long': 701"):
        data.load.__wrapped__()


def constant(splits, value):
    """Return the measures of a predictor of one value, by metric and split."""
    measures = evaluate(lambda tokens: np.full((len(tokens), 1), value, np.float32), splits)
    return {(measure.metric, measure.split): measure for measure in measures}


def test_errors_of_a_constant_are_those_by_hand(splits):
    zero, truth = constant(splits, 0.0), splits["in_range"].truth
    maes = [zero["mae", split].value for split in ("in_range", "out_of_range", "long")]
    assert maes == pytest.approx([4.02, 9.75, 5.76], abs=0.01)
    assert zero["exact_match", "in_range"].value == pytest.approx((truth == 0).mean())
    relative = [abs(2.0 - y) / (abs(y) or 1.0) for y in truth.tolist()]  # zeros count as 1
    assert constant(splits, 2.0)["mre", "in_range"].value == pytest.approx(np.mean(relative))


def test_long_is_split_by_terms_and_by_the_unseen_operand(splits):
    found = constant(splits, 0.0)
    sizes = {split: measure.n for (metric, split), measure in found.items() if metric == "mae"}
    assert [sizes[f"long/{terms}"] for terms in range(2, 9)] == [100] * 7
    assert (sizes["long/4-8"], sizes["long/with_5"], sizes["long/without_5"]) == (500, 264, 436)
    by_terms = [found["mae", f"long/{terms}"].value for terms in range(4, 9)]
    assert found["mae", "long/4-8"].value == pytest.approx(np.mean(by_terms))


def test_intervals_are_those_of_the_mean_and_repeat(splits):
    found = constant(splits, 0.0)
    assert found == constant(splits, 0.0)
    low, high = found["mae", "out_of_range"].interval
    errors = np.abs(splits["out_of_range"].truth)
    assert (high - low) / 2 == pytest.approx(1.96 * errors.std() / np.sqrt(len(errors)), rel=0.1)
    # Of five lengths that are drawn apart, each 100 items: the mean has a fifth of the sum of variances.
    low, high = found["mae", "long/4-8"].interval
    long = splits["long"]
    variance = sum(np.abs(long.truth[long.terms == terms]).var() / 100 for terms in range(4, 9)) / 25
    assert (high - low) / 2 == pytest.approx(1.96 * np.sqrt(variance), rel=0.1)


PARAMETERS = dict(zip(NETWORKS, (511, 51, 6_211, 38_209), strict=True))


@pytest.mark.parametrize("name", NETWORKS)
def test_parameters_and_output(name, splits):
    model = create(name, 0)
    assert model.parameter_count == PARAMETERS[name]
    value = model.predict(splits["val"].tokens[:3])
    assert (value.shape, value.dtype) == ((3, 1), np.float32)
    scorers = create("calculator-transformer4", 0, adaptive="fixed").parameter_count
    assert scorers == PARAMETERS["calculator-transformer4"] + 3 * 408


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
        torch.testing.assert_close(short, model.gate(torch.ones(1, 1)) * model.value(torch.full((1, 1), 2.0)))


def test_the_gate_learns_the_rule(splits, runs):
    model = load(runs / "calculator-gate", NETWORKS)[0]
    for split in splits.values():
        assert (np.rint(model.predict(split.tokens)[:, 0]) == split.truth).all()


def test_the_last_layer_computes_only_the_token_that_is_read():
    layer = EncoderLayer(32, 8, 128, None)
    x = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(layer(x, queries=1)[0], layer(x)[0][:, :1])


SHORT = Recipe(epochs=3, peak_learning_rate=1e-3, patience=10)


def fit(model, recipe, learnt, val, *, seed, **options):
    return train(CalculatorObjective(model, learnt, val, seed=seed), recipe, seed=seed, **options)


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

    recipe, peak = RECIPES["calculator-transformer4"], 1.4189e-3
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
    assert mae < PAPER[name]["mae", "in_range"]


@pytest.fixture(scope="module")
def bundles(runs, tmp_path_factory):
    repository = tmp_path_factory.mktemp("repository")
    for run in (
        *(runs / name for name in NETWORKS if "transformer" not in name),
        runs / "fixed/calculator-transformer4",
    ):
        export_run(run, repository)
    return repository


@pytest.mark.parametrize("name", NETWORKS)
def test_the_bundle_passes_its_golden_check_and_describes_its_file(name, bundles):
    bundle = Bundle.open(bundles / f"{name}-1")
    manifest, artifact = bundle.manifest, bundle.artifact("tensorrt")
    assert artifact == bundle.artifact("onnxruntime")
    runner = OnnxRuntimeRunner((bundle.path / artifact.file).read_bytes(), subject=name)
    assert check_runner(runner, bundle.golden, artifact.tolerance, name, manifest.max_batch_size).passed
    assert (runner.inputs, runner.outputs) == (manifest.inputs, manifest.outputs)
    assert onnx.load(bundle.path / "model.onnx").opset_import[0].version == artifact.opset
    assert (manifest.name, manifest.version, manifest.max_batch_size) == (name, 1, 256)
    assert ([tier.name for tier in manifest.tiers], set(manifest.files)) == (["x1"], {"model.onnx", "golden.npz"})
    oracle = name == "calculator-oracle"
    assert (manifest.preprocess.max_abs_operand, manifest.provenance.seed) == ((1024, None) if oracle else (1e6, 0))
    adaptive = {"head_score", "kept_coordinates"} <= {measure.metric for measure in manifest.measures}
    assert adaptive is ("transformer" in name)


def test_the_golden_set_comes_from_torch_and_from_all_splits(bundles, runs, splits):
    golden = Bundle.open(bundles / "calculator-gate-1").golden
    texts = [text.decode() for text in golden.raw["expression"][:, 0]]
    assert golden.rows == len(texts) == 48
    for name in ("val", "in_range", "out_of_range", "long"):
        assert len({*texts} & {*splits[name].expressions}) >= 12
    np.testing.assert_array_equal(golden.inputs["x"], tokenize(texts))
    model, _, _ = load(runs / "calculator-gate", NETWORKS)
    np.testing.assert_array_equal(golden.outputs["value"], model.predict(golden.inputs["x"]))


def test_measures_are_of_the_exported_graph(bundles, runs):
    manifest = Bundle.open(bundles / "calculator-fnn2-1").manifest
    metrics = load(runs / "calculator-fnn2", NETWORKS)[2]
    trained = {(m.metric, m.split): m.value for m in metrics.measures}
    assert {(m.metric, m.split): m.value for m in manifest.measures} == pytest.approx(trained, rel=1e-4)
    assert manifest.measures != metrics.measures
