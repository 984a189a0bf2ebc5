"""The calculators' data, errors and scores, their comparison, and the documents' tables from committed records."""

import json
import math
import shutil

import msgspec
import numpy as np
import pytest
import scipy.stats

from edge.bundles import expression
from edge.errors import UsageError
from export.cli.calculator import calculator
from export.data import expressions as data
from export.errors import DataError
from export.papers.calculator import tables
from export.papers.calculator.benchmark import (
    FLOOR,
    Errors,
    baseline,
    definition,
    errors_of,
    evaluate,
    measured,
    paper_long,
    paper_score,
    score,
)
from export.papers.calculator.networks import NETWORKS
from export.papers.calculator.records import FROZEN, TrainingRecord, grouped, results_of
from export.papers.calculator.train import train_run
from export.papers.experiment import read_records
from export.training.checkpoint import load
from tests.support.calculators import save_untrained
from tests.support.task_data import invoke

FNN2 = "calculator-fnn2"


@pytest.fixture(scope="module")
def given(runs, tmp_path_factory):
    """Runs of three models: one constructed and copied, and one with three seeds."""
    root = tmp_path_factory.mktemp("given")
    for run in runs.iterdir():
        shutil.copytree(run, root / f"{run.name}-0")
    for seed in (1, 2):
        train_run(FNN2, root / f"{FNN2}-{seed}", seed=seed, epochs=3)
    shutil.copytree(root / "calculator-oracle-0", root / "oracle-again")
    return sorted(root.iterdir())


@pytest.fixture(scope="module")
def out(given, tmp_path_factory):
    out = tmp_path_factory.mktemp("comparison")
    invoke(calculator, "compare", *given, "--out", out)
    return out


@pytest.fixture(scope="module")
def models(out):
    records = read_records(out, TrainingRecord)
    ordered = dict(sorted(records.items(), key=lambda one: one[1].seed or 0))
    return {model.name: model for model in results_of(grouped(ordered))}


def test_runs_of_a_model_are_its_seeds_and_a_constructed_one_counts_once(models, out):
    assert {name: model.measures[0].seeds for name, model in models.items()} == {"oracle": 1, "gate": 1, "fnn2": 3}
    accuracy = (out / "report.md").read_text().split("## Accuracy")[1].split("##")[0]
    rows = [line.split("|")[1].strip() for line in accuracy.splitlines() if line.startswith("| ")]
    assert rows[2:] == ["oracle", "gate", "fnn2"], "in the order of the specs"
    for name in ("errors-by-terms", "errors-by-operands"):
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_another_training_makes_another_model():
    def run(seed, **changed):
        fields = {"model": "calculator-transformer4", "trainer": "a", "parameters": 1, "measures": ()}
        return TrainingRecord(seed=seed, **{**fields, **changed})

    runs = {"a": run(0), "b": run(1), "c": run(0, model="calculator-gate"), "d": run(0, trainer="b")}
    found = {name: [one.seed for one in seeds] for name, seeds in grouped(runs).items()}
    assert found == {"transformer4": [0, 1], "gate": [0], "transformer4 (training 2)": [0]}


def test_scores_are_geometric_means_and_tests_are_of_their_logarithms(models, given, splits, out):
    scores = []
    for run in given:
        model, config, _ = load(run, NETWORKS)
        if config.model == FNN2:
            values = {name: model.predict(split.tokens)[:, 0] for name, split in splits.items()}
            scores.append(score(errors_of(values, splits), baseline().mean))
    measure = models["fnn2"].measure("score", "benchmark")
    assert (measure.value, measure.seeds) == (pytest.approx(scipy.stats.gmean(scores)), 3)
    half = scipy.stats.t.ppf(0.975, 2) * scipy.stats.sem(np.log(scores))
    runs = [
        one for record in read_records(out, TrainingRecord).values() for one in record.measures if record.model == FNN2
    ]
    ends = [np.log(one.interval) - np.log(one.value) for one in runs if one.metric == "score"]
    low, high = np.hypot(np.mean(ends, axis=0), half)
    assert np.log(measure.interval) == pytest.approx([np.log(measure.value) - low, np.log(measure.value) + high])
    frozen = np.log([score(errors, baseline().mean) for errors in baseline().seeds.values()])
    ratio, p = models["fnn2"].against[FROZEN]
    assert p == pytest.approx(scipy.stats.ttest_ind(np.log(scores), frozen, equal_var=False).pvalue)
    assert ratio == pytest.approx(np.exp(np.log(scores).mean() - frozen.mean()))
    assert models["fnn2"].against["oracle"][1] is None
    assert models["fnn2"].against.keys() == {"oracle", "gate", FROZEN}


