"""Triton's model repositories from bundles; tests/conformance serves them with a real Triton."""

import json
import shutil

import pytest
from google.protobuf import text_format
from msgspec.structs import replace

from edge.bundles.bundle import write_bundle
from edge.bundles.manifest import Serving
from edge.errors import BundleError, UsageError
from edge.pb import inference_pb2 as pb
from export.cli.export import export
from export.cli.pack import pack
from tests.support import text_model
from tests.support.loop_model import write_halving_bundle
from tests.support.onnx_graphs import packed, write
from tests.support.task_data import invoke
from tests.support.triton_repository import reshaped

LABELLED = "clients get the label with class_count of logits, not as label"


def written(place, *bundles, options=()):
    """Return what the command says, and the configurations that it writes."""
    models = json.loads(invoke(export, *bundles, "--triton", "--repository", place, "--json", *options))
    texts = [(place / one["model"].rpartition("/")[2] / "config.pbtxt").read_text() for one in models]
    return models, [text_format.Parse(text, pb.ModelConfig()) for text in texts]


@pytest.fixture
def sentiment(tmp_path):
    """A bundle with defaults of serving, whose lean tier is called one in INT8."""
    manifest = text_model.manifest()
    full, lean = manifest.tiers
    lean = replace(lean, artifacts=(replace(lean.artifacts[0], precision="int8"),))
    serving = Serving(max_queue_delay_us=100, preferred_batch_sizes=(4,))
    files = text_model.files()
    write_bundle(tmp_path / "sentiment-1", replace(manifest, tiers=(full, lean), serving=serving), files)
    return tmp_path / "sentiment-1"


def test_the_tier_that_is_asked_for(sentiment, tmp_path):
    (model,), (config,) = written(tmp_path / "triton", sentiment)
    assert (model["tier"], model["inputs"]) == ("full", ["input_ids", "attention_mask"])
    texts, labels, tiers = model["notes"]
    assert texts.startswith("clients send input_ids, attention_mask of at most 16 tokens, not texts: tokenizer.json")
    assert (labels, tiers) == (LABELLED, "a request cannot choose a tier")
    assert [(one.name, one.data_type, list(one.dims)) for one in config.input] == [
        (name, pb.TYPE_INT64, [-1]) for name in model["inputs"]
    ]
    assert [(one.name, list(one.dims), one.label_filename) for one in config.output] == [("logits", [2], "labels.txt")]
    assert list(config.dynamic_batching.preferred_batch_size) == [4]
    assert config.dynamic_batching.max_queue_delay_microseconds == 100
    place = tmp_path / "triton" / "sentiment"
    assert (place / "1" / "model.onnx").read_bytes() == text_model.model("full")
    assert (place / "labels.txt").read_text().split() == list(text_model.LABELS)
    (model,), (config,) = written(tmp_path / "triton", sentiment, options=("--tier", "lean", "--replace"))
    assert (model["precision"], config.HasField("dynamic_batching")) == ("int8", False)
    assert (place / "1" / "model.onnx").read_bytes() == text_model.model("lean")


def test_what_is_written_can_be_packed(tmp_path):
    """Also tensors that have no dimensions beside the batch, which Triton reshapes."""
    bundle = packed(write(tmp_path / "model.onnx", reshaped()))["bundle"]
    _, (config,) = written(tmp_path / "triton", bundle)
    assert (list(config.input[0].dims), config.input[0].HasField("reshape")) == ([1], True)
    invoke(pack, tmp_path / "triton", "--triton", "--repository", tmp_path / "again")


def test_bundles_and_options_that_triton_does_not_take(sentiment, tmp_path):
    write_halving_bundle(tmp_path / "halving-1")
    place = ("--triton", "--repository", tmp_path / "triton")
    with pytest.raises(UsageError, match=r"halving-1: got the program loop, expected a model that is one ONNX file"):
        invoke(export, tmp_path / "halving-1", *place)
    with pytest.raises(BundleError, match=r"tier: got 'none', expected one of full, lean"):
        invoke(export, sentiment, *place, "--tier", "none")
    assert not (tmp_path / "triton").exists()
    with pytest.raises(UsageError, match=r"--artifacts: expected --triton without it"):
        invoke(export, sentiment, *place, "--artifacts", "onnxruntime")
    with pytest.raises(UsageError, match=r"--name: got 'one', expected one bundle with it"):
        invoke(export, sentiment, tmp_path / "halving-1", *place, "--name", "one")
    copy = shutil.copytree(sentiment, tmp_path / "sentiment-2")
    with pytest.raises(UsageError, match=r"BUNDLE: got .*sentiment-1 and .*, expected bundles of different"):
        invoke(export, sentiment, copy, *place)
    assert not (tmp_path / "triton").exists()
    with pytest.raises(UsageError, match=r"--tier: got 'full', expected --triton with it. Add --triton"):
        invoke(export, sentiment, *place[1:], "--tier", "full")
    written(tmp_path / "triton", sentiment)
    with pytest.raises(UsageError, match=r"triton/sentiment: got an existing model of Triton, expected a free path"):
        invoke(export, sentiment, *place)
    (tmp_path / "triton" / "sentiment" / "config.pbtxt").unlink()
    with pytest.raises(UsageError, match=r"triton/sentiment: got something that is not a model of Triton, expected"):
        invoke(export, sentiment, *place, "--replace")
