"""Attention in the form with the fewest kernels: the same outputs, and the kernels of every shape of layer."""

import functools
import logging

import msgspec
import numpy as np
import onnx
import pytest
import torch
from onnxruntime.transformers.float16 import DEFAULT_OP_BLOCK_LIST
from torch import nn

from edge.bundles.bundle import Bundle
from edge.bundles.manifest import Profile
from export.bundle.fewest_kernels import fewest_kernels
from export.bundle.pack.quantize import simplified
from export.bundle.tier_files import static_int8
from export.estimate.model import kernels
from export.estimate.structure import structure_of
from export.models.convert import dynamic_of, outputs_of, to_onnx
from export.models.heads import Embedding, SentenceEmbedder, SequenceClassifier, TokenClassifier
from export.models.transformer import LayerShape, Transformer, TransformerConfig
from export.quantize.precision import half
from export.quantize.ranges import Scheme, input_ranges
from tests.support.marks import with_rtx, with_transformers
from tests.support.onnx_graphs import attention, packed

FUSED = "_gemm_mha_v2"
DENSE = LayerShape(4, 32, 512)
#: Layers, and the kernels of one of them in FP16 and in INT8.
SHAPES = {
    "dense": (DENSE, 7, 9),
    "some heads of rank 16": (LayerShape(3, 16, 256), 7, 9),
    "one head of rank 64": (LayerShape(1, 64, 256), 7, 9),
    "without feed-forward": (LayerShape(4, 32, 0), 4, 5),
    "without attention": (LayerShape(0, 0, 256), 3, 4),
    "neither": (LayerShape(0, 0, 0), 0, 0),
}

NAMES = {"bert": (*SHAPES, "dense"), "vit": ("dense", "without feed-forward", "without attention")}
LAYERS = {architecture: tuple(SHAPES[name][0] for name in names) for architecture, names in NAMES.items()}
#: Heads, and the kernels around BERT's layers with them.
HEADS = {
    "first token": (lambda bert: SequenceClassifier(bert, 2, "summary"), 3),
    "pooler": (lambda bert: SequenceClassifier(bert, 2, "summary", pooler="tanh"), 4),
    "mean": (lambda bert: SequenceClassifier(bert, 2, "mean"), 5),
    "normalised": (lambda bert: SentenceEmbedder(bert, "mean", Embedding(normalised=True)), 4),
    "tokens": (lambda bert: TokenClassifier(bert, 3), 4),
}


