import json
import re
import shlex
import shutil
import sys

import msgspec
import numpy as np
import pytest

from edge.bench.layer_latencies import PREDICTION, LayerLatencies
from edge.bundles.bundle import Bundle
from edge.cli import output
from edge.cli.profile import profile
from edge.errors import UsageError
from export.cli.export import export
from export.cli.finetune import finetune
from export.cli.plan import plan
from export.cli.reduce import reduce
from export.cli.shapes import shapes
from export.data.tokens import Encoded
from export.errors import DataError, PlanError, ReductionError
from export.finetune.models import open_model, open_tuned
from export.models.transformer import LayerShape
from export.reduce.options import reduction_progress
from export.reduce.run import open_source
from export.reduce.target import LATENCIES
from export.training.runs import CONFIG
from tests.support.commands import progress_line
from tests.support.task_data import finished, invoke


@pytest.fixture(autouse=True)
def _recorded_data_directory(monkeypatch):
    monkeypatch.delenv("FEWHEADS_DATA", raising=False)
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)  # so that nobody counts the kernels of an engine


OPTIONS = ("--calibration", "200", "--tokens", "16")


@pytest.fixture(scope="module")
def first(place):
    """The first reduction of a run, with what it prints when piped."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output, "LINE_SECONDS", 0.05)
        patch.delenv("FEWHEADS_DATA", raising=False)
        command = (place / "SST-2", *OPTIONS, "--target-speedup", 1.05, "--out", place / "reduced")
        return finished(reduce, *command, "--final", "--json")


def test_a_run_becomes_a_smaller_run_that_can_be_fine_tuned(place, first):
    result = json.loads(first.stdout)
    assert {(m["split"], m["metric"]): m["value"] for m in result["metrics"]["measures"]}["dev", "accuracy"] > 0.8
    assert result["expected_speedup"] >= 1.05
    (point,) = result["planned"]["points"]
    assert (point["tokens"], point["batch"], point["dense_ms"] > point["milliseconds"]) == (16, 1, True)
    assert point["measured"]["calls"] > 1
    assert result["measured_speedup"] == pytest.approx(point["measured"]["ratio"])
    assert result["planned"]["device"] == "this"
    assert result["losses_on"] == "holdout"
    small = open_tuned(place / "reduced", "SST-2").transformer.config
    units = [layer["plan"]["shape"]["ffn_dim"] for layer in result["layers"]]
    assert units == [shape.ffn_dim for shape in small.layers]
    assert small.layers != open_model(place / "SST-2").transformer.config.layers
    # Everything that takes long is kept for another target.
    kept = sorted(path.name.partition("-")[0] for path in (place / ".SST-2.reduction").iterdir())
    assert kept == ["latency.json", "losses"]
    command = (place / "SST-2", *OPTIONS, "--target-speedup", 1.05, "--out", place / "reduced")
    again = finished(reduce, *command, "--replace")
    assert f"reduced: resumes from the timings and layers in {place / '.SST-2.reduction'}" in again.stderr.splitlines()
    assert re.search(r"times faster expected on .*onnxruntime.*\(measured\), [\d.]+ measured on this", again.stdout)
    assert "Before any fine-tuning" in again.stdout
    hint = again.stdout.splitlines()[-1]
    assert "--epochs 8 --lr 0.0004 --hidden 5" in hint
    invoke(finetune, *shlex.split(hint)[2:], "--epochs", 1, "--out", place / "tuned")
    small, tuned = open_model(place / "reduced"), open_model(place / "tuned" / "reduced-taught")
    assert tuned.architecture.max_length == 32
    assert tuned.transformer.config == small.transformer.config
    assert (tuned.config.speedup, tuned.config.planned) == (small.config.speedup, small.config.planned)
    assert small.config.speedup.tokens == 16


def test_a_reduction_prints_lines_when_piped(first):
    lines = first.stderr.splitlines()
    shown = re.compile(r"times of the options: \d+ of \d+, 0:00:\d\d(, about 0:00:\d\d left)?")
    assert any(shown.fullmatch(line) for line in lines)


def test_lines_name_the_stage_that_works(monkeypatch, capsys):
    monkeypatch.setattr(output, "LINE_SECONDS", 0.02)
    with reduction_progress() as (on_progress, _):
        for stage, done, total, shown in (
            ("data", 0, 1, "preparing the data: 0 of 1"),
            ("times", 0, 1, "times of the options: 0 of 1"),
            ("losses", 1, 2, "trying each option: 1 of 2"),  # no option was timed, as for a board
            ("losses", 2, 2, "reducing layers: 0:0"),
            ("layers", 2, 2, "reducing layers: 2 of 2"),
        ):
            on_progress(stage, done, total)
            assert progress_line(capsys).startswith(shown)


def test_a_speedup_far_below_the_planned_one_is_remarked_on(place, first, tmp_path):
    assert "where the timed shapes promised" not in first.stderr
    run = shutil.copytree(place / "SST-2", tmp_path / "SST-2")
    path = shutil.copytree(place / ".SST-2.reduction", tmp_path / ".SST-2.reduction") / LATENCIES
    table = json.loads(path.read_text())
    for timing in table["timings"][1:]:  # the first is the dense shape
        timing["comparison"]["ratio"] *= 2
        timing["comparison"]["milliseconds"] /= 2
    path.write_text(json.dumps(table))
    again = finished(reduce, run, *OPTIONS, "--target-speedup", 1.6, "--out", tmp_path / "lean")
    assert re.search(
        rf"lean: [\d.]+ times faster, where the timed shapes promised 1\.\d+\..*delete {path}", again.stderr
    )


def test_runs_that_cannot_be_reduced_are_rejected_before_the_timings(place, sst2, tmp_path):
    run = shutil.copytree(place / "SST-2", tmp_path / "SST-2")
    config = json.loads((run / CONFIG).read_text())
    assert config["data_dir"] == str(sst2.resolve())
    (run / CONFIG).write_text(json.dumps(config | {"data_dir": str(tmp_path / "gone")}))
    for arguments, error, message in (
        ((place / "SST-2", "--calibration", 2), ReductionError, r"set: got \d+ tokens .*expected more than 64"),
        ((run,), DataError, r"gone: got nothing there, .*made with\. Give --data-dir"),
        ((place / "model", "--data-dir", place), UsageError, "got a model without a task, expected a run on one of"),
    ):
        with pytest.raises(error, match=message):
            invoke(reduce, *arguments, "--out", tmp_path / "new")
    assert list(tmp_path.iterdir()) == [run]


@pytest.fixture(scope="module")
def tables(place):
    """The directory with a table of the run's layers, measured on ONNX Runtime."""
    invoke(shapes, place / "SST-2", "--out", place / "shapes", "--lengths", "8,16")
    options = ("--target", "onnxruntime", "--calls", 5, "--lengths", 16, "--cache", place / "cache")
    invoke(profile, place / "shapes", "--out", place / "cpu.json", *options)
    return place


