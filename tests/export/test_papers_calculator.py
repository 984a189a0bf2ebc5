"""The comparison of calculators, and the documents' tables from committed records."""

import json
import shutil

import numpy as np
import pytest
import scipy.stats

from edge.errors import UsageError
from export.cli.calculator import calculator
from export.papers.calculator import tables
from export.papers.calculator.benchmark import baseline, errors_of, score
from export.papers.calculator.networks import NETWORKS
from export.papers.calculator.records import FROZEN, TrainingRecord, grouped, results_of
from export.papers.calculator.train import train_run
from export.papers.experiment import read_records
from export.training.checkpoint import load
from tests.support.calculators import save_untrained
from tests.support.task_data import invoke

FNN2 = "calculator-fnn2"


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """Runs of three models: one constructed and copied, and one with three seeds."""
    root = tmp_path_factory.mktemp("given")
    for name, epochs, seeds in (("calculator-oracle", None, 1), ("calculator-gate", 20, 1), (FNN2, 3, 3)):
        for seed in range(seeds):
            train_run(name, root / f"{name}-{seed}", seed=seed, epochs=epochs)
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
