import json
import sys

import msgspec
import numpy as np
import pytest
import torch
from click.testing import CliRunner

from edge.errors import UsageError
from export.papers.looped import MODEL, probe
from export.papers.looped.baselines import BASELINES
from export.papers.looped.cli import looped
from export.papers.looped.functions import FUNCTION_CLASSES, draw_prompts
from export.papers.looped.model import PromptTransformer
from export.papers.looped.objective import Curriculum, Rising
from export.papers.looped.paths import run_path
from export.papers.looped.published import PUBLISHED
from export.papers.looped.recipes import plan_of
from export.papers.looped.report import report_of, verdict
from export.papers.looped.results import Curve, Fewest, Results, Settings, TaskResult
from export.papers.looped.runs import Task, group_name, main_group, open_runs
from export.papers.looped.sample import Sample
from export.papers.looped.stopping import stopping_of
from export.papers.looped.summary import SETTLED
from export.papers.looped.train import train_run
from export.training.checkpoint import save
from export.training.provenance import processor, provenance
from export.training.runs import RunConfig, RunMetrics
from tests.support.task_data import invoke

PROMPTS, LOOPS = 40, 6


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Directories of a trained unlooped model, and of looped ones with random weights, two of them seeds of one."""
    place = tmp_path_factory.mktemp("runs")
    plan = plan_of("linear", "small", dim=8, injection=None, layers=2, steps=1)
    train_run("linear", plan, place / "unlooped", seed=0)
    trainer = "; ".join(str(stage.curriculum) for stage in plan_of("linear", "small").stages)
    write_run(place / "seed0", "linear", trainer=trainer)
    write_run(place / "seed1", "linear", seed=1, trainer=trainer)
    once = Rising(1, 1)
    write_run(place / "other", "linear", seed=2, trainer=str(Curriculum(once, once, loops=Rising(2, 7))))
    write_run(place / "tied", "linear", injection="none")
    write_run(place / "looped-tree", "tree")
    return place


def write_run(path, function, *, seed=0, trainer="none", **options):
    config = plan_of(function, "small", dim=8, **options).config
    torch.manual_seed(seed)
    record = provenance(trainer=trainer, data="none", seed=seed)
    arguments = {"function": function, "config": msgspec.to_builtins(config)}
    save(path, PromptTransformer(config), RunConfig(MODEL, arguments, record), RunMetrics(1, 1, 1, 1.0, ()))


@pytest.fixture(scope="module")
def opened(runs):
    return open_runs(runs / name for name in ("unlooped", "tied", "seed0", "other", "seed1", "looped-tree"))


def command(runs, out, *options):
    return invoke(looped, *runs, "--prompts", PROMPTS, "--loops", LOOPS, "--out", out, *options)


def test_runs_of_a_shape_and_training_are_seeds_of_one_model(opened):
    task = Task("linear", 5, 11)
    assert {name: [run.name for run in group] for name, group in opened[task].items()} == {
        "unlooped, L=2, D=8": ["unlooped"],
        "looped, L=1, D=8, no injection": ["tied"],
        "looped, L=1, D=8": ["seed0", "seed1"],
        "looped, L=1, D=8, training 2": ["other"],
    }
    assert [main_group(opened[task], looped=kind) for kind in (True, False)] == [
        "looped, L=1, D=8",
        "unlooped, L=2, D=8",
    ]
    assert [run.loops for group in opened[task].values() for run in group] == [1, 30, 30, 30, 7]
    assert main_group(opened[Task("tree", 5, 21)], looped=False) is None


def test_a_run_given_twice_is_refused(runs):
    with pytest.raises(UsageError, match=r"expected runs with names and weights of their own, unlike .*seed0"):
        open_runs([runs / "seed0", runs / "seed0"])


def test_errors_by_pairs_and_by_loops_are_those_of_single_loops(opened):
    (run, _) = opened[Task("linear", 5, 11)]["looped, L=1, D=8"]
    prompts = draw_prompts("linear", 150, 11, 5, torch.Generator().manual_seed(0))  # more than one chunk
    path = run_path(run.model, prompts, trained=3, loops=5)
    with torch.no_grad():
        predicted = run.model(prompts.xs, prompts.ys, 5)
    expected = [(loop - prompts.ys).square().numpy() for loop in predicted]
    np.testing.assert_allclose(path["pairs"], expected[2], rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(path["loops"], [errors[:, -1] for errors in expected], rtol=1e-3, atol=1e-5)


def test_one_command_writes_results_report_and_figures_and_takes_further_runs(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(probe, "STEPS", 2)
    monkeypatch.setattr(probe, "LOOPS", (1, 2))
    out = tmp_path / "out"
    first = [runs / "seed0", runs / "unlooped"]
    found = json.loads(command(first, out, "--json"))
    assert found == json.loads((out / "results.json").read_text())
    (task,) = found["tasks"]
    assert [curve["name"] for curve in task["by_pairs"]] == [task["looped"], task["unlooped"], *BASELINES["linear"]]
    solved = next(curve for curve in task["by_pairs"] if curve["name"] == "least squares")
    assert max(solved["mean"][5:]) < 1e-6 < min(solved["mean"][:5])
    assert {one["shift"]: len(one["errors"]) for one in task["shifts"]}["noise 0.1"] == 4
    assert [probed["model"] for probed in task["probes"]] == ["looped", "unlooped", "looped, random weights"]
    names = {"samples", "loops", "shifts", "probes", "stopping"}
    assert {path.name for path in out.glob("*.png")} == {f"linear-d5-{name}.png" for name in names}
    report = (out / "report.md").read_text()
    assert "Published errors, of another size, d = 20" in report
    assert "Anderson acceleration" in report
    assert "![linear-d5-samples](linear-d5-samples.png)" in report

    before = {path: path.stat().st_mtime_ns for path in (out / "parts").iterdir()}
    lost = next(path for path in before if path.name.startswith("linear-d5-path-seed0"))
    lost.unlink()
    everything = [*first, runs / "seed1", runs / "tied", runs / "looped-tree"]
    found = json.loads(command(everything, out, "--json", "--no-plots"))
    again, trees = found["tasks"]
    assert again["runs"][0] == task["runs"][0]
    assert all(path.stat().st_mtime_ns == time for path, time in before.items() if path != lost)
    assert [group["seeds"] for group in again["groups"]] == [2, 1, 1]
    assert [curve["name"] for curve in again["run_loops"]] == ["seed0", "seed1"]
    assert (trees["unlooped"], trees["shifts"], trees["probes"]) == (None, [], [])
    with pytest.raises(UsageError, match=r"got prompts 40, expected prompts 41"):
        command(first, out, "--prompts", 41)


def test_a_difference_is_that_of_the_errors_and_within_its_interval(runs, tmp_path):
    trees = command([runs / "looped-tree"], tmp_path, "--json", "--no-plots")
    (task,) = json.loads(trees)["tasks"]
    (run,) = task["runs"]
    for one in task["against"]:
        low, high = one["difference"]["interval"]
        assert low < one["difference"]["value"] < high
        assert one["difference"]["value"] == pytest.approx(run["error"] - one["error"])
    means = {curve["name"]: np.mean(curve["mean"]) for curve in task["by_pairs"] if len(curve["x"]) == task["points"]}
    ours = means.pop(task["looped"])
    ratios = {one["other"]: one["mean_ratio"] for one in task["against"] if one["mean_ratio"] is not None}
    assert ratios == pytest.approx({name: ours / mean for name, mean in means.items()})
    assert means


def test_resamples_are_of_the_same_prompts_and_of_seeds():
    errors = np.random.default_rng(0).exponential(size=(60, 2))
    worse = Sample([errors + 0.25], 1.0, 0).drawn - Sample([errors], 1.0, 2).drawn
    np.testing.assert_allclose(worse, 0.25)  # whatever the prompts
    seeds = Sample([np.full((60, 1), level) for level in (2.0, 4.0, 6.0)], 2.0, 1)
    assert seeds.mean == [2]
    assert {round(float(mean), 2) for mean in seeds.drawn[:, 0]} == {1, 1.33, 1.67, 2, 2.33, 2.67, 3}
    curve = Sample([errors], 1.0, 0).curve("any", (1, 2))
    means = np.random.default_rng(1).choice(errors[:, 0], (4000, 60)).mean(axis=1)
    assert (curve.low[0], curve.high[0]) == pytest.approx(np.percentile(means, [5, 95]), rel=0.05)


def test_stopping_counts_the_loops_that_each_prompt_takes(opened):
    (run,) = opened[Task("tree", 5, 21)]["looped, L=1, D=8"]
    residuals = np.array([[0.5, 0.5], [0.08, 0.4], [0.04, 0.04], [0.02, 0.02]])
    errors = np.array([[4.0, 4.0], [1.0, 2.0], [1.0, 1.0], [1.0, 1.0]])
    slow = {"residuals": residuals, "loops": errors}
    fast = {"residuals": residuals[1:], "loops": errors[1:]}
    parts = {("path", run.name): slow, ("anderson", "2", run.name): fast, ("anderson", "5", run.name): slow}
    found = stopping_of(Task("tree", 5, 21), [run], parts, within=SETTLED)
    points = {(point.method, point.tolerance): point for point in found["stopping"]}
    assert (points["plain", 0.1].mean_loops, points["plain", 0.1].error) == (2.5, 1.0)
    assert (points["Anderson, memory 2", 0.1].mean_loops, points["plain", 0.005].mean_loops) == (1.5, 4)
    assert [one.mean_loops for one in found["fewest"]] == [3, 2.5, 2, 1.5, 3, 2.5]
    assert "helps: 1.5 mean loops (Anderson, memory 2), against 2.5" in verdict(result(found["fewest"]))
    assert "does not help" in verdict(result((*found["fewest"][:2], *found["fewest"][4:])))
    assert "does not reach" in verdict(result((found["fewest"][1], Fewest("Anderson, memory 5", True, None, None))))


def result(fewest):
    nothing = ("groups", "runs", "by_pairs", "by_loops", "run_loops", "against")
    return TaskResult(
        name="tree-d5", function="tree", dims=5, points=21, looped=None, unlooped=None, fewest=tuple(fewest),
        **dict.fromkeys(nothing, ()),
    )  # fmt: skip


@pytest.mark.parametrize("slow", [(), (10, 20, 30, 40)])
def test_a_table_of_many_pairs_has_some_of_them(slow):
    error = (0.5,) * 41
    curves = [Curve("3-NN", tuple(range(41)), error, error, error)]
    if slow:
        curves.append(Curve("Lasso", slow, *(error[:4],) * 3))
    task = msgspec.structs.replace(result(()), function="sparse", dims=20, points=41, by_pairs=tuple(curves))
    report = report_of(Results(Settings(2, 1), (task,), processor()), [])
    head = next(line for line in report.split("### Error by number of pairs")[1].splitlines() if "| pairs" in line)
    columns = [int(column) for column in head.strip("| ").split(" | ")[1:]]
    assert len(columns) <= 11
    assert {1, 40, *slow} <= set(columns)


def test_a_probe_finds_what_is_in_the_states_and_not_what_is_in_others(opened, monkeypatch):
    (run, _) = opened[Task("linear", 5, 11)]["looped, L=1, D=8"]
    monkeypatch.setattr(probe, "LOOPS", (1,))
    found = probe.probe_run(run.model, "linear")
    products, _, others = found["errors"][0]
    assert found["stages"].tolist() == [1]
    assert products < 0.95 < 0.98 < others


def test_published_errors_are_of_known_methods():
    assert set(PUBLISHED) == set(FUNCTION_CLASSES)
    for function, errors in PUBLISHED.items():
        assert set(errors) <= {"looped", "unlooped", *BASELINES[function]}


def test_missing_packages_are_named_before_the_work(runs, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "xgboost", None)
    result = CliRunner().invoke(looped, [str(runs / "seed0"), "--out", str(tmp_path / "out")])
    assert "xgboost-cpu: got not installed" in str(result.exception)
    assert not (tmp_path / "out").exists()


def test_the_shape_of_a_reduced_model_is_in_its_name(opened):
    config = opened[Task("tree", 5, 21)]["looped, L=1, D=8"][0].model.config
    shape = msgspec.structs.replace(config.shapes[0], num_heads=2, ffn_dim=16)
    assert group_name(msgspec.structs.replace(config, shapes=(shape,))) == "looped, L=1, D=8, 2 heads of 2, 16 units"