def test_each_device_gets_a_plan_of_its_own(tables):
    """On one device only fewer hidden units are faster, and fewer heads slower; on the other the reverse."""
    table = LayerLatencies.read(tables / "cpu.json")
    ratios = {
        "heads.json": lambda shape: 10.0 if shape.ffn_dim < 64 else 0.5 if shape.num_heads < 2 else 1.0,
        "units.json": lambda shape: 10.0 if shape.num_heads < 2 else 0.5 if shape.ffn_dim < 64 else 1.0,
    }
    replace = msgspec.structs.replace
    for name, ratio in ratios.items():
        timings = (replace(t, comparison=replace(t.comparison, ratio=ratio(t.shape))) for t in table.timings)
        replace(table, timings=tuple(timings)).write(tables / name)
    options = ("--calibration", 200, "--tokens", 16, "--target-speedup", 1.2)
    given = [option for name in (*ratios, "cpu.json") for option in ("--latency-table", tables / name)]
    here, heads, units, cpu = json.loads(invoke(plan, tables / "SST-2", *given, *options, "--json"))["plans"]
    assert {layer["num_heads"] for layer in heads["layers"]} == {2}
    assert {layer["ffn_dim"] for layer in units["layers"]} == {64}
    assert heads["speedups"][1] >= 1.2 > heads["speedups"][2]
    assert units["speedups"][2] >= 1.2 > units["speedups"][1]
    assert (here["label"], cpu["label"], here["target"]) == ("measured", "measured", "this")
    assert heads["key"] == table.key
    assert "on device 4, measured" in invoke(plan, tables / "SST-2", *given, *options)


