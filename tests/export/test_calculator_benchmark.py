import json
import math

import msgspec
import numpy as np
import pytest

from edge.errors import UsageError
from export.cli import train as train_command
from export.papers.calculator.baseline import baseline as baseline_command
from export.papers.calculator.benchmark import (
    BASELINE,
    FLOOR,
    Errors,
    baseline,
    definition,
    errors_of,
    measures_of,
    paper_long,
    paper_score,
    score,
)
from export.papers.calculator.networks import NETWORKS
from export.papers.calculator.train import train_run
from export.training.checkpoint import load
from tests.support.task_data import invoke


@pytest.fixture(scope="module")
def seeds(tmp_path_factory):
    """Runs of the baseline's network by its recipe, with two seeds; each takes three seconds."""
    root = tmp_path_factory.mktemp("baseline")
    for seed in (3, 4):
        train_run("calculator-baseline", root / f"seed{seed}", seed=seed)
    return [root / f"seed{seed}" for seed in (3, 4)]


def of_constant(splits, value):
    return {name: np.full(len(split.truth), value, np.float32) for name, split in splits.items()}


def test_errors_of_a_constant_are_those_by_hand(splits):
    found = errors_of(of_constant(splits, 0.0), splits)
    size = {name: np.abs(split.truth) for name, split in splits.items()}
    assert found.mae_in_range == pytest.approx(size["in_range"].mean())
    assert found.mae_4_terms == pytest.approx(size["long"][200:300].mean())
    assert found.mae_long == pytest.approx(size["long"][200:].mean())  # lengths have 100 items each
    assert found.mre_out_of_range == pytest.approx(1.0)
    zeros = (splits["in_range"].truth == 0).sum()
    assert found.mre_both == pytest.approx((1457 - zeros + 2048) / (1457 + 2048))
    large = [sum(map(abs, map(int, text.split()[::2]))) == 22 for text in splits["out_of_range"].expressions]
    assert sum(large) == 192
    assert found.mae_sum_22 == pytest.approx(size["out_of_range"][large].mean())


def test_scores_of_the_baseline_are_1_and_weigh_errors_as_documented():
    base = Errors(0.2, 2.5, 6.0, 0.3, 3.4, 3.3, 0.2)
    assert score(base, base) == pytest.approx(1.0)
    halved = msgspec.structs.replace(base, mae_long=3.0, mae_4_terms=1.65)
    assert score(halved, base) == pytest.approx(2**0.25)
    # Three ratios of 1 or 4, and that of the relative errors, which are of different items.
    assert paper_score(halved, base) == pytest.approx((1 + 1 + 4 + (0.2 / 0.3) ** 2) / 4)


def test_a_perfect_network_has_the_highest_score_instead_of_an_infinite_one(splits):
    exact = errors_of({name: split.truth for name, split in splits.items()}, splits)
    base = baseline().mean
    assert exact == Errors(*[0.0] * 7)
    ratios = [getattr(base, name) / FLOOR for name in ("mae_in_range", "mae_out_of_range", "mae_long")]
    assert score(exact, base) == pytest.approx(math.prod([*ratios, base.mre_out_of_range / FLOOR]) ** 0.25)
    below = msgspec.structs.replace(exact, mae_in_range=FLOOR / 2, mre_out_of_range=FLOOR / 3)
    assert (score(below, base), paper_score(below, base)) == (score(exact, base), paper_score(exact, base))


def test_intervals_of_the_scores_are_those_of_the_items(splits):
    generator = np.random.default_rng(1)
    truth = {name: split.truth for name, split in splits.items()}
    values = {name: one + generator.exponential(1.0, len(one)) for name, one in truth.items()}
    for measure in measures_of(values, splits):
        low, high = measure.interval
        assert low < measure.value < high
    found = measures_of(values, splits)[0]
    assert found.n == 1457 + 2048 + 500
    # All errors have the standard deviation 1 and the mean 1, so ln of a mean of n has about the error 1 / sqrt(n); the
    # two means out of range are of the same items, and relative errors there vary more.
    relative = np.abs(values["out_of_range"] - truth["out_of_range"]) / np.abs(truth["out_of_range"])
    spread = np.corrcoef(relative, np.abs(values["out_of_range"] - truth["out_of_range"]))[0, 1]
    apart = relative.std() / relative.mean()
    error = math.sqrt(1 / 1457 + 1 / 500 + (1 + apart**2 + 2 * spread * apart) / 2048) / 4
    low, high = np.log(found.interval)
    assert (high - low) / 2 == pytest.approx(1.96 * error, rel=0.1)


