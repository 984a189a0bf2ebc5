"""Attention of models that others exported, in the file for TensorRT: fewer kernels, the same answers."""

import numpy as np
import onnx
import pytest
import torch
from onnxruntime.transformers.float16 import DEFAULT_OP_BLOCK_LIST

from edge.bundles.bundle import Bundle
from export.bundle.pack.quantize import simplified
from export.estimate.model import kernels
from export.models.convert import outputs_of
from export.quantize.precision import half
from tests.support.marks import with_rtx, with_transformers
from tests.support.onnx_graphs import attention, packed, write

AXES = {"ids": {0: "n", 1: "t"}, "mask": {0: "n", 1: "t"}, "logits": {0: "n"}}


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """A BERT of the package transformers with two layers, random weights and biases, and two inputs for it."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=60,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=128,
        max_position_embeddings=32,
        attn_implementation="eager",
    )
    model = transformers.BertForSequenceClassification(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, float(bool(parameter.ndim == 1 and parameter.min() == 1)), 0.2)
    feeds = {"ids": np.random.default_rng(0).integers(0, 60, (2, 12)), "mask": np.ones((2, 12), np.int64)}
    feeds["mask"][1, 7:] = 0
    path = tmp_path_factory.mktemp("foreign") / "bert.onnx"
    names = {"input_names": list(feeds), "output_names": ["logits"], "dynamic_axes": AXES}
    torch.onnx.export(
        model, tuple(map(torch.from_numpy, feeds.values())), path, dynamo=False, opset_version=17, **names
    )
    np.savez(path.with_name("golden.npz"), **feeds)
    return path, feeds


@with_rtx
@with_transformers
@pytest.mark.filterwarnings("ignore")  # the exporter warns
def test_a_packed_bert_has_seven_kernels_a_layer_and_answers_as_before(foreign):
    path, feeds = foreign
    shapes = [option for name in feeds for option in ("--shape", f"{name}=1x1:4x12:8x32")]
    bundle = Bundle.open(packed(path, "--fp16", "--inputs", path.with_name("golden.npz"), *shapes)["bundle"])
    data = bundle.read(bundle.artifact("tensorrt", "x1").file)
    before = half(simplified(onnx.load(path)).SerializeToString(), fp32_operators=DEFAULT_OP_BLOCK_LIST)
    assert [len(kernels(model, bundle.manifest.profile)) for model in (before, data)] == [26, 19]
    ours, theirs = (outputs_of(model, feeds, "model")["logits"] for model in (data, path.read_bytes()))
    assert np.abs(ours - theirs).max() < 0.02 * theirs.std()


def test_attention_in_windows_of_tokens_remains_as_it_is(tmp_path):
    """Rewritten, the tokens would attend to all others."""
    given = attention(17, [-1, 4, 2, 4], [-1, 8, 8], tokens=8)
    bundle = Bundle.open(packed(write(tmp_path / "windows.onnx", given), "--fp16")["bundle"])
    data = bundle.read(bundle.artifact("tensorrt", "x1").file)
    feeds = {"x": np.random.default_rng(1).standard_normal((2, 8, 8), np.float32)}
    ours, theirs = (outputs_of(model, feeds, "model")["y"] for model in (data, given))
    assert np.abs(ours - theirs).max() < 0.02 * theirs.std()