def test_a_plan_for_a_board_predicts_its_times(place):
    """A small encoder waits for kernels there, so that halves or layers go, where heads and units do on a core."""
    options = ("--calibration", 200, "--tokens", "8:3,16", "--batch", "1,4", "--target-speedup", 1.5)
    boards = ("--for", "orin-nano-super:15W", "--for", "orin-nano:7W")
    orin, older = json.loads(invoke(plan, place / "SST-2", *boards, *options, "--json"))["plans"]
    assert (orin["label"], orin["target"], older["target"]) == (PREDICTION, "orin-nano-super:15W", "orin-nano:7W")
    sizes = [(point["tokens"], point["batch"], point["weight"]) for point in orin["points"]]
    assert sizes == [(8, 1, 3.0), (8, 4, 3.0), (16, 1, 1.0), (16, 4, 1.0)]
    weighted = [sum(point["weight"] * point[ms] for point in orin["points"]) for ms in ("dense_ms", "milliseconds")]
    assert weighted[0] / weighted[1] == pytest.approx(orin["speedups"][0])
    assert orin["speedups"][0] >= 1.5
    layers = [layer or {"num_heads": 0, "ffn_dim": 0} for layer in orin["layers"]]
    assert 0 in [size for layer in layers for size in (layer["num_heads"], layer["ffn_dim"])]


def test_a_reduction_for_a_board_records_its_prediction(place):
    out, options = place / "for-orin", ("--for", "orin-nano-super:15W", "--tokens", "16", "--batch", "1,2")
    command = (place / "SST-2", *options, "--calibration", 200, "--target-speedup", 1.9, "--out", out)
    result = json.loads(invoke(reduce, *command, "--json"))
    assert result["latency_key"]["device"] == "Jetson Orin Nano Super"
    planned = result["planned"]
    assert (planned["label"], planned["device"], planned["target_speedup"]) == (PREDICTION, "orin-nano-super:15W", 1.9)
    assert all(point["measured"]["ratio"] > 0 for point in planned["points"])
    assert all(point["low_ms"] < point["milliseconds"] < point["high_ms"] for point in planned["points"])
    config = open_model(out).config
    assert json.loads(msgspec.json.encode(config.planned)) == planned
    assert "at 16 tokens, batch 1 and 16 tokens, batch 2 on Jetson Orin Nano Super 15W" in config.provenance.trainer
    assert PREDICTION in config.provenance.trainer


def test_whole_layers_are_planned_without_data(place, tmp_path):
    run = shutil.copytree(place / "SST-2", tmp_path / "SST-2")
    config = json.loads((run / CONFIG).read_text())
    (run / CONFIG).write_text(json.dumps(config | {"data_dir": str(tmp_path / "gone")}))
    options = ("--strategy", "spread", "--for", "orin-nano-super:15W", "--tokens", 16, "--target-speedup", 1.2)
    (planned,) = json.loads(invoke(plan, run, *options, "--json"))["plans"]
    dense = open_model(run).transformer.config.layers[0]
    assert planned["layers"][0] is None
    assert msgspec.convert(planned["layers"][1], LayerShape) == dense
    assert planned["loss"] is None
    assert not list((tmp_path / ".SST-2.reduction").glob("losses-*"))
    with pytest.raises(PlanError, match=r"target speed-up on Jetson .*: got 99x, expected at most .* 1 layer left out"):
        invoke(plan, run, *options[:-1], 99)


def test_losses_come_from_the_hold_out_if_it_is_large_enough(place, sst2):
    """Of rows that a model has learnt, its answers hardly change, whatever goes."""
    opened = open_source(place / "SST-2", sst2, place / "new", 200)
    assert opened.loss_rows is opened.data.holdout
    few = Encoded(*(part[:4] for part in (opened.data.holdout.tokens, opened.data.holdout.segments)), np.arange(4))
    small = opened._replace(data=msgspec.structs.replace(opened.data, holdout=few))
    assert small.loss_rows is opened.data.train


