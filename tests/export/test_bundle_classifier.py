import json
import shutil
import sys

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from edge.bundles.bundle import Bundle
from edge.bundles.manifest import MeasuredLatency, PredictedLatency, Profile
from edge.bundles.steps import ScorePostprocess, TokenizerPreprocess
from edge.errors import BundleError, UsageError
from edge.programs.program import margins
from edge.runtimes.build import build
from export.bundle.accuracy import outputs_by_row, predictions_of
from export.bundle.cascade import cascade
from export.bundle.clients import ClientInputs, profiles_of
from export.bundle.new_bundles import tier_names
from export.cli.export import export
from export.cli.finetune import finetune
from export.data.tokens import load_tokenizer
from export.errors import CheckpointError
from export.estimate.devices import DEFAULT_BOARD
from export.estimate.estimate import estimate_bundle
from export.finetune.models import open_tuned
from export.finetune.predictions import Predictions, encode_predictions
from export.finetune.run import prepare
from export.finetune.text_tasks import TASKS
from export.training.runs import CONFIG, PREDICTIONS, Speedup, read_config
from tests.support.marks import with_rtx
from tests.support.sample_requests import column
from tests.support.stock_client import served_bundles
from tests.support.task_data import invoke, make_sentiment, make_transformer, write_model, write_rows, write_sst2

OPTIONS = ("--lr", 2e-2, "--batch", 32, "--max-length", 32)


@pytest.fixture(scope="module")
def bundled(place):
    """A directory with a run, a leaner run, and the bundle of both."""
    paths = ("--model", place / "small", "--data-dir", place, "--out", place)
    invoke(finetune, "SST-2", *paths, "--name", "Half", *OPTIONS, "--final")
    options = ("--data-dir", place, "--name", "sst2", "--tier-name", "x1", "--tier-name", "half", "--json")
    shown = invoke(export, place / "SST-2", place / "Half", "--repository", place / "models", *options)
    (found,) = json.loads(shown)
    assert found["bundle"] == str(place / "models" / "sst2-1")
    manifest = json.loads((place / "models" / "sst2-1" / "manifest.json").read_bytes())
    assert found["latencies"] == {tier["name"]: tier["latencies"] for tier in manifest["tiers"]}
    assert found["measures"] == manifest["measures"] != []
    return place


def test_the_bundle_has_measured_latencies_and_the_predictions_of_estimate(bundled, monkeypatch):
    manifest = Bundle.open(bundled / "models" / "sst2-1").manifest
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)  # so that nobody counts the kernels of an engine
    board, power_mode = DEFAULT_BOARD
    rows = estimate_bundle(bundled / "models" / "sst2-1", board, power_mode, batches=(1, 8)).rows
    for tier in manifest.tiers:
        measured, *predicted = tier.latencies
        assert isinstance(measured, MeasuredLatency)
        assert (measured.runtime, measured.rows, measured.tokens) == ("onnxruntime", 1, 32)
        assert {type(one) for one in predicted} == {PredictedLatency}
        assert {(one.device, one.power_mode, one.runtime) for one in predicted} == {
            ("Jetson Orin Nano Super", "15W", "tensorrt")
        }
        estimated = [row for row in rows if row.tier == tier.name]
        assert [(one.rows, one.milliseconds, one.high_ms) for one in predicted] == [
            (row.rows, row.milliseconds, row.prediction.high_ms) for row in estimated
        ]
        assert [(one.tokens, one.precision, one.low_ms, one.times_faster) for one in predicted] == [
            (row.tokens, row.precision, row.prediction.low_ms, row.times_faster) for row in estimated
        ]
        assert len(estimated) == 2
    assert [latency.times_faster for latency in manifest.tiers[0].latencies] == [1, 1, 1]
    for first, half in zip(manifest.tiers[0].latencies[1:], manifest.tiers[2].latencies[1:], strict=True):
        assert half.times_faster == pytest.approx(first.milliseconds / half.milliseconds)
        assert half.times_faster > 1.1