@functools.cache
def exported(architecture, layers, change=lambda transformer: None, head=None, relative_buckets=0):
    """Return the graph of a classifier in FP32 whose biases matter, and inputs for it."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "max_positions": 32} if architecture == "bert" else {"image_size": 32, "patch_size": 8}
    config = TransformerConfig(architecture=architecture, dim=128, layers=layers, channels=3, **sizes)
    config = msgspec.structs.replace(config, relative_buckets=relative_buckets)
    transformer = Transformer(config)
    for module in transformer.modules():
        for parameter in module.parameters(recurse=False):
            if parameter.ndim == 1:
                nn.init.normal_(parameter, float(parameter is module.weight) if hasattr(module, "weight") else 0, 0.2)
    change(transformer)
    draw = np.random.default_rng(0)
    if architecture == "bert":
        feeds = {"ids": draw.integers(0, 50, (2, 12)), "mask": np.ones((2, 12), np.int64)}
        feeds["mask"][1, 7:] = 0
    else:
        feeds = {"pixels": draw.standard_normal((2, 3, 32, 32), np.float32)}
    inputs = {name: torch.from_numpy(array) for name, array in feeds.items()}
    module = head(transformer) if head else SequenceClassifier(transformer, 2, "summary")
    return to_onnx(module, inputs, ["outputs"], dynamic_of(feeds)), feeds


def in_precision(plain, feeds, precision):
    if precision == "fp16":
        return half(fewest_kernels(plain))
    return static_int8(plain, input_ranges(plain, [feeds], Scheme()))


def listed(model, feeds):
    """Return the kernels of an engine for batches of 1 to 8 inputs, of up to 64 tokens."""
    profile = {}
    for name, array in feeds.items():
        rest = array.shape[1:] if array.ndim == 4 else None
        profile[name] = Profile(*((rows, *(rest or (tokens,))) for rows, tokens in ((1, 1), (4, 32), (8, 64))))
    return kernels(model, profile)


def largest_difference(changed, plain, feeds):
    ours, theirs = (outputs_of(model, feeds, "model")["outputs"] for model in (changed, plain))
    return np.abs(ours - theirs).max() / theirs.std()


def operators(model):
    return [node.op_type for node in onnx.load_from_string(model).graph.node]


@pytest.mark.parametrize("architecture", ["bert", "vit"])
def test_the_changed_graph_computes_the_same(architecture):
    plain, feeds = exported(architecture, LAYERS[architecture])
    changed = fewest_kernels(plain)
    assert largest_difference(changed, plain, feeds) < 1e-4
    sums = operators(plain).count("Add") - operators(changed).count("Add")
    assert sums == 3 * sum(shape.num_heads > 0 for shape in LAYERS[architecture])


def cancel(transformer):
    transformer.embeddings.norm.weight.data[:2] = 1e-4
    transformer.embeddings.norm.bias.data[:2] = torch.tensor([1.0, -1.0])


def test_a_bias_that_weights_cannot_take_exactly_stays_with_the_queries():
    """Two almost constant features that cancel out would get large weights, with rounding errors that do not."""
    plain, feeds = exported("bert", (DENSE,), change=cancel)
    changed = fewest_kernels(plain)
    assert operators(plain).count("Add") - operators(changed).count("Add") == 2
    assert largest_difference(half(changed), plain, feeds) < 2 * largest_difference(half(plain), plain, feeds)


def test_attention_whose_projections_others_read_remains_as_it_is():
    plain, feeds = exported("bert", (DENSE,))
    model = onnx.load_from_string(plain)
    product = next(node for node in model.graph.node if node.name.endswith("q_proj"))
    model.graph.output.append(
        onnx.helper.make_tensor_value_info(product.output[0], onnx.TensorProto.FLOAT, [None, None, 128])
    )
    shown = model.SerializeToString()
    changed = outputs_of(fewest_kernels(shown), feeds, "model")
    for name, array in outputs_of(shown, feeds, "model").items():
        np.testing.assert_allclose(changed[name], array, atol=1e-5)


@pytest.mark.parametrize(("opset", "sums"), [(12, 5), (13, 3)])
def test_opsets_without_the_operators_to_write_remain_as_they_are(opset, sums):
    model = attention(opset, [0, 0, 2, 4], [0, 0, 8])
    changed = fewest_kernels(model)
    assert operators(changed).count("Add") == sums
    feeds = {"x": np.random.default_rng(1).standard_normal((2, 3, 8), np.float32)}
    ours, theirs = (outputs_of(one, feeds, "model")["y"] for one in (changed, model))
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("tokens", "sums"), [("t", 5), (4, 3)])
def test_attention_in_windows_of_four_tokens_is_that_of_all_only_where_there_are_four(tokens, sums):
    model = attention(17, [-1, 4, 2, 4], [-1, 4, 8], tokens=tokens)
    assert operators(fewest_kernels(model)).count("Add") == sums


def attention_twice(prefix):
    one = onnx.load_from_string(attention(17, [0, 0, 2, 4], [0, 0, 8]))
    first, second = (onnx.compose.add_prefix(one, prefix + number) for number in "12")
    model = onnx.compose.merge_models(first, second, io_map=[(f"{prefix}1y", f"{prefix}2x")])
    nodes = model.graph.node
    for number in "12":  # Softplus is none of the operators that compute token by token
        place = next(place for place, node in enumerate(nodes) if node.output[0] == f"{prefix}{number}read")
        nodes.insert(place, onnx.helper.make_node("Softplus", [nodes[place].input[0]], [f"{prefix}{number}soft"]))
        nodes[place + 1].input[0] = f"{prefix}{number}soft"
    nodes.append(onnx.helper.make_node("Softplus", [f"{prefix}2y"], ["outputs"]))
    model.graph.output[0].name = "outputs"
    return model.SerializeToString()


def test_tokens_that_enter_at_several_places_are_ordered():
    """The number of rows is read from the first of them, which no order of their names in a set may decide."""
    for prefix in "abcdefgh":
        plain = attention_twice(prefix)
        changed = fewest_kernels(plain)
        assert any(node.name == "tokens.sizes" for node in onnx.load_from_string(changed).graph.node)
        feeds = {f"{prefix}1x": np.random.default_rng(1).standard_normal((2, 3, 8), np.float32)}
        assert largest_difference(changed, plain, feeds) < 1e-4


@pytest.mark.parametrize("head", HEADS)
def test_every_head_computes_the_same(head):
    plain, feeds = exported("bert", (DENSE,), head=HEADS[head][0])
    feeds = {**feeds, "mask": np.pad(feeds["mask"][:1], ((0, 1), (0, 0)))}  # the second input is empty
    changed = fewest_kernels(plain)
    assert largest_difference(changed, plain, feeds) < 1e-4
    assert largest_difference(half(changed), plain, feeds) < 0.02


@with_rtx
@pytest.mark.parametrize("precision", ["fp16", "int8"])
@pytest.mark.parametrize("head", HEADS)
def test_the_kernels_around_the_layers(head, precision):
    make, around = HEADS[head]
    plain, feeds = exported("bert", (DENSE,), head=make)
    model = in_precision(plain, feeds, precision)
    expected = around + SHAPES["dense"][1 + (precision == "int8")]
    assert len(listed(model, feeds)) == expected
    graph = onnx.load_from_string(model).graph
    found = structure_of(graph.node, {tensor.name: tensor for tensor in graph.initializer})
    assert len(found.products) + len(found.attentions) + found.others == expected
    assert logging.getLogger("edge.runtimes.tensorrt.package").level == logging.NOTSET


@with_rtx
@pytest.mark.parametrize(
    ("architecture", "precision", "around"),
    [("bert", "fp16", 3), ("bert", "int8", 3), ("vit", "fp16", 4), ("vit", "int8", 4)],
)
def test_the_kernels_of_layers_of_every_shape(architecture, precision, around):
    plain, feeds = exported(architecture, LAYERS[architecture])
    names = listed(in_precision(plain, feeds, precision), feeds)
    assert sum(FUSED in name for name in names) == sum(shape.num_heads > 0 for shape in LAYERS[architecture])
    assert len(names) == around + sum(SHAPES[name][1 + (precision == "int8")] for name in NAMES[architecture])


@with_rtx
@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_a_bias_of_distances_takes_one_kernel_for_all_layers_and_leaves_attention_fused(precision):
    def share(transformer):
        for layer in transformer.layers:
            layer.attention.relative = transformer.layers[0].attention.relative
            layer.attention.table = layer.attention.table.clone()  # as after a move to a GPU and back

    plain, feeds = exported("bert", (DENSE, DENSE), change=share, relative_buckets=8)
    model = in_precision(plain, feeds, precision)
    assert largest_difference(fewest_kernels(plain), plain, feeds) < 1e-4
    names = listed(model, feeds)
    assert sum(FUSED in name for name in names) == 2
    assert len(names) == 4 + 2 * SHAPES["dense"][1 + (precision == "int8")]


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
