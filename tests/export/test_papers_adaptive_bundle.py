"""Compared models as runs, bundles and engines, and layers that are skipped by input."""

import json
import shutil
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from msgspec.structs import replace
from PIL import Image

from edge.bundles.bundle import Bundle
from edge.runtimes.build import build
from export.cli.compare import compare
from export.cli.export import export
from export.cli.finetune import finetune
from export.data.images import digits
from export.data.tokens import load_tokenizer
from export.errors import CheckpointError
from export.finetune.models import open_model
from export.finetune.predictions import read_predictions
from export.finetune.text_tasks import TASKS
from export.papers.adaptive.measures import head_use, measure_files
from export.papers.adaptive.mechanisms import MECHANISMS
from export.papers.adaptive.runs import name_of, open_compared
from export.quantize.calibration import calibration_feeds, plain_onnx
from export.training.checkpoint import save
from export.training.runs import CONFIG, PREDICTIONS, TOKENIZER
from tests.support.image_model import encoded as png
from tests.support.marks import with_rtx
from tests.support.sample_requests import column
from tests.support.stock_client import served_bundles
from tests.support.task_data import encoded, invoke, make_sentiment

#: Tiers of the bundles, which hold four runs each at most.
BUNDLES = {"sst2": ("full", "global", "budget", "skip"), "others": ("literal", "fixed", "linformer", "random")}
NAMES = tuple(name for tiers in BUNDLES.values() for name in tiers if name != "full")
TEXTS = [text for text, _ in make_sentiment(24, seed=3)]


def run_of(place, name):
    return place / "runs" / name


@pytest.fixture(scope="module")
def bundles(place):
    """The bundle of a dense run and of mechanisms, whose gates and masks depend on the text, and that of the others."""
    dense = place / "SST-2"
    opened = open_model(dense)
    for name in NAMES:
        model = MECHANISMS[name].modules(opened.head)
        torch.manual_seed(7)
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if "scorer" in parameter_name:
                    parameter.normal_(0, 10 if parameter.dim() > 1 else 0.1)
                elif "mixing" in parameter_name:
                    parameter.normal_()
        files = {file: (dense / file).read_bytes() for file in (PREDICTIONS, TOKENIZER)}
        save(run_of(place, name), model, replace(opened.config, model=name_of(name)), opened.metrics, files)
    found = {}
    for name, tiers in BUNDLES.items():
        runs = [dense if tier == "full" else run_of(place, tier) for tier in tiers]
        options = [option for tier in tiers for option in ("--tier-name", tier)]
        options += ["--repository", place, "--name", name, "--json", *(["--no-measure"] if name == "others" else [])]
        (one,) = json.loads(invoke(export, *runs, *options))
        found[name] = Bundle.open(one["bundle"])
    return found


def models(place):
    return {name: open_compared(run_of(place, name)).head for name in NAMES}


def test_dense_and_adaptive_tiers_answer_as_torch_does(bundles, place):
    tiers = [tier for bundle in bundles.values() for tier in bundle.manifest.tiers]
    assert [tier.name for tier in tiers] == ["full", "full-int8", *NAMES]
    assert [[(a.runtime, a.precision) for a in tier.artifacts] for tier in tiers[2:]] == [
        [("onnxruntime", "fp32"), ("tensorrt", "fp16")]
    ] * len(NAMES)
    sst2 = bundles["sst2"].manifest
    assert not any(tier.latencies for tier in sst2.tiers), "the work of a branch cannot be counted"
    assert {"dev, tier full", "dev, tier skip"} <= {measure.split for measure in sst2.measures}
    tokenizer = load_tokenizer(run_of(place, "skip"))
    with served_bundles([of.path for of in bundles.values()], place / "cache") as ask, torch.no_grad():
        for name, model in models(place).items():
            (bundle,) = [bundle for bundle, tiers in BUNDLES.items() if name in tiers]
            found = ask(bundle, {"text": column(*TEXTS)}, tier=name)["logits"]
            want = [model(torch.tensor([tokenizer.encode(text).ids]))[0].numpy() for text in TEXTS]
            np.testing.assert_allclose(found, np.stack(want), atol=1e-4, err_msg=name)


def kept_runs(dense, place, *training):
    """Return the runs of a comparison by name, which are tiers of the bundle ``kept-1``."""
    names = BUNDLES["sst2"]
    chosen = [option for name in names[1:] for option in ("--only", name)]
    invoke(compare, dense, *chosen, *training, "--keep-runs", "--no-plots", "--out", place / "out")
    runs = {name: place / "out" / "runs" / f"{name}-seed0" for name in names}
    tiers = [option for name in names for option in ("--tier-name", name)]
    own = ("--name", "kept", "--repository", place, "--no-measure", "--artifacts", "onnxruntime")
    invoke(export, *runs.values(), *tiers, *own)
    return runs