def test_the_bundle_has_a_tier_for_each_run_and_precision_with_the_outputs_of_training(bundled):
    manifest = Bundle.open(bundled / "models" / "sst2-1").manifest
    assert [tier.name for tier in manifest.tiers] == ["x1", "x1-int8", "half", "half-int8"]
    assert [[a.runtime for a in tier.artifacts] for tier in manifest.tiers] == [["onnxruntime", "tensorrt"]] * 4
    assert manifest.postprocess.labels == ("negative", "positive")
    assert {measure.split for measure in manifest.measures} >= {"dev, tier x1", "dev, tier half"}
    bundle = Bundle.open(bundled / "models" / "sst2-1")
    tokenizer = load_tokenizer(bundled / "Half")
    dev = prepare(TASKS["SST-2"], bundled, tokenizer, max_length=32, limit=None).dev["dev"]
    found = {(measure.metric, measure.split): measure for measure in manifest.measures}
    for runtime in ("onnxruntime", "tensorrt"):
        data, split = bundle.read(bundle.artifact(runtime, "half-int8").file), f"dev, tier half-int8 on {runtime}"
        names = {"input_ids": "inputs", "attention_mask": "mask"}
        outputs = outputs_by_row(data, dev, subject="half", names=names, rows_at_once=runtime == "tensorrt")
        answers = predictions_of(outputs, dev.targets)
        measure, change = found["accuracy", split], found["accuracy, difference to FP32", split]
        assert (measure.value, measure.n) == (answers.score("accuracy"), 40)
        assert change.value == pytest.approx(measure.value - found["accuracy", "dev, tier half"].value)
        assert (
            change.value == 0 if change.interval is None else change.interval[0] <= change.value <= change.interval[1]
        )
    texts, labels = ["the film was good", "awful plot", "a nice cat"], [b"positive", b"negative", b"positive"]
    with served_bundles([bundle.path], bundled / "cache") as ask:
        sent = {"text": column(*texts)}
        for tier, run in (("x1", bundled / "SST-2"), ("half", bundled / "Half")):
            result, model, tokenizer = ask("sst2", sent, tier=tier), open_tuned(run, "SST-2"), load_tokenizer(run)
            with torch.no_grad():
                want = [model(torch.tensor([tokenizer.encode(text).ids]))[0].numpy() for text in texts]
            np.testing.assert_allclose(result["logits"], np.stack(want), atol=1e-4)
            assert result["label"][:, 0].tolist() == labels
        assert ask("sst2", sent, tier="x1-int8")["label"][:, 0].tolist() == labels


def test_a_cascade_is_measured_by_the_predictions_of_its_runs(tmp_path):
    truth, easy = np.tile([0, 1], 5), np.arange(10) >= 3
    for name, answers in (("x1", np.where(easy, 1 - truth, truth)), ("x2", np.where(easy, truth, 1 - truth))):
        logits = np.where(np.arange(2) == answers[:, None], 1, -1) * np.arange(1, 11)[:, None]
        (tmp_path / name).mkdir()
        (tmp_path / name / PREDICTIONS).write_bytes(encode_predictions({"holdout": Predictions(logits, truth)}))
    runs = {name: tmp_path / name for name in ("x1", "x2")}
    program, measures = cascade(runs, "logits", 0.3, ["holdout"], ["accuracy"])
    assert (program.lean, program.full, program.default) == ("x2", "x1", False)
    assert margins(logits)[2] < program.margin < margins(logits)[3]
    assert [(measure.metric, measure.split, measure.value, measure.n) for measure in measures] == [
        ("accuracy", "holdout, tier auto", 1.0, 10),
        ("share of x1", "holdout, tier auto", 0.3, 10),
    ]


def test_a_cascade_answers_as_its_tiers_do(bundled):
    twins, own = ("--tier-name", "x1", "--tier-name", "half"), ("--name", "cascade", "--repository", bundled / "models")
    command = (bundled / "SST-2", bundled / "Half", *own, *twins, "--no-measure", "--artifacts", "onnxruntime")
    invoke(export, *command, "--cascade", 0.3)
    bundle = Bundle.open(bundled / "models" / "cascade-1")
    found = {(measure.metric, measure.split): measure for measure in bundle.manifest.measures}
    dev = TASKS["SST-2"].examples(bundled).dev["dev"]
    with served_bundles([bundle.path], bundled / "cache") as ask:
        parts = np.split(column(*(text for (text,) in dev.texts)), 2)
        logits = {
            tier: np.concatenate([ask("cascade", {"text": part}, ["logits"], tier=tier)["logits"] for part in parts])
            for tier in ("x1", "half", "auto")
        }
    from_full = margins(logits["half"]) < bundle.manifest.program.margin
    assert 0 < from_full.mean() < 1
    np.testing.assert_allclose(logits["auto"], np.where(from_full[:, None], logits["x1"], logits["half"]), atol=1e-5)
    assert found["share of x1", "dev, tier auto"].value == from_full.mean()


