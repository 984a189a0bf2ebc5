"""The experiments on looped models: ``fewheads looped``, and the tables that are made from its records."""

import json
import sys

import msgspec
import numpy as np
import pytest
import torch
from click.testing import CliRunner

from edge.errors import UsageError
from export.cli.looped import looped
from export.papers.experiment import RECORDS, keep_settings, read_records, run_experiment
from export.papers.looped import MODEL
from export.papers.looped.baselines import BASELINES
from export.papers.looped.measure import TaskResult, error_path, pair_errors, stopping_of
from export.papers.looped.model import PromptTransformer, Trajectory
from export.papers.looped.options import LoopedOptions
from export.papers.looped.prompts import draw_prompts
from export.papers.looped.recipes import Curriculum, Rising, training_plan
from export.papers.looped.run import group_name, open_runs, tables_of, tasks_of
from export.papers.looped.train import train_run
from export.papers.looped.trainings import SETTINGS, Group, Trainings, TrainingsSettings, Tuning
from export.training.checkpoint import save
from export.training.intervals import Sample
from export.training.provenance import provenance
from export.training.runs import RunConfig, RunMetrics
from tests.support.task_data import invoke


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Directories of a trained unlooped model, and of looped ones with random weights, two of them seeds of one."""
    place = tmp_path_factory.mktemp("runs")
    plan = training_plan("linear", LoopedOptions(dim=8, unlooped=True, layers=2, steps=1))
    train_run("linear", plan, place / "unlooped", seed=0)
    trainer = "; ".join(str(stage.curriculum) for stage in training_plan("linear", LoopedOptions()).stages)
    write_run(place / "seed0", "linear", trainer=trainer)
    write_run(place / "seed1", "linear", seed=1, trainer=trainer)
    once = Rising(1, 1)
    write_run(place / "other", "linear", seed=2, trainer=str(Curriculum(once, once, loops=Rising(2, 7))))
    write_run(place / "tied", "linear", injection="none")
    write_run(place / "looped-tree", "tree")
    return place


def write_run(path, function, *, seed=0, trainer="none", **options):
    config = training_plan(function, LoopedOptions(dim=8, **options)).config
    torch.manual_seed(seed)
    record = provenance(trainer=trainer, data="none", seed=seed)
    arguments = {"function": function, "config": msgspec.to_builtins(config)}
    save(path, PromptTransformer(config), RunConfig(MODEL, arguments, record), RunMetrics(1, 1, 1, 1.0, ()))


@pytest.fixture(scope="module")
def tasks(runs):
    return tasks_of(open_runs(runs / name for name in ("unlooped", "tied", "seed0", "other", "seed1", "looped-tree")))


def test_runs_of_a_shape_and_training_are_seeds_of_one_model(tasks):
    linear, tree = tasks
    assert {name: [run.name for run in group] for name, group in linear.groups.items()} == {
        "unlooped, L=2, D=8": ["unlooped"],
        "looped, L=1, D=8, no injection": ["tied"],
        "looped, L=1, D=8": ["seed0", "seed1"],
        "looped, L=1, D=8, training 2": ["other"],
    }
    assert [linear.main(looped=kind) for kind in (True, False)] == ["looped, L=1, D=8", "unlooped, L=2, D=8"]
    assert [run.loops for group in linear.groups.values() for run in group] == [1, 30, 30, 30, 7]
    assert tree.main(looped=False) is None
    config = linear.groups["looped, L=1, D=8"][0].model.config
    shape = msgspec.structs.replace(config.shapes[0], num_heads=2, ffn_dim=16)
    assert group_name(msgspec.structs.replace(config, shapes=(shape,))) == "looped, L=1, D=8, 2 heads of 2, 16 units"


def test_a_run_given_twice_is_refused(runs):
    with pytest.raises(UsageError, match=r"expected runs with names and weights of their own, unlike .*seed0"):
        open_runs([runs / "seed0", runs / "seed0"])


def test_errors_by_pairs_and_by_loops_are_those_of_single_loops(tasks):
    model = tasks[0].groups["looped, L=1, D=8"][0].model
    prompts = draw_prompts("linear", 150, 11, 5, torch.Generator().manual_seed(0))  # more than one chunk
    with torch.no_grad():
        expected = [(loop - prompts.ys).square().numpy() for loop in model(prompts.xs, prompts.ys, 5)]
    np.testing.assert_allclose(pair_errors(model, prompts, 3), expected[2], rtol=1e-3, atol=1e-5)
    path = error_path(model, prompts, 5)
    np.testing.assert_allclose(path.predictions, [errors[:, -1] for errors in expected], rtol=1e-3, atol=1e-5)


def test_one_command_writes_records_report_and_figures_and_resumes(runs, tmp_path):
    out = tmp_path / "out"
    arguments = [runs / name for name in ("seed0", "unlooped", "seed1", "tied", "looped-tree")]
    options = ("--prompts", 40, "--loops", 32, "--out", out, "--json")
    found = json.loads(invoke(looped, *arguments, *options))
    linear, tree = read_records(out, TaskResult).values()
    assert list(linear.by_pairs) == [linear.looped, linear.unlooped, *BASELINES["linear"]]
    solved = linear.by_pairs["least squares"]
    assert max(list(solved.values())[5:]) < 1e-6 < min(list(solved.values())[:5])
    assert [list(group.by_seed) for group in linear.groups] == [["seed0", "seed1"], ["unlooped"], ["tied"]]
    assert list(linear.by_loops) == [linear.looped, "seed0", "seed1", "looped, L=1, D=8, no injection"]
    assert [one.tolerance for one in linear.accelerated] == [one.tolerance for one in linear.stopping]
    (equal,) = [table for table in tables_of(linear) if "equal" in table.title]
    curve, unlooped = linear.by_loops[linear.looped], linear.groups[1].error.value
    reached = [str(loops) for loops, error in enumerate(curve, 1) if error <= unlooped]
    assert equal.rows[0] == (linear.looped, str(linear.groups[0].parameters), [*reached, "not in 32"][0])
    assert not [table for table in tables_of(tree) if "equal" in table.title]
    ours = linear.groups[0]
    ratios = {one.other: one for one in linear.ratios}
    assert ratios["least squares"].after_all is None
    first = ratios[linear.unlooped]
    assert (first.seeds, ratios["averaging"].seeds) == ((2, 1), (2, 0))
    assert first.after_all.value == pytest.approx(ours.error.value / linear.groups[1].error.value)
    known = [np.mean(list(linear.by_pairs[name].values())[5:]) for name in (linear.looped, linear.unlooped)]
    assert linear.known_ratio(first).value == pytest.approx(known[0] / known[1])
    without = linear.known_ratio(msgspec.structs.replace(first, known=None))
    assert without == pytest.approx(known[0] / known[1]), "of a record that lacks it"
    (trees,) = tree.groups
    assert (tree.unlooped, len(tree.ratios)) == (None, len(BASELINES["tree"]))
    assert tree.ratios[0].after_all.value == pytest.approx(trees.error.value / tree.by_pairs["least squares"][20])

    assert {path.name for path in out.glob("*.png")} == {
        f"{task}-{kind}.png" for task in ("linear-d5", "tree-d5") for kind in ("samples", "loops")
    }
    report = (out / "report.md").read_text()
    assert "| 1, prompts alone |" in report
    assert "![linear-d5-samples](linear-d5-samples.png)" in report
    lines = (out / RECORDS).read_bytes().splitlines(keepends=True)
    (out / RECORDS).write_bytes(lines[1])
    assert json.loads(invoke(looped, *arguments, *options, "--no-plots")) == found
    assert (out / RECORDS).read_bytes().startswith(lines[1])
    with pytest.raises(UsageError, match=r"got runs.other None, expected runs.other"):
        invoke(looped, *arguments, runs / "other", *options)


def test_trainings_take_the_rates_that_were_best_for_their_kind(tmp_path):
    small = LoopedOptions(dim=8, layers=1, steps=3)
    models = (small, msgspec.structs.replace(small, unlooped=True))
    group, tuning = Group(("tree",), 1, models), Tuning(("linear",), models, (1e30, 0.5, 1.0), (100, 101), 2, 64)
    settings = TrainingsSettings(tuning, {"trees": group}, "bf16")

    def run_with(errors):
        """Run what the choice of rates lacks, with other errors of what was run before."""
        lines = [msgspec.json.decode(line) for line in (tmp_path / RECORDS).read_bytes().splitlines()]
        for line, error in zip(lines, errors, strict=True):
            line["record"]["error"] = error
        (tmp_path / RECORDS).write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
        return run_experiment(Trainings(settings, tmp_path), tmp_path, plots=False)

    found = run_experiment(Trainings(settings, tmp_path), tmp_path, plots=False)
    errors = [record.error for record in found.values()]
    assert (errors[0], errors[3], len({*errors})) == (None, None, 5), "the first rate of each kind diverges"
    found = run_with([None, 1, 2, None, 2, 1])
    of_half, of_usual = (f"layers1-dim8-{rate}steps3-101" for rate in ("rate0.5-", ""))
    kinds = ("looped", of_half), ("looped", of_usual), ("unlooped", of_usual), ("unlooped", of_half)
    expected = [f"tuning-linear-{kind}-{name}" for kind, name in kinds]  # the better rate of the first seed is first
    assert list(found)[6:] == expected, "the finalists with the second seed"
    run_with([None, 1, 2, None, 2, 1, 5, 3, 4, 1])
    experiment = Trainings(settings, tmp_path, ("trees",))
    trained = run_experiment(experiment, tmp_path, plots=False)
    names = ["tree-looped-layers1-dim8-steps3-0", "tree-unlooped-layers1-dim8-steps3-0"]
    assert [(name, trained[name].rate) for name in list(trained)[10:]] == [*zip(names, (1.0, 0.5), strict=True)]
    table = experiment.tables(trained)[0]
    assert [row[2:] for row in table.rows] == [
        ("diverged", "1.0000, 5.0000", "2.0000, 3.0000", 1.0),
        ("diverged", "2.0000, 1.0000", "1.0000, 4.0000", 0.5),
    ]
    runs = open_runs(tmp_path / "runs" / name for name in names)
    usual = training_plan("linear", LoopedOptions()).stages[0].recipe.peak_learning_rate
    assert f"peak_learning_rate={usual}," in runs[0].training
    assert "precision='bf16'" in runs[0].training
    gated = msgspec.structs.replace(small, injection="gated", dims=3)
    more_seeds = msgspec.structs.replace(group, models=(*models, gated), seeds=2)
    more = msgspec.structs.replace(settings, groups={"trees": more_seeds})
    parts = [part.name for part in Trainings(more, tmp_path, ("trees",)).parts()]
    assert parts[10:14] == [*names, "tree-looped-gated-layers1-dim8-dims3-steps3-0", names[0].replace("-0", "-1")]
    keep_settings(tmp_path, more, extensible=Trainings.extensible)
    names = [part.name for part in Trainings(SETTINGS, tmp_path, tuple(SETTINGS.groups)).parts()]
    assert len({*names}) == len(names)


def test_an_interval_of_ratios_counts_seeds_where_there_are_several():
    errors = np.random.default_rng(0).exponential(size=(1, 400))
    once, worse = Sample.of_items(errors, np.ones(400)), Sample.of_items(1.5 * errors, np.ones(400))
    assert worse.over(once).interval == pytest.approx((1.5, 1.5))  # the same prompts
    levels = np.array([0.8, 1.0, 1.25])
    several = Sample.of_items(levels[:, None] * errors, np.ones(400)).over(once)
    logs = np.log(levels)  # Student's with two degrees of freedom
    half = 4.3027 * logs.std(ddof=1) / 3**0.5
    center = np.log(levels.mean())
    assert np.log(several.interval) == pytest.approx([center - half, center + half], rel=1e-3)


def test_stopping_counts_the_loops_that_each_prompt_takes():
    residuals = np.array([[0.5, 0.5], [0.08, 0.4], [0.04, 0.04], [0.02, 0.02]])
    errors = np.array([[4.0, 4.0], [1.0, 2.0], [1.0, 1.0], [1.0, 1.0]])
    points = {point.tolerance: point for point in stopping_of([Trajectory(2 * errors, residuals)], 2.0)}
    assert (points[0.1].mean_loops, points[0.1].most, points[0.1].error) == (2.5, pytest.approx(2.9), 1.0)
    assert points[0.005].mean_loops == 4


def test_missing_packages_are_named_before_the_work(runs, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "xgboost", None)
    result = CliRunner().invoke(looped, [str(runs / "seed0"), "--out", str(tmp_path / "out")])
    assert "xgboost-cpu: got not installed" in str(result.exception)
    assert not (tmp_path / "out").exists()