@pytest.mark.slow
def test_trained_mechanisms_are_served_with_the_logits_of_their_records(place, tmp_path):
    runs = kept_runs(place / "SST-2", tmp_path, "--data-dir", place, "--limit", 128, "--lr", 3e-3)
    texts = [text for (text,) in TASKS["SST-2"].examples(place).dev["dev"].texts]
    recorded = {name: read_predictions(run, "dev").logits for name, run in runs.items()}
    with served_bundles([tmp_path / "kept-1"], tmp_path / "cache") as ask:
        for name in runs:
            found = [ask("kept", {"text": column(text)}, tier=name)["logits"][0] for text in texts]
            np.testing.assert_allclose(found, recorded[name], atol=1e-4)
    assert all(np.abs(recorded[name] - recorded["full"]).max() > 1e-3 for name in runs if name != "full")


@pytest.mark.slow
def test_mechanisms_trained_on_images_are_served_as_torch_answers(tmp_path):
    pytest.importorskip("sklearn", reason="scikit-learn is absent")
    shape = ("--dim", 16, "--depth", 2, "--heads", 2, "--epochs", 4, "--lr", 1e-2, "--no-report")
    invoke(finetune, "digits", *shape, "--out", tmp_path)
    runs = kept_runs(tmp_path / "digits", tmp_path, "--limit", 256, "--lr", 1e-2)
    levels = np.rint(digits().pixels[:16, 0] * 127.5 + 127.5).astype(np.uint8)
    files, pixels, wanted = [png(Image.fromarray(image)) for image in levels], levels[:, None] / 127.5 - 1, {}
    with served_bundles([tmp_path / "kept-1"], tmp_path / "cache") as ask, torch.no_grad():
        for name, run in runs.items():
            found = [ask("kept", {"image": column(file)}, tier=name)["logits"][0] for file in files]
            wanted[name] = open_compared(run).head(torch.from_numpy(pixels).float()).numpy()
            np.testing.assert_allclose(found, wanted[name], atol=1e-4, err_msg=name)
    assert all(np.abs(wanted[name] - wanted["full"]).max() > 1e-3 for name in runs if name != "full")


def test_onnx_runtime_leaves_out_the_work_of_a_skipped_layer(bundles, place, tmp_path):
    model, rows = models(place)["skip"], encoded(make_sentiment(24, seed=3))
    bundle = bundles["sst2"]
    data = bundle.read(bundle.artifact("onnxruntime", "skip").file)
    ran = [attentions_run(data, row, tmp_path) for row in calibration_feeds(rows)]
    assert set(ran) == {0, 1, 2}, "of two layers, by the text"
    assert sum(ran) == pytest.approx(head_use(model, rows).kept * 2 * len(ran))
    dense = open_model(place / "SST-2").head
    measured = measure_files(dense, plain_onnx(dense, rows), model, rows, rows)
    assert measured.speeds[0].bound == pytest.approx(2 * len(ran) / sum(ran), rel=0.2)


def attentions_run(data, row, directory):
    """Return how many attentions ONNX Runtime computes for one row, by its own profile."""
    options = onnxruntime.SessionOptions()
    options.enable_profiling, options.profile_file_prefix = True, str(directory / "profile")
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    names = {"inputs": "input_ids", "mask": "attention_mask"}
    session.run(None, {new: row[old] for old, new in names.items()})
    events = json.loads(Path(session.end_profiling()).read_bytes())
    return sum(event.get("args", {}).get("op_name") == "MultiHeadAttention" for event in events)


@with_rtx
def test_scores_mixtures_and_branches_compile(bundles, place):
    found = {}
    for bundle, tiers in BUNDLES.items():
        for name in set(tiers) & set(NAMES):
            engine = build(bundles[bundle], "tensorrt-rtx:SM86", place / "cache", tier=name).record.engine
            found[name] = (engine.attention_blocks, engine.attention_fused)
    two_widths = dict.fromkeys(("random", "global"), (4, True))  # of heads, each with an attention of its own
    assert found == dict.fromkeys(NAMES, (2, True)) | two_widths


def test_other_commands_refuse_such_a_run(bundles, place, tmp_path):
    run = shutil.copytree(run_of(place, "skip"), tmp_path / "run")
    with pytest.raises(
        CheckpointError,
        match=r"config\.json field model: got 'adaptive-skip', expected one of transformer-with-head\. Give a run of",
    ):
        open_model(run)
    config = json.loads((run / CONFIG).read_bytes())
    config["arguments"]["per_token"] = True
    (run / CONFIG).write_text(json.dumps(config))
    with pytest.raises(
        CheckpointError, match=r"got no classifier of texts, expected the arguments of adaptive-skip\. Train"
    ):
        open_compared(run)