@pytest.mark.parametrize(("pair", "most", "usual"), [(None, 512, 32), ("text_pair", 512, 64), ("text_pair", 48, 48)])
def test_runtimes_tune_for_texts_of_32_tokens(pair, most, usual):
    names = {"input": "text", "pair": pair, "ids": "input_ids", "mask": "attention_mask"}
    step = TokenizerPreprocess(**names, file="tokenizer.json", max_length=most, pad_id=0, max_text_bytes=1000)
    inputs = ClientInputs(step, {}, {}, {"input_ids": np.zeros((1, 7), np.int64)}, [])
    assert profiles_of(inputs, 8) == {"input_ids": Profile(min=(1, 1), opt=(1, usual), max=(8, most))}


@pytest.fixture(scope="module")
def stsb(tmp_path_factory):
    """A run on pairs of texts with scores, 5 where the second praises and else 0, and its bundle."""
    root = tmp_path_factory.mktemp("pairs")
    for name, number, seed in (("train", 240, 0), ("dev", 40, 1)):
        pairs = zip(make_sentiment(number, seed + 10), make_sentiment(number, seed), strict=True)
        rows = [(first, second, f"{5 * label}.000") for (first, _), (second, label) in pairs]
        write_rows(root / "glue" / "STS-B" / f"{name}.tsv", ("sentence1", "sentence2", "score"), rows)
    write_model(root / "model", make_transformer(layers=1))
    data = ("--data-dir", root)
    # Not to learn the scores, only to depend on the texts: a constant has no spread to compare files by.
    invoke(finetune, "STS-B", "--model", root / "model", *data, "--out", root, *OPTIONS, "--lr", 3e-3, "--epochs", 1)
    invoke(export, root / "STS-B", "--repository", root / "models", "--name", "sts-b", *data)
    return root


def test_the_bundle_of_pairs_takes_two_texts_and_gives_the_score_of_training(stsb):
    bundle = Bundle.open(stsb / "models" / "sts-b-1")
    manifest = bundle.manifest
    assert [tier.name for tier in manifest.tiers] == ["x1", "x1-int8"]
    assert {measure.split.partition(",")[0] for measure in manifest.measures} == {"holdout"}  # it was not --final
    assert [spec.name for spec in manifest.preprocess.inputs] == ["text", "text_pair"]
    assert [spec.name for spec in manifest.inputs] == ["input_ids", "attention_mask", "token_type_ids"]
    assert manifest.postprocess == ScorePostprocess(logits="logits", output="score")
    assert manifest.description == "STS-B of GLUE: a score from 0 to 5"
    # The longest text that was trained on is 32 tokens, and TensorRT tunes for no more.
    assert manifest.profile["token_type_ids"].opt == manifest.profile["input_ids"].opt == (1, 32)
    assert set(bundle.golden.inputs["token_type_ids"].ravel().tolist()) == {0, 1}

    pairs = [("a cat sat", "the film was good"), ("the film was good", "a cat sat"), ("awful", "plot of a nice actor")]
    model, tokenizer = open_tuned(stsb / "STS-B", "STS-B"), load_tokenizer(stsb / "STS-B")
    encoded = [tokenizer.encode(*pair) for pair in pairs]
    with torch.no_grad():
        want = np.stack([model(torch.tensor([e.ids]), None, torch.tensor([e.type_ids]))[0].numpy() for e in encoded])
        blind = np.stack([model(torch.tensor([e.ids]))[0].numpy() for e in encoded])
    assert np.abs(blind - want).max() > 1e-2  # so a graph without segments could not pass
    sent = {name: column(*texts) for name, texts in zip(("text", "text_pair"), zip(*pairs, strict=True), strict=True)}
    with served_bundles([bundle.path], stsb / "cache") as ask:
        result, small = (ask("sts-b", sent, tier=tier) for tier in ("x1", "x1-int8"))
    assert list(result) == ["logits", "score"]
    np.testing.assert_allclose(result["score"], want, atol=1e-4)
    np.testing.assert_allclose(small["score"], want, atol=0.5)


@with_rtx
def test_every_tier_compiles_with_fused_attention(stsb):
    bundle = Bundle.open(stsb / "models" / "sts-b-1")
    for tier in bundle.manifest.tiers:
        built = build(bundle, "tensorrt-rtx:SM86", stsb / "cache", tier=tier.name)
        assert built.record.engine.attention_fused, tier.name
        assert b"_gemm_mha_v2" in (built.directory / built.record.file).read_bytes()


