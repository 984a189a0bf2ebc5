"""Compared models as runs, bundles and engines, and layers that are skipped by input."""

import json
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from safetensors.torch import load_file, save_file

from edge.bundles.bundle import Bundle
from edge.runtimes.build import build
from export.cli.compare import compare
from export.cli.export import export
from export.data.tokens import load_tokenizer
from export.errors import CheckpointError
from export.finetune.models import open_model
from export.papers.adaptive.measures import head_use, speed_on
from export.papers.adaptive.runs import open_compared
from export.quantize.calibration import calibration_feeds
from export.training.runs import CONFIG, WEIGHTS
from tests.support.marks import with_rtx
from tests.support.sample_requests import column
from tests.support.stock_client import served_bundles
from tests.support.task_data import encoded, invoke, make_sentiment

MECHANISMS = ("budget", "skip")
TEXTS = [text for text, _ in make_sentiment(24, seed=3)]


@pytest.fixture(scope="module")
def bundle(place):
    """The bundle of a dense run and of mechanisms, whose gates and masks depend on the text."""
    only = [option for name in MECHANISMS for option in ("--only", name)]
    invoke(compare, place / "SST-2", *only, "--limit", 64, "--keep-runs", "--out", place / "out")
    runs = [place / "out" / "runs" / f"{name}-seed0" for name in MECHANISMS]
    for run in runs:
        weights = load_file(run / WEIGHTS)
        torch.manual_seed(7)
        for name in [name for name in weights if "scorer" in name]:
            weights[name] = torch.randn_like(weights[name]) * (10 if name.endswith("weight") else 0.1)
        save_file(weights, run / WEIGHTS)
    options = [option for name in ("full", *MECHANISMS) for option in ("--tier-name", name)]
    options += ["--repository", place, "--name", "sst2", "--json"]
    (found,) = json.loads(invoke(export, place / "SST-2", *runs, *options))
    return Bundle.open(found["bundle"])


def models(place):
    return {name: open_compared(place / "out" / "runs" / f"{name}-seed0").head for name in MECHANISMS}


def test_dense_and_adaptive_tiers_answer_as_torch_does(bundle, place):
    tiers = bundle.manifest.tiers
    assert [tier.name for tier in tiers] == ["full", "full-int8", *MECHANISMS]
    assert [[(a.runtime, a.precision) for a in tier.artifacts] for tier in tiers[2:]] == [
        [("onnxruntime", "fp32"), ("tensorrt", "fp16")]
    ] * 2
    assert not any(tier.latencies for tier in tiers), "the work of a branch cannot be counted"
    assert {"dev, tier full", "dev, tier skip"} <= {measure.split for measure in bundle.manifest.measures}
    tokenizer = load_tokenizer(place / "out" / "runs" / "skip-seed0")
    with served_bundles([bundle.path], place / "cache") as ask, torch.no_grad():
        for name, model in models(place).items():
            found = ask("sst2", {"text": column(*TEXTS)}, tier=name)["logits"]
            want = [model(torch.tensor([tokenizer.encode(text).ids]))[0].numpy() for text in TEXTS]
            np.testing.assert_allclose(found, np.stack(want), atol=1e-4)


def test_onnx_runtime_leaves_out_the_work_of_a_skipped_layer(bundle, place, tmp_path):
    model, rows = models(place)["skip"], encoded(make_sentiment(24, seed=3))
    data = bundle.read(bundle.artifact("onnxruntime", "skip").file)
    ran = [attentions_run(data, row, tmp_path) for row in calibration_feeds(rows)]
    assert set(ran) == {1, 2}, "of two layers, by the text"
    assert sum(ran) == pytest.approx(head_use(model, rows).kept * 2 * len(ran))
    dense = open_model(place / "SST-2").head
    assert speed_on(dense, model, rows).bound == pytest.approx(2 * len(ran) / sum(ran), rel=0.2)


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
def test_scores_and_branches_compile(bundle, place):
    for name in MECHANISMS:
        built = build(bundle, "tensorrt-rtx:SM86", place / "cache", tier=name)
        assert (built.record.engine.attention_blocks, built.record.engine.attention_fused) == (2, True), name


def test_other_commands_refuse_such_a_run(bundle, place):
    run = place / "out" / "runs" / "skip-seed0"
    with pytest.raises(
        CheckpointError, match="field model: got 'adaptive-skip', expected one of transformer-with-head"
    ):
        open_model(run)
    config = json.loads((run / CONFIG).read_bytes())
    config["arguments"]["labels"] = []
    (run / CONFIG).write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="got no labels of a sequence, expected the arguments of adaptive-skip"):
        open_compared(run)