def test_the_papers_slip_is_shown_with_our_answers(models):
    fnn2 = models["fnn2"]
    assert models["oracle"].paper_long == pytest.approx(6.166, abs=1e-3)
    least, most = fnn2.paper_scores
    assert most / least > 1.4  # one network, and the seeds of its baseline
    (row,) = next(table for table in tables.sums_tables([fnn2]) if table.title == "The paper's figures").rows
    assert row[1:9:2] == ("0.0389", "0.0156", "2.23", "0.251")
    assert row[9:12] == ("6.29", fnn2.paper_long, fnn2.measure("mae", "long").value)


def test_grids_are_answers_less_truths(out):
    records = {record.model: record for record in read_records(out, TrainingRecord).values()}
    oracle, fnn2 = records["calculator-oracle"], records[FNN2]
    assert all(not np.any(errors) for errors in oracle.grids.values())
    errors = np.array(fnn2.grids["a - b + 2"])
    assert errors.shape == (21, 21)
    assert np.abs(errors[6:15, 6:15]).mean() < np.abs(errors[:3, :3]).mean(), "trained operands, and those beyond"


def test_finished_runs_are_kept_and_others_join(given, out, tmp_path):
    shutil.copytree(out, tmp_path / "out")
    records = (tmp_path / "out" / "records.jsonl").read_bytes()
    assert records.count(b"\n") == 6
    run = save_untrained("calculator-term-network", tmp_path)
    found = json.loads(invoke(calculator, "compare", *given, run, "--no-plots", "--out", tmp_path / "out", "--json"))
    assert [row[0] for row in found["tables"][0]["rows"]] == ["oracle", "gate", "term-network", "fnn2"]
    assert (tmp_path / "out" / "records.jsonl").read_bytes().startswith(records)


def test_wrong_runs_are_rejected(given, tmp_path):
    again = shutil.copytree(given[1], tmp_path / "again")
    with pytest.raises(UsageError, match=r"RUN .*again: got seed 1, as in .*calculator-fnn2-1, expected runs .* Leave"):
        invoke(calculator, "compare", *given[:2], again, "--out", tmp_path / "out")
    config = json.loads((again / "config.json").read_text())
    (again / "config.json").write_text(json.dumps(config | {"model": "looped-linear"}))
    with pytest.raises(UsageError, match=r"RUN .*again: got 'looped-linear', expected one of calculator-oracle, "):
        invoke(calculator, "compare", again, "--out", tmp_path / "out")
    with pytest.raises(UsageError, match=r"--out .*: got a path inside of RUN"):
        invoke(calculator, "compare", given[0], "--out", given[0] / "out")


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


def of_constant(splits, value):
    return {name: np.full(len(split.truth), value, np.float32) for name, split in splits.items()}


def test_errors_of_the_scores_are_those_by_hand(splits):
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
    for measure in measured(values, splits)[-2:]:
        low, high = measure.interval
        assert low < measure.value < high
    found = measured(values, splits)[-2]
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


def test_the_frozen_baseline_is_of_the_network_recipe_and_data_of_today(splits, tmp_path):
    assert baseline().definition == definition()
    assert sorted(baseline().seeds) == list(range(10))
    values = [errors.mae_long for errors in baseline().seeds.values()]
    assert baseline().mean.mae_long == pytest.approx(np.mean(values))
    train_run("calculator-baseline", tmp_path / "run", seed=3)
    model = load(tmp_path / "run", NETWORKS)[0]
    found = errors_of({name: model.predict(split.tokens)[:, 0] for name, split in splits.items()}, splits)
    # Equal if this processor rounds like the one that trained the frozen one.
    assert found.mae_in_range == pytest.approx(baseline().seeds[3].mae_in_range, rel=0.3)