def test_the_papers_figure_for_long_expressions_follows_from_the_data_alone(splits, runs):
    exact = {name: split.truth for name, split in splits.items()}
    assert paper_long(exact, splits) == pytest.approx(6.166, abs=1e-3)
    # A network that errs by more than 3 on long expressions gets nearly the same.
    model = load(runs / "calculator-fnn2", NETWORKS)[0]
    values = {name: model.predict(split.tokens)[:, 0] for name, split in splits.items()}
    assert errors_of(values, splits).mae_long > 3
    assert paper_long(values, splits) == pytest.approx(6.166, abs=0.1)


def test_the_frozen_baseline_is_of_the_network_recipe_and_data_of_today():
    assert baseline().definition == definition(), f"write {BASELINE.name} again: fewheads calculator baseline"
    assert sorted(baseline().seeds) == list(range(10))
    for name, (low, high) in baseline().intervals.items():
        values = [getattr(errors, name) for errors in baseline().seeds.values()]
        assert getattr(baseline().mean, name) == pytest.approx(np.mean(values))
        assert low < np.mean(values) < high


def test_a_baseline_that_is_trained_anew_moves_the_papers_score_by_half():
    """By the paper's formula, one network's score depends on the seed of the baseline in the denominator."""
    seeds = baseline().seeds.values()
    network = Errors(0.028, 2.2, 4.7, 0.25, 3.0, 1.7, 0.13)  # about FNN2
    papers, ours = ([of(network, one) for one in seeds] for of in (paper_score, score))
    assert max(papers) / min(papers) > 1.5
    assert max(ours) / min(ours) < 1.25


def test_the_command_measures_the_runs_that_it_is_given(seeds, tmp_path, splits):
    printed = json.loads(invoke(baseline_command, *seeds, "--out", tmp_path / "baseline.json", "--json"))
    assert printed == json.loads((tmp_path / "baseline.json").read_text())
    model = load(seeds[1], NETWORKS)[0]
    values = {name: model.predict(split.tokens)[:, 0] for name, split in splits.items()}
    assert printed["seeds"]["4"] == msgspec.to_builtins(errors_of(values, splits))
    # Both are seeds of the frozen baseline, too, if this processor rounds like the one that trained it.
    assert printed["mean"]["mae_in_range"] == pytest.approx(baseline().mean.mae_in_range, rel=0.3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["fnn2", "fnn2"], r"RUN .*fnn2: got calculator-fnn2, trained by .*, expected calculator-baseline, trained by"),
        (["seed3"], r"RUN: got one run, expected two or more seeds\. Give more"),
        (["seed3", "seed4", "seed3"], r"RUN .*seed3: got seed 3, as in .*, expected runs .* differ in their seed"),
    ],
)
def test_other_runs_are_no_baseline(given, message, seeds, runs, tmp_path):
    places = {"fnn2": runs / "calculator-fnn2", "seed3": seeds[0], "seed4": seeds[1]}
    with pytest.raises(UsageError, match=message):
        invoke(baseline_command, *(places[name] for name in given), "--out", tmp_path / "baseline.json")
    assert not (tmp_path / "baseline.json").exists()


def test_training_prints_and_keeps_the_scores(tmp_path):
    printed = invoke(train_command, "calculator-fnn2", "--epochs", 1, "--out", tmp_path)
    metrics = json.loads((tmp_path / "calculator-fnn2" / "metrics.json").read_text())
    found = {one["metric"]: one["value"] for one in metrics["measures"] if one["split"] == "benchmark"}
    assert f"Score: {found['score']:.4g}; 1 is the baseline. By the paper's formula: " in printed
    assert f"{found['paper_score']:.4g}, where the paper prints 6.635." in printed
