import json
import re
import shutil
import signal
import subprocess
import sys
from functools import partial

import numpy as np
import pytest

from edge.errors import UsageError
from export.cli.compare import compare
from export.cli.finetune import finetune
from export.cli.frontier import frontier
from export.data.examples import split_holdout
from export.data.tokens import load_tokenizer
from export.errors import CheckpointError, DataError
from export.finetune.models import open_model, open_tuned
from export.finetune.predictions import predict, read_predictions
from export.finetune.run import prepare, task_of
from export.finetune.text_tasks import TASKS
from export.training.provenance import Processor, described, features_of
from export.training.runs import CONFIG, read_config
from tests.support.task_data import finished, invoke

OPTIONS = ("--lr", 2e-2, "--batch", 32, "--max-length", 32)


tune = partial(finished, finetune)


@pytest.fixture
def common(place):
    return ("--data-dir", place, *OPTIONS, "--final", "--json")


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
    assert measures["holdout", "accuracy"]["n"] == 37


def test_an_interrupted_replacement_leaves_the_old_run_and_resumes(place, tmp_path):
    run = shutil.copytree(place / "SST-2", tmp_path / "mine")
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    arguments = ("SST-2", "--model", place / "model", "--data-dir", place, *OPTIONS, "--epochs", 30)
    arguments += ("--out", tmp_path, "--name", "mine", "--replace")
    command = [sys.executable, "-m", "edge", "finetune", *map(str, arguments)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        next(line for line in process.stderr if "epoch 2: " in line)  # by then it has saved its state
        process.send_signal(signal.SIGINT)
        process.stderr.read()
    assert (process.returncode, {path.name: path.read_bytes() for path in run.iterdir()}) == (130, before)
    log = tune(*arguments).stderr
    assert re.search(r"mine: resumes an interrupted run at step \d+ of 330", log)
    assert ("mine: epoch 30: " in log, "mine: epoch 1: " in log) == (True, False)
    assert {path.name: path.read_bytes() for path in run.iterdir()} != before
    assert not list(tmp_path.glob(".*"))


def test_a_run_continues_with_its_own_head(place, tmp_path):
    start = place / "SST-2"
    options = ("--data-dir", place, "--max-length", 32, "--epochs", 1, "--lr", 1e-9, "--final")
    table = tune("SST-2", "--model", start, "--out", tmp_path, *options).stdout
    assert "holdout" in table
    assert "95 % interval" in table
    after = read_predictions(tmp_path / "SST-2", "dev").logits
    assert np.allclose(after, read_predictions(start, "dev").logits, atol=1e-4)


def test_a_training_keeps_the_holdout_of_the_run_that_it_starts_from_and_refuses_two(place, common, tmp_path):
    old = shutil.copytree(place / "SST-2", tmp_path / "old")
    (old / CONFIG).write_text((old / CONFIG).read_text().replace('"split": 2', '"split": 1'))
    train = TASKS["SST-2"].read(place, "train")
    kept = task_of(open_model(old), old).examples(place).holdout.texts
    assert kept == split_holdout(train)[1].texts != TASKS["SST-2"].examples(place).holdout.texts
    model, options = ("SST-2", "--model", old), ("--out", tmp_path, "--epochs", 1, *common)
    tune(*model, *options)
    assert (read_config(tmp_path / "SST-2").split, read_config(place / "SST-2").split) == (1, 2)
    assert len(read_predictions(tmp_path / "SST-2", "holdout").targets) == len(kept)
    message = r"hold-outs of the runs: got --model with version 1 and --teacher with version 2, expected one"
    with pytest.raises(UsageError, match=message):
        tune(*model, "--teacher", place / "SST-2", "--replace", *options)


def test_unknown_tasks_absent_data_and_broken_runs_are_rejected(place, tmp_path):
    run = shutil.copytree(place / "SST-2", tmp_path / "run")
    (run / CONFIG).write_text(re.sub(r'"dim": ?\d+', '"dim": "wide"', (run / CONFIG).read_text()))
    with pytest.raises(CheckpointError, match=r"Expected `int`, got `str`.*dim"):
        open_model(run)
    with pytest.raises(CheckpointError, match="expected predictions on test"):
        read_predictions(run, "test")
    expected = r"TASK: got 'my\.csv', expected one of SST-2, .*glue/SST-2: train\.tsv and dev\.tsv;.*give --data"
    with pytest.raises(UsageError, match=expected):
        tune("my.csv", "--model", tmp_path)
    with pytest.raises(DataError, match=r"gluebenchmark\.com/tasks"):
        tune("RTE", "--model", place / "model", "--data-dir", place, "--out", tmp_path)


HASWELL = "processor : 0\nmodel name : Xeon E5\nflags : fpu sse4_2 fma avx avx2 bmi2\n"
SAPPHIRE_RAPIDS = "processor : 0\nflags\t\t: avx2 avx512f avx512_vnni avx512_bf16 amx_bf16 amx_tile amx_int8\n"
GRAVITON_3 = "processor\t: 0\nBogoMIPS\t: 2100.00\nFeatures\t: fp asimd sve i8mm bf16\n"


def test_features_are_read_from_the_flags_and_named():
    assert features_of(SAPPHIRE_RAPIDS) == ("AVX2", "AVX-512", "VNNI", "BF16", "AMX")
    assert features_of(GRAVITON_3) == ("I8MM", "BF16")
    assert (features_of("flags : fpu sse2\n"), features_of("processor : 0\nbogus flags\n")) == ((), None)
    a, names = Processor("A", ("AVX2", "VNNI")), ("A (AVX2, VNNI)", "B (none)", "C (not recorded)", "not recorded")
    assert described([a, None, Processor("B", ()), a, Processor("C")]) == names


@pytest.mark.parametrize(
    ("cpuinfo", "given", "used"),
    [
        (HASWELL, "auto", "fp32"),
        (SAPPHIRE_RAPIDS, "auto", "bf16"),
        # Unknown features: the precision stays as given.
        ("", "auto", "fp32"),
        ("", "bf16", "bf16"),
    ],
)
def test_bf16_is_for_processors_that_have_it(sst2, tmp_path, monkeypatch, cpuinfo, given, used):
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    monkeypatch.setattr("export.training.provenance.CPUINFO", tmp_path / "cpuinfo")
    options = ("--data-dir", sst2, "--out", tmp_path, "--epochs", 1, "--limit", 16)
    invoke(finetune, "SST-2", "--model", sst2 / "model", *options, *(() if given == "auto" else ("--precision", given)))
    config = read_config(tmp_path / "SST-2")
    assert config.precision == used
    assert f"precision='{used}'" in config.provenance.trainer
    assert config.processor.features == features_of(cpuinfo)


def test_bf16_is_refused_on_a_processor_without_it(sst2, tmp_path, monkeypatch):
    (tmp_path / "cpuinfo").write_text(HASWELL)
    monkeypatch.setattr("export.training.provenance.CPUINFO", tmp_path / "cpuinfo")
    message = (
        r"--precision: got bf16 on a processor with these features: AVX2, expected one with BF16.*Leave --precision"
    )
    for command, *arguments in ((finetune, "SST-2"), (compare, sst2 / "SST-2", "--out", tmp_path / "out")):
        with pytest.raises(UsageError, match=message):
            invoke(command, *arguments, "--precision", "bf16")


def test_commands_share_their_defaults():
    defaults = [{each.name: each.default for each in command.params} for command in (finetune, compare, frontier)]
    for name in ("lr", "precision"):
        assert len({found[name] for found in defaults if name in found}) == 1, name


def test_a_teacher_and_its_weights_change_the_run(place, common, tmp_path):
    with pytest.raises(UsageError, match=r"--hidden: got 0\.5, expected a run as --teacher beside it"):
        tune("SST-2", "--model", place / "model", "--hidden", 0.5, "--out", tmp_path, *common)
    for wrong in (place / "model", place / "SST-2"):
        with pytest.raises(UsageError, match="'fewheads finetune' on RTE"):
            open_tuned(wrong, "RTE")
    teacher, weights = ("--teacher", place / "SST-2"), ("--imitation", 0.9, "--temperature", 3, "--hidden", 0)
    logits = []
    for chosen in ((), teacher, (*teacher, *weights)):
        tune("SST-2", "--model", place / "small", "--epochs", 1, "--out", tmp_path, *common, *chosen, "--replace")
        logits.append(read_predictions(tmp_path / "SST-2", "dev").logits)
    assert len({one.tobytes() for one in logits}) == 3
    trainer = read_config(tmp_path / "SST-2").provenance.trainer
    assert "Distillation(imitation=0.9, temperature=3.0, hidden=0.0, " in trainer


def test_a_run_of_an_earlier_version_has_no_precision(sst2, tmp_path):
    shutil.copytree(sst2 / "SST-2", tmp_path / "SST-2")
    record = json.loads((tmp_path / "SST-2" / "config.json").read_text())
    del record["precision"], record["processor"]
    (tmp_path / "SST-2" / "config.json").write_text(json.dumps(record))
    assert read_config(tmp_path / "SST-2").processor is None, "runs of earlier versions are read"
