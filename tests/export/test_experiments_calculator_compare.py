import json
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import scipy.stats

from edge.bundles.bundle import Bundle
from edge.errors import BackendError, UsageError
from export.errors import CheckpointError
from export.estimate.operations import work_of
from export.papers.calculator.benchmark import baseline, errors_of, score
from export.papers.calculator.comparison import cost, memory
from export.papers.calculator.comparison.cli import compare
from export.papers.calculator.comparison.report import report_of
from export.papers.calculator.comparison.results import Results
from export.papers.calculator.comparison.summary import FROZEN
from export.papers.calculator.networks import NETWORKS, create
from export.papers.calculator.runs import Run, grouped
from export.papers.calculator.train import train_run
from export.training.checkpoint import load, save
from export.training.provenance import provenance
from export.training.runs import RunConfig, RunMetrics
from tests.support.task_data import invoke

CALCULATORS = ("calculator-oracle", "calculator-gate", "calculator-fnn2")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Run directories of three small calculators; those of all tests include transformers, which take longer."""
    root = tmp_path_factory.mktemp("runs")
    for name, epochs in zip(CALCULATORS, (None, 20, 3), strict=True):
        train_run(name, root / name, seed=0, epochs=epochs)
    return root


@pytest.fixture(scope="module")
def given(runs, tmp_path_factory):
    """Runs of three models: one constructed and copied, and one with three seeds."""
    root = tmp_path_factory.mktemp("given")
    shutil.copytree(runs / "calculator-oracle", root / "oracle-again")
    for seed in (1, 2):
        train_run("calculator-fnn2", root / f"fnn2-seed{seed}", seed=seed, epochs=3)
    return [*(runs / name for name in CALCULATORS), *sorted(root.iterdir())]


@pytest.fixture(scope="module")
def out(given, tmp_path_factory):
    """The directory of a comparison without latencies."""
    out = tmp_path_factory.mktemp("comparison")
    invoke(compare, *given, "--no-latency", "--out", out)
    return out


@pytest.fixture(scope="module")
def results(out):
    return msgspec.json.decode((out / "results.json").read_bytes(), type=Results)


def test_runs_of_a_model_are_its_seeds_and_a_constructed_one_counts_once(results):
    assert [(model.name, model.seeds) for model in results.models] == [("oracle", 1), ("gate", 1), ("fnn2", 3)]
    assert results.models[2].runs == ("calculator-fnn2", "fnn2-seed1", "fnn2-seed2")
    assert [model.paper is None for model in results.models] == [True, True, False]


def test_runs_with_other_arguments_are_another_model():
    record = provenance(trainer="none", data="none", seed=0)
    several = {"plain": {}, "fixed": {"adaptive": "fixed"}}
    runs = [
        Run(Path(name), RunConfig("calculator-transformer4", given, record), 1, {}) for name, given in several.items()
    ]
    assert {name: [run.path.name for run in group] for name, group in grouped(runs).items()} == {
        "transformer4": ["plain"],
        "transformer4, fixed": ["fixed"],
    }


def test_scores_are_geometric_means_and_tests_are_of_their_logarithms(results, given, splits):
    scores = []
    for run in given:
        model, config, _ = load(run, NETWORKS)
        if config.model == "calculator-fnn2":
            values = {name: model.predict(split.tokens)[:, 0] for name, split in splits.items()}
            scores.append(score(errors_of(values, splits), baseline().mean))
    fnn2 = next(model for model in results.models if model.name == "fnn2")
    measure = fnn2.measure("score", "benchmark")
    assert (measure.value, measure.seeds) == (pytest.approx(scipy.stats.gmean(scores)), 3)
    half = scipy.stats.t.ppf(0.975, 2) * scipy.stats.sem(np.log(scores))
    assert np.log(measure.interval) == pytest.approx([np.log(measure.value) - half, np.log(measure.value) + half])
    frozen = np.log([score(errors, baseline().mean) for errors in baseline().seeds.values()])
    tests = {test.other: test for test in fnn2.against}
    assert tests[FROZEN].p == pytest.approx(scipy.stats.ttest_ind(np.log(scores), frozen, equal_var=False).pvalue)
    assert tests[FROZEN].ratio == pytest.approx(np.exp(np.log(scores).mean() - frozen.mean()))
    assert tests["oracle"].p is None
    assert {test.other for test in fnn2.against} == {"oracle", "gate", FROZEN}


def test_every_accuracy_has_an_interval_around_it(results):
    for model in results.models:
        for measure in model.measures:
            low, high = measure.interval
            assert low <= measure.value <= high, (model.name, measure)
            if measure.metric == "exact_match":
                assert 0 <= low < high <= 1, (model.name, measure)
    oracle = results.models[0].measure("exact_match", "in_range")
    assert oracle.interval[0] == pytest.approx(1457 / (1457 + 1.96**2), rel=1e-4)  # Wilson's, of no wrong answer


def test_the_papers_slip_is_shown_with_our_answers(results):
    oracle, fnn2 = (next(model for model in results.models if model.name == name) for name in ("oracle", "fnn2"))
    assert oracle.paper_long == pytest.approx(6.166, abs=1e-3)
    least, most = fnn2.paper_scores
    assert most / least > 1.4  # one network, and the seeds of its baseline
    report = report_of(results, [])
    row = next(line for line in report.split("The paper's figures")[1].splitlines() if line.startswith("| fnn2 "))
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    assert cells[1:9:2] == ["0.0389406", "0.0155504", "2.2301364", "0.250927"]
    assert cells[9:12] == [str(value) for value in ("6.2929916", f"{fnn2.paper_long:.3g}", cells[11])]
    assert float(cells[11]) == pytest.approx(fnn2.measure("mae", "long").value, rel=5e-3)


def test_the_report_has_all_models_in_every_table_and_the_figures(out, results):
    report = (out / "report.md").read_text()
    assert report == report_of(results, ["error-by-terms.png"])
    tables = [part for part in report.split("\n## ")[1:] if "figures beside ours" not in part]
    assert len(tables) == 5
    for table in tables:
        for model in results.models:
            assert f"\n| {model.name} |" in table
    assert (out / "error-by-terms.png").read_bytes().startswith(b"\x89PNG")
    assert "served" not in report  # latencies were not measured


def test_operations_and_bytes_are_those_of_the_exported_file(out, results):
    bundle = Bundle.open(out / "repository" / "calculator-fnn2-1")
    fnn2 = next(model for model in results.models if model.name == "fnn2")
    assert fnn2.cost.mflop == pytest.approx(2e-6 * (15 * 345 + 345))
    assert fnn2.cost.onnx_bytes == (bundle.path / "model.onnx").stat().st_size
    found = work_of((bundle.path / "model.onnx").read_bytes(), {"x": (1, 15)}, "fnn2")
    assert found.gflop == {"fp32": pytest.approx(1e-3 * fnn2.cost.mflop)}


def test_answers_and_bundles_are_kept(given, out):
    answers, bundle = sorted((out / "answers").iterdir()), out / "repository" / "calculator-gate-1"
    assert len(answers) == 5  # of 6 runs, two of which are copies
    before = bundle.stat().st_mtime_ns, [path.stat().st_mtime_ns for path in answers]
    first = json.loads((out / "results.json").read_text())
    printed = json.loads(invoke(compare, *given, "--no-latency", "--no-plots", "--out", out, "--json"))
    assert printed == first
    assert before == (bundle.stat().st_mtime_ns, [path.stat().st_mtime_ns for path in answers])
    answers[0].write_text("[]")
    with pytest.raises(CheckpointError, match=r"expected a part\. Delete it, and give the same command"):
        invoke(compare, *given, "--no-latency", "--out", out)
    answers[0].unlink()
    with pytest.raises(UsageError, match=r"--out .*: got rounds 3, expected rounds 2"):
        invoke(compare, *given, "--no-latency", "--rounds", 2, "--out", out)


def test_wrong_runs_are_rejected(given, runs, tmp_path):
    again = shutil.copytree(runs / "calculator-gate", tmp_path / "again")
    with pytest.raises(UsageError, match=r"RUN .*again: got seed 0, as in .*calculator-gate, expected runs .* Leave"):
        invoke(compare, runs / "calculator-gate", again, "--no-latency", "--out", tmp_path / "out")
    config = json.loads((again / "config.json").read_text())
    (again / "config.json").write_text(json.dumps(config | {"model": "looped-linear"}))
    with pytest.raises(UsageError, match=r"RUN .*again: got 'looped-linear', expected one of calculator-oracle, "):
        invoke(compare, again, "--out", tmp_path / "out")
    with pytest.raises(UsageError, match=r"--out .*: got a path inside of RUN"):
        invoke(compare, given[0], "--out", given[0] / "out")


def test_runs_of_another_training_are_another_model(runs, tmp_path):
    longer = tmp_path / "longer"
    train_run("calculator-gate", longer, seed=0, epochs=21)
    options = ("--no-latency", "--no-plots", "--out", tmp_path / "out", "--json")
    printed = json.loads(invoke(compare, runs / "calculator-gate", longer, *options))
    assert [model["name"] for model in printed["models"]] == ["gate", "gate, training 2"]
    assert {path.name for path in (tmp_path / "out" / "repository").iterdir()} == {
        "calculator-gate-1",
        "calculator-gate-2",
    }


def test_a_copy_takes_at_least_the_memory_of_its_weights(tmp_path):
    model = create("calculator-rnn2", 0)
    record = provenance(trainer="none", data="none", seed=0)
    metrics = RunMetrics(model.parameter_count, 0, 0, 0.0, ())
    save(tmp_path / "run", model, RunConfig("calculator-rnn2", {}, record), metrics)
    bundle = Bundle.open(cost.export_run(tmp_path / "run", tmp_path).bundle)
    done = subprocess.run([sys.executable, "-m", memory.__name__, bundle.path], capture_output=True, check=True)
    weights = 4 * model.parameter_count
    assert 0.8 * weights < int(done.stdout) < 20 * weights


def test_a_measuring_process_that_fails_ends_the_comparison(out, tmp_path):
    path = shutil.copytree(out / "repository" / "calculator-gate-1", tmp_path / "calculator-gate-1")
    bundle = Bundle.open(path)
    shutil.rmtree(path)
    with pytest.raises(BackendError, match=r"python -m edge: got exit code \d, expected a measurement\. See"):
        cost.measure({"gate": bundle}, tmp_path / "kept.json", requests=10, rounds=1, on_step=lambda _: None)
    assert not (tmp_path / "kept.json").exists()


@pytest.mark.slow
def test_one_command_measures_accuracy_and_latency_and_draws_them(runs, tmp_path):
    options = ("--requests", 20, "--rounds", 2, "--out", tmp_path / "out", "--json")
    given = [runs / name for name in CALCULATORS]
    printed = json.loads(invoke(compare, *given, *options))
    for model in printed["models"]:
        latencies = model["cost"]["latencies"]
        assert latencies.keys() == {"1", "64"}
        for rows in latencies.values():
            assert rows["served"]["median"] > rows["in_process"]["least"] > 0
        assert latencies["64"]["in_process"]["median"] > latencies["1"]["in_process"]["median"]
    fnn2 = next(model for model in printed["models"] if model["name"] == "fnn2")
    assert fnn2["cost"]["latencies"]["1"]["served_ratio"] == {"median": 1, "least": 1, "most": 1}
    found = (tmp_path / "out" / "report.md").read_text()
    for name in ("accuracy-by-latency.png", "error-by-terms.png"):
        assert f"({name})" in found
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")
    # The same bundles are not measured again.
    assert json.loads(invoke(compare, *given, *options)) == printed
