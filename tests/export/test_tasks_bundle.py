import json

import numpy as np
import pytest
import torch
import tritonclient.grpc as triton

from edge.build import build
from edge.bundle import Bundle
from edge.errors import UsageError
from edge.launch import running_server
from export.cli import export
from export.tasks.cli import finetune
from export.tasks.models import find_tuned
from export.tasks.tokens import load_tokenizer
from tests.edge.marks import with_rtx
from tests.export.task_data import invoke, make_transformer, write_model, write_sst2

OPTIONS = ("--lr", 2e-2, "--batch", 32, "--max-length", 32)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with data, a run, a leaner run that imitates it, and the bundle of both."""
    root = tmp_path_factory.mktemp("bundle")
    write_sst2(root)
    write_model(root / "model", make_transformer())
    write_model(root / "small", make_transformer(layers=1, seed=1))
    data = ("--data-dir", root)
    invoke(finetune, "SST-2", "--model", root / "model", *data, "--out", root / "full", *OPTIONS)
    invoke(finetune, "SST-2", "--model", root / "small", *data, "--out", root / "lean", *OPTIONS)
    (root / "lean" / "SST-2").rename(root / "lean" / "Half")
    runs = (root / "full" / "SST-2", root / "lean" / "Half")
    told = invoke(export, *runs, "--repository", root / "models", "--name", "sst2", *data, "--json")
    assert json.loads(told)[0]["bundle"] == str(root / "models" / "sst2-1")
    return root


def test_the_bundle_has_a_tier_for_each_run_and_precision(place):
    manifest = Bundle.open(place / "models" / "sst2-1").manifest
    assert [tier.name for tier in manifest.tiers] == ["full", "full-int8", "half", "half-int8"]
    assert [[a.runtime for a in tier.artifacts] for tier in manifest.tiers] == [["onnxruntime", "tensorrt"]] * 4
    assert manifest.postprocess.labels == ("negative", "positive")
    assert {measure.split for measure in manifest.measures} >= {"dev, tier full", "dev, tier half"}


def test_it_is_served_as_it_was_trained(place):
    texts = ["the film was good", "awful plot", "a nice cat"]
    tensor = triton.InferInput("text", [3, 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[text.encode()] for text in texts], np.object_))
    with (
        running_server([place / "models" / "sst2-1"], cache=place / "cache") as ready,
        triton.InferenceServerClient(f"127.0.0.1:{ready.grpc_port}") as client,
    ):
        for tier, run in (("full", place / "full" / "SST-2"), ("half", place / "lean" / "Half")):
            result = client.infer("sst2", [tensor], parameters={"tier": tier})
            model, tokenizer = find_tuned(run, "SST-2"), load_tokenizer(run)
            for row, text in enumerate(texts):
                with torch.no_grad():
                    logits = model(torch.tensor([tokenizer.encode(text).ids]))[0].numpy()
                np.testing.assert_allclose(result.as_numpy("logits")[row], logits, atol=1e-4)
            assert result.as_numpy("label")[:, 0].tolist() == [b"positive", b"negative", b"positive"]
        small = client.infer("sst2", [tensor], parameters={"tier": "full-int8"})
        assert small.as_numpy("label")[:, 0].tolist() == [b"positive", b"negative", b"positive"]


@with_rtx
def test_every_tier_compiles_with_fused_attention(place):
    bundle = Bundle.open(place / "models" / "sst2-1")
    for tier in bundle.manifest.tiers:
        engine = build(bundle, "tensorrt-rtx:SM86", place / "cache", tier=tier.name).record.engine
        assert engine.attention_fused, tier.name


def test_runs_that_cannot_be_tiers(place):
    with pytest.raises(UsageError, match="a classifier of texts"):
        invoke(export, place / "model", "--repository", place / "other", "--name", "sst2", "--data-dir", place)
    assert not (place / "other").exists()