def test_a_run_with_fewer_layers_is_trained_and_exported_under_what_it_was_planned_for(tables, sst2):
    """By this table only whole layers take time, so that one of two goes."""
    table = LayerLatencies.read(tables / "cpu.json")
    replace = msgspec.structs.replace
    timings = tuple(replace(t, comparison=replace(t.comparison, ratio=1.0)) for t in table.timings)
    key = {**table.key, "device": "Jetson Orin Nano Super", "power_mode": "MAXN_SUPER"}
    replace(table, key=key, timings=timings).write(tables / "layers.json")
    out, options = tables / "one", ("--target-speedup", 1.05, "--latency-table", tables / "layers.json")
    text = invoke(reduce, tables / "SST-2", *OPTIONS, *options, "--out", out)
    found = open_model(out)
    (kept,) = found.config.planned.kept
    assert f"Reduced to {out}, without layers {1 - kept}" in text
    assert len(found.transformer.layers) == 1
    taught = ("SST-2", "--data-dir", sst2, "--model", out, "--teacher", tables / "SST-2", "--hidden", 1)
    invoke(finetune, *taught, "--epochs", 1, "--name", "taught", "--out", tables, "--no-report")
    runs = (tables / "SST-2", tables / "taught", "--name", "sentiment", "--repository", tables / "models")
    invoke(export, *runs, "--artifacts", "onnxruntime", "--no-measure")
    tiers = [tier.name for tier in Bundle.open(tables / "models" / "sentiment-1").manifest.tiers]
    assert tiers[::2] == ["x1", "x1.05-jetson-orin-nano-super-maxn_super"]


def test_devices_and_targets_that_cannot_be_are_rejected(place, first, tmp_path):
    run = (place / "SST-2", "--for", "orin-nano:15W", "--out", place / "new")
    with pytest.raises(UsageError, match=r"plan for: got --for orin-nano:15W and --latency-table .*, expected one of"):
        invoke(reduce, *run, "--latency-table", place / "SST-2" / CONFIG)
    with pytest.raises(UsageError, match=r"--tokens: got 200, expected at most \d+, the positions of the model"):
        invoke(reduce, *run, "--tokens", 200)
    for wrong in ("nan", "1", "2,fast", "2,2.0000001", ""):
        with pytest.raises(UsageError, match=f"--target-speedup: got '{wrong}', expected different factors above 1"):
            invoke(reduce, *run, "--target-speedup", wrong)
    with pytest.raises(UsageError, match=r"--target-speedup: got 1\.5,2, expected one"):
        invoke(plan, place / "SST-2", "--target-speedup", "2,1.5")
    kept, state = place / ".SST-2.reduction", tmp_path / ".SST-2.reduction"
    shutil.copytree(kept, state, ignore=shutil.ignore_patterns("losses-*"))
    message = (
        r"target speed-up on Jetson Orin Nano 15W .*: got 90x, expected at most [\d.]+x, with .* of 0 heads of 0 and 0"
    )
    with pytest.raises(PlanError, match=message):
        invoke(reduce, *run, "--target-speedup", 90, *OPTIONS, "--out", tmp_path / "new")
    assert not list(state.glob("losses-*"))  # which take minutes
    assert not (place / "new").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"timings": ()}, r"at 16 tokens, batch 1: got no timing of h2-.*, expected timings of .* lengths none"),
        ({"rest": ()}, r"at 16 tokens, batch 1: got no timing of rest, .* profile SHAPES --lengths 16 --out TABLE"),
        ({"key": {"dim": "7"}}, r"key: got architecture 'missing', dim '7', .* expected architecture 'bert', dim '32'"),
        (None, "got 1 timings of a device that throttled, expected steady clocks"),
    ],
)
def test_a_table_that_does_not_fit_is_rejected_before_the_work(tables, tmp_path, change, message):
    table, path = LayerLatencies.read(tables / "cpu.json"), tmp_path / "table.json"
    hot = msgspec.structs.replace(table.timings[0], throttled=True)
    msgspec.structs.replace(table, **(change or {"timings": (hot, *table.timings[1:])})).write(path)
    with pytest.raises(UsageError, match=message):
        invoke(reduce, tables / "SST-2", "--tokens", 16, "--latency-table", path, "--out", tmp_path / "new")
    assert [entry.name for entry in tmp_path.iterdir()] == ["table.json"]
