import json
import re
import shutil
import signal
import subprocess
import sys

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner

from edge.errors import UsageError
from export.errors import CheckpointError, DataError
from export.runs import CONFIG
from export.tasks.cli import finetune
from export.tasks.glue import TASKS
from export.tasks.models import open_model, open_tuned
from export.tasks.predictions import predict, read_predictions
from export.tasks.run import prepare
from export.tasks.tokens import load_tokenizer
from tests.support.commands import answer, fewheads

OPTIONS = ("--lr", 2e-2, "--batch", 32, "--max-length", 32)


def tune(*arguments):
    result = CliRunner().invoke(finetune, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    return result


@pytest.fixture
def common(place):
    return ("--data-dir", place, *OPTIONS, "--json")


def test_the_run_records_and_rebuilds_the_model(place, sst2):
    run = place / "SST-2"
    config = json.loads((run / CONFIG).read_text())
    arguments = config["arguments"]
    assert config["data_dir"] == str(sst2.resolve())
    assert config["speedup"] is None
    assert (arguments["task"], arguments["labels"], arguments["max_length"]) == ("SST-2", ["0", "1"], 32)
    assert not list(run.parent.glob(".*"))  # no state is left
    data = prepare(TASKS["SST-2"], place, load_tokenizer(run), max_length=32, limit=None)
    kept = read_predictions(run, "dev")
    again = predict(open_tuned(run, "SST-2"), data.dev["dev"])
    assert np.array_equal(again.logits, kept.logits)
    assert np.array_equal(again.targets, kept.targets)
    metrics = json.loads((run / "metrics.json").read_text())
    assert (len(metrics["losses"]), len(metrics["scores"]), metrics["epochs"]) == (3, 3, 3)
    assert metrics["losses"][0] > metrics["losses"][-1]
    measures = {(m["split"], m["metric"]): m for m in metrics["measures"]}
    assert measures["dev", "accuracy"]["value"] == (kept.answers == kept.targets).mean() > 0.9
    assert measures["holdout", "accuracy"]["n"] == 36


def test_the_installed_command(place, tmp_path):
    arguments = ("finetune", "sst-2", "--model", place / "model", "--out", tmp_path, "--epochs", 1, "--limit", 32)
    done = fewheads(*arguments, "--data-dir", place, "--json", PYTHONWARNINGS="error")
    result = json.loads(answer(done))
    assert "SST-2: epoch 1: " in done.stderr
    assert result["runs"] == [str(tmp_path / "SST-2")]
    assert {(m["split"], m["metric"]) for m in result["metrics"]["measures"]} == {
        ("holdout", "accuracy"),
        ("dev", "accuracy"),
    }


def test_seeds_differ_and_are_pooled(place, common, tmp_path):
    arguments = ("--model", place / "model", "--out", tmp_path, "--epochs", 1, "--seed", 3, "--seeds", 2)
    result = json.loads(tune("SST-2", *arguments, *common).stdout)
    assert result["runs"] == [str(tmp_path / f"SST-2-seed{seed}") for seed in (3, 4)]
    assert result["metrics"]["measures"][0]["seeds"] == 2
    one, other = (read_predictions(run, "dev").logits for run in result["runs"])
    assert not np.array_equal(one, other)


def interrupted(arguments):
    """Give a command to a process of its own, and interrupt that after its first epoch, when it has saved its state."""
    command = [sys.executable, "-m", "edge", *map(str, arguments)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        for line in process.stderr:
            if "epoch 2: " in line:
                process.send_signal(signal.SIGINT)
                break
        process.stderr.read()
    assert process.returncode == 130


def test_an_interrupted_replacement_leaves_the_old_run_and_resumes(place, tmp_path):
    run = shutil.copytree(place / "SST-2", tmp_path / "mine")
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    arguments = ("SST-2", "--model", place / "model", "--data-dir", place, *OPTIONS, "--epochs", 60)
    arguments += ("--out", tmp_path, "--name", "mine", "--replace")
    interrupted(("finetune", *arguments))
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before
    told = tune(*arguments).stderr
    assert re.search(r"mine: resumes an interrupted run at step \d+ of 660", told)
    assert "mine: epoch 60: " in told
    assert "mine: epoch 1: " not in told
    assert {path.name: path.read_bytes() for path in run.iterdir()} != before
    assert not list(tmp_path.glob(".*"))


def test_a_run_continues_with_its_own_head(place, tmp_path):
    start = place / "SST-2"
    options = ("--data-dir", place, "--max-length", 32, "--epochs", 1, "--lr", 1e-9)
    table = tune("SST-2", "--model", start, "--out", tmp_path, *options).stdout
    assert "holdout" in table
    assert "95 % interval" in table
    after = read_predictions(tmp_path / "SST-2", "dev").logits
    assert np.allclose(after, read_predictions(start, "dev").logits, atol=1e-4)


def test_a_teacher_is_imitated_and_must_be_of_the_same_task(place, common, tmp_path):
    teacher = place / "SST-2"
    tune("SST-2", "--model", place / "model", "--out", tmp_path, "--epochs", 1, "--teacher", teacher, *common)
    followed = read_predictions(tmp_path / "SST-2", "dev").logits
    tune("SST-2", "--model", place / "model", "--out", tmp_path, "--epochs", 1, "--replace", *common)
    assert not np.array_equal(read_predictions(tmp_path / "SST-2", "dev").logits, followed)
    for wrong in (place / "model", teacher):
        with pytest.raises(UsageError, match="finetune RTE"):
            open_tuned(wrong, "RTE")


def test_unknown_tasks_and_absent_data_are_rejected(place, tmp_path):
    expected = r"TASK: got 'my\.csv', expected one of SST-2, .*glue/SST-2: train\.tsv and dev\.tsv;.*other files cannot"
    with pytest.raises(UsageError, match=expected):
        tune("my.csv", "--model", tmp_path)
    with pytest.raises(DataError, match=r"gluebenchmark\.com/tasks"):
        tune("RTE", "--model", place / "model", "--data-dir", place, "--out", tmp_path)


def test_predictions_that_do_not_fit(place, tmp_path):
    for run, split in ((place / "SST-2", "test"), (tmp_path, "dev")):
        with pytest.raises(CheckpointError, match=f"expected predictions on {split}"):
            read_predictions(run, split)


def test_a_broken_architecture_is_named(place, tmp_path):
    run = shutil.copytree(place / "SST-2", tmp_path / "run")
    config = msgspec.json.decode((run / CONFIG).read_bytes())
    config["arguments"]["transformer"]["dim"] = "wide"
    (run / CONFIG).write_bytes(msgspec.json.encode(config))
    with pytest.raises(CheckpointError, match=r"Expected `int`, got `str`.*dim"):
        open_model(run)
