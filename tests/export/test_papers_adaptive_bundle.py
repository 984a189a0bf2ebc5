"""Compared models as runs, bundles and engines, and layers that are skipped by input."""

import json
from collections import Counter

import numpy as np
import onnx
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
from export.finetune.objectives import outputs_of
from export.papers.adaptive.gate import GatedLayer
from export.papers.adaptive.measures import head_use, speed_on
from export.papers.adaptive.runs import open_compared
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
        torch.manual_seed(0)
        for name in [name for name in weights if "scorer" in name]:
            weights[name] = torch.randn_like(weights[name]) * (3 if name.endswith("weight") else 0.1)
        save_file(weights, run / WEIGHTS)
    tiers = [option for name in ("full", *MECHANISMS) for option in ("--tier-name", name)]
    (found,) = json.loads(
        invoke(
            export, place / "SST-2", *runs, "--repository", place, "--name", "sst2", *tiers, "--no-measure", "--json"
        )
    )
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


def test_a_skipped_layer_is_a_branch_without_work(bundle, place):
    model, rows = models(place)["skip"], encoded(make_sentiment(24, seed=3))
    use = head_use(model, rows)
    assert 0.2 < use.kept < 0.8
    assert use.spread > 0.5, "of the score's variance is between the texts"
    graph = onnx.load_from_string(bundle.read(bundle.artifact("onnxruntime", "skip").file)).graph
    outside = Counter(node.op_type for node in graph.node)
    assert (outside["If"], outside["MultiHeadAttention"], outside["BiasGelu"]) == (2, 0, 0)
    for node in graph.node:
        inside = {a.name: Counter(one.op_type for one in a.g.node) for a in node.attribute if a.HasField("g")}
        if inside:
            assert inside["then_branch"]["MultiHeadAttention"] == 1
            assert set(inside["else_branch"]) == {"Identity"}
    dense = open_model(place / "SST-2").head
    ran = [int((scores > 0.5).sum()) for scores in gates(model, rows)]
    assert speed_on(dense, model, rows).bound == pytest.approx(2 * len(ran) / sum(ran), rel=0.2)


def gates(model, rows):
    """Return the scores of both layers for each row, alone."""
    layers = [layer for layer in model.modules() if isinstance(layer, GatedLayer)]
    for row in range(len(rows.targets)):
        found = []
        handles = [
            layer.scorer.register_forward_hook(lambda _, __, score, found=found: found.append(score))
            for layer in layers
        ]
        with torch.no_grad():
            outputs_of(model, rows.batch(np.array([row])))
        for handle in handles:
            handle.remove()
        yield torch.cat(found)


@with_rtx
def test_scores_and_branches_compile(bundle, place):
    for name in MECHANISMS:
        built = build(bundle, "tensorrt-rtx:SM86", place / "cache", tier=name)
        assert built.record.engine.attention_blocks == 2, name


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