def test_tiers_are_named_by_speed_and_a_bundle_carries_the_files_of_chosen_runtimes(bundled, tmp_path):
    lean = shutil.copytree(bundled / "Half", tmp_path / "lean")
    config = json.loads((lean / CONFIG).read_text())
    (lean / CONFIG).write_text(json.dumps(config | {"speedup": {"ratio": 2.96, "tokens": 32}}))
    faster = [replace(read_config(lean), speedup=Speedup(ratio, 32)) for ratio in (2.0, 3.1)]
    assert tier_names([lean, lean], faster, []) == ["x1", "x1.6"]
    command = (bundled / "SST-2", lean, "--repository", bundled / "models", "--name", "sst2", "--no-measure")
    with pytest.raises(UsageError, match=r"sst2-1: got an existing bundle, .*or --version 2, or another --repository"):
        invoke(export, *command)
    (exported,) = json.loads(invoke(export, *command, "--version", 2, "--artifacts", "onnxruntime", "--json"))
    bundle = Bundle.open(exported["bundle"])
    assert (bundle.path.name, bundle.manifest.version) == ("sst2-2", 2)
    assert [tier.name for tier in bundle.manifest.tiers] == ["x1", "x1-int8", "x3", "x3-int8"]
    assert {a.runtime for tier in bundle.manifest.tiers for a in tier.artifacts} == {"onnxruntime"}
    assert not any(tier.latencies for tier in bundle.manifest.tiers)  # neither measured, nor a file for the Jetson
    assert not list(bundle.path.glob("*tensorrt*"))
    sizes = {path.name: path.stat().st_size for path in bundle.path.glob("*.onnx")}
    assert {one["file"]: one["size_bytes"] for one in exported["files"]} == sizes
    with pytest.raises(BundleError, match=r"tier 'x1': got .*onnxruntime'\], expected .* for tensorrt\. Take"):
        bundle.artifact("tensorrt")


def test_files_are_measured_on_the_data_of_the_run(bundled, tmp_path):
    write_sst2(tmp_path, train=40)
    command = (bundled / "SST-2", "--repository", tmp_path, "--name", "sst2", "--data-dir", tmp_path)
    expected = r"SST-2 split holdout: got 37 items with other targets, expected the 4 items of the data\. Give the"
    with pytest.raises(CheckpointError, match=expected):
        invoke(export, *command)
    assert not (tmp_path / "sst2-1").exists()


def test_runs_that_cannot_be_tiers(bundled, stsb, tmp_path):
    full, half, name = bundled / "SST-2", bundled / "Half", ("--name", "sst2")
    earlier = shutil.copytree(half, tmp_path / "earlier")
    (earlier / CONFIG).write_text((earlier / CONFIG).read_text().replace('"split": 2', '"split": 1'))
    twins = ("--tier-name", "a", "--tier-name", "a-int8")
    for arguments, message in (
        ((bundled / "model", *name), "got a directory without a run's weights"),
        ((full, half, *name), r"run .*Half: got no measured speed, .*give --tier-name once for each run"),
        ((full, full, *name, "--tier-name", "a"), r"--tier-name: got \['a'\], expected 2 names"),
        ((full, *name, "--tier-name", "A b"), r"--tier-name: got 'A b', expected lower-case letters, digits"),
        ((full, full, *name, *twins), r"tiers: got \['a', 'a-int8'\], expected names that differ"),
        ((*[full] * 5, *name), "runs of one bundle: got 5, expected 4 at most"),
        ((full,), r"SST-2: got a fine-tuned run without --name, .*for example --name sst-2; all"),
        (
            (full, earlier, *name, *twins[:3], "b"),
            r"hold-outs of the runs: got tier a with version 2 and tier b with version 1",
        ),
        ((full, *name, "--cascade", 0.3), r"--cascade: got 0\.3, expected two classifiers or more with it, .* Give"),
        ((stsb / "STS-B", stsb / "STS-B", *name, *twins[:3], "b", "--cascade", 0.3), "--cascade: got 0.3, expected"),
        ((full, full, *name, *twins[:3], "b", "--cascade", "nan"), "--cascade: got nan, expected a number"),
        (
            (full, full, *name, *twins[:3], "auto", "--cascade", 0.3),
            "--tier-name: got 'auto', expected a name that the cascade does not have. Give another",
        ),
        ((full, stsb / "STS-B", *name, *twins[:3], "b"), r"task of the runs: got \['SST-2', 'STS-B'\], expected one"),
    ):
        with pytest.raises(UsageError, match=message):
            invoke(export, *arguments, "--repository", tmp_path / "other")
    assert not (tmp_path / "other").exists()
