"""The prediction of latencies: the work of graphs, the constants of the fit, and the command."""

import json
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from edge.bench.layer_latencies import PREDICTION
from edge.bundles.manifest import Profile
from edge.datatypes import TensorSpec
from edge.errors import BundleError, UsageError
from export.bundle.fewest_kernels import fewest_kernels
from export.bundle.tier_files import static_int8
from export.cli.estimate import estimate
from export.estimate.devices import BOARD_MODES, DEFAULT_BOARD, DEVICES, mode_of
from export.estimate.document import compare, errors, fit
from export.estimate.measurements import published
from export.estimate.model import parse_layers
from export.estimate.operations import ModelWork, work_of
from export.estimate.roofline import ERRORS, FITTED, predict
from export.estimate.sizes import check_sizes, input_shapes
from export.estimate.work import transformer_work
from export.models.convert import dynamic_of, to_onnx
from export.models.heads import SequenceClassifier
from export.models.transformer import LayerShape, Transformer, TransformerConfig
from export.papers.calculator.networks import create
from export.quantize.precision import half
from export.quantize.ranges import LARGEST, input_ranges
from export.reduce.latency import feeds_of
from export.reduce.plan import macs_per_token
from tests.support.task_data import invoke

LAYER = LayerShape(12, 32, 1536)


def exported(architecture, layers):
    sizes = {"dim": 384, "vocab_size": 100, "image_size": 224, "patch_size": 16, "channels": 3}
    positions = 197 if architecture == "vit" else 512
    config = TransformerConfig(architecture=architecture, layers=layers, max_positions=positions, **sizes)
    torch.manual_seed(0)
    model = SequenceClassifier(Transformer(config), 2)
    feeds = feeds_of(config, 32)
    dynamic = {name: {1: "tokens"} if array.ndim == 2 else {} for name, array in feeds.items()}
    inputs = {name: torch.from_numpy(array) for name, array in feeds.items()}
    return to_onnx(model, inputs, ["logits"], dynamic), feeds


def test_work_is_counted_in_the_precision_that_computes_it():
    plain, feeds = exported("bert", (LAYER,))
    shapes, tokens = {name: (1, 128) for name in feeds}, 128
    products = 2e-9 * tokens * (4 * 384 * 384 + 2 * 384 * 1536)
    all_products = 2e-9 * tokens * macs_per_token(384, LAYER, tokens)
    halved = work_of(half(plain), shapes, "model")
    assert halved.gflop == {"fp16": pytest.approx(all_products, rel=1e-3)}
    kinds = [kernel.kind for kernel in halved.kernels if kernel.weight_bytes or kernel.kind == "attention"]
    assert sorted(kinds) == ["attention", *["product"] * 5]  # queries, keys and values are one
    quantised = work_of(static_int8(plain, input_ranges(plain, [feeds], LARGEST)), shapes, "model")
    assert quantised.gflop["int8"] == pytest.approx(products, rel=1e-6)
    assert sum(quantised.gflop.values()) == pytest.approx(all_products, rel=1e-3)
    assert quantised.weight_bytes < 0.6 * halved.weight_bytes
    assert sum(work_of(plain, shapes, "model").gflop.values()) == pytest.approx(all_products, rel=1e-3)
    images, feeds = exported("vit", (LAYER,))
    pixels = {name: array.shape for name, array in feeds.items()}
    vit = 2e-9 * 197 * macs_per_token(384, LAYER, 197) + 2e-9 * 196 * 3 * 16**2 * 384
    assert work_of(half(images), pixels, "model").gflop["fp16"] == pytest.approx(vit, rel=1e-3)


#: Operations for 15 tokens: of the recurrent layer or layers, and of all that comes after them.
RECURRENT = {
    "calculator-rnn2": 2 * 15 * 269 * ((1 + 269) + (269 + 269)) + 2 * 269,
    "calculator-gru": 2 * 15 * 3 * 35 * (1 + 35) + 2 * 15 * (35 * 35 + 35) + 2 * 35,
    "calculator-lstm": 2 * 15 * 4 * 35 * (1 + 35) + 2 * 15 * (35 * 35 + 35) + 2 * 35,
    "calculator-bilstm": 2 * 15 * 2 * 4 * 64 * (1 + 64) + 2 * 15 * (128 * 128 + 128) + 2 * 128,
}


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers_count_the_products_of_every_step_gate_and_direction(name):
    model = to_onnx(create(name, 0), {"x": torch.zeros(2, 15)}, ["value"], {"x": {0: "batch"}})
    work = ModelWork(model, name)
    for rows in (8, 1):
        assert work.at({"x": (rows, 15)}).gflop == {"fp32": pytest.approx(1e-9 * rows * RECURRENT[name])}


def test_only_layers_with_kernels_are_counted():
    log = "Layers:\nName: a_0, LayerType: shape_call, Inputs: []\nName: b_1, LayerType: kgen, Inputs: []\n"
    log += "Name: c, d_2, LayerType: gemm, Inputs: [ { Name: x, Dimensions: [1] }]\n"
    assert parse_layers(log) == ["b_1", "c, d_2"]


#: Of a tier in FP16 and in INT8, for up to 32 tokens in 32 rows.
BUNDLE = Path(__file__).parents[1] / "compatibility" / "data" / "bundles" / "tokens-1"


def test_predictions_are_labelled_as_predictions():
    options = ("--mode", "15W", "--lengths", "8,16")
    found = json.loads(invoke(estimate, BUNDLE, *options, "--json"))
    assert (found["label"], set(found["errors"])) == (PREDICTION, {"kernels", "int8", "narrow"})
    assert {row["prediction"]["bound_by"] for row in found["rows"]} == {"kernels"}
    rows = [("x1", "fp16", 8), ("x1", "fp16", 16), ("x1-int8", "int8", 8), ("x1-int8", "int8", 16)]
    assert [(row["tier"], row["precision"], row["tokens"]) for row in found["rows"]] == rows
    assert ([row["times_faster"] for row in found["rows"][:2]], found["recommended_tier"]) == ([1, 1], "x1")
    text = invoke(estimate, BUNDLE, *options)
    assert text.count("not measured on an Orin") == 2
    assert "bound by kernels 59% (n = 3, RMS 34%)" in text


def test_wrong_options_and_foreign_operators_are_rejected(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)  # so that nobody counts the kernels of an engine
    for arguments, message in (
        (("--mode", "7W"), "--mode: got '7W', expected one of 15W, 25W, MAXN_SUPER, the modes of"),
        (("--device", "agx-orin"), r"--device: got 'agx-orin', expected orin-nano-super \(15W, .*\) or orin-nano \(7W"),
        (("--lengths", "512"), "--lengths: got 512, expected 1 to 32"),
        (("--batch", "64"), "--batch: got 64, expected at most 32"),
    ):
        with pytest.raises(UsageError, match=message):
            invoke(estimate, BUNDLE, *arguments)
    node = onnx.helper.make_node("Gelu", ["x"], ["y"], domain="com.microsoft")
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph([node], "g", [value("x", 1, [1])], [value("y", 1, [1])])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("com.microsoft", 1)])
    with pytest.raises(BundleError, match=r"got operators of com\.microsoft, expected standard ONNX operators"):
        work_of(model.SerializeToString(), {"x": (1,)}, "model")


PARSED = """<ir_version: 8, opset_import: ["" : 17]>
g (float[n, 3] x) => ({output} y)
<int64[2] s = {{3, 2}}, float[3] v = {{1, 1, 1}}, float[3, 1] w = {{1, 1, 1}}> {{ {nodes} }}"""


@pytest.mark.parametrize(
    ("nodes", "given"),
    [
        ('y = Einsum <equation = "ij,jk->ik"> (x, w)', "the operator Einsum"),
        (
            "c = Cast <to = 9> (v) y = If (c) <then_branch = a () => (float[n, 1] p) { p = If (c) "
            '<then_branch = i () => (float[n, 1] r) { r = Einsum <equation = "ij,jk->ik"> (x, w) }, '
            "else_branch = j () => (float[n, 1] s) { s = Identity(x) }> }, "
            "else_branch = b () => (float[n, 1] q) { q = Identity(x) }>",
            "the operator If",
        ),
        ("r = Reshape(x, s) c = Concat <axis = 1> (r, x) y = MatMul(c, w)", "a tensor 'c' of unknown shape"),
    ],
)
def test_work_that_cannot_be_counted_is_not_left_out(nodes, given):
    model = onnx.parser.parse_model(PARSED.format(output="float[n, k]", nodes=nodes)).SerializeToString()
    with pytest.raises(BundleError, match=f"got {given}"):
        work_of(model, {"x": (2, 3)}, "model")


def test_a_product_with_a_vector_has_a_row_for_each_sum():
    model = onnx.parser.parse_model(PARSED.format(output="float[n]", nodes="y = MatMul(x, v)")).SerializeToString()
    (kernel,) = work_of(model, {"x": (2, 3)}, "model").kernels
    assert (kernel.rows, kernel.inner, kernel.gflop) == (2, 3, pytest.approx(12e-9))


def test_sizes_are_the_usual_ones_that_a_model_takes_and_else_those_that_it_is_tuned_for():
    inputs = [TensorSpec(name, "INT64", (-1, -1)) for name in ("ids", "mask")]
    profile = {name: Profile(min=(1, 8), opt=(4, 32), max=(8, 512)) for name in ("ids", "mask")}
    assert check_sizes(inputs, profile, 8, (), (1, 8)) == [(1, 32), (8, 32), (1, 128), (8, 128)]
    assert input_shapes(inputs, profile, 8, 8, 128) == {"ids": (8, 128), "mask": (8, 128)}
    short = {name: Profile(min=(1, 8), opt=(1, 16), max=(1, 20)) for name in ("ids", "mask")}
    assert check_sizes(inputs, short, 1, (), (1,)) == [(1, 16)]
    images = [TensorSpec("pixels", "FP32", (-1, 3, -1, -1)), TensorSpec("weights", "FP32", (-1, 4))]
    free = {"pixels": Profile(min=(1, 3, 8, 8), opt=(1, 3, 64, 48), max=(8, 3, 512, 512))}
    free["weights"] = Profile(min=(1, 4), opt=(1, 4), max=(8, 4))
    assert check_sizes(images, free, 8, (), (8,)) == [(8, None)]
    assert input_shapes(images, free, 8, 8, None) == {"pixels": (8, 3, 64, 48), "weights": (8, 4)}
    other = profile | {"mask": Profile(min=(1, 8), opt=(4, 16), max=(8, 16))}
    assert check_sizes(inputs, other, 8, (), (1,)) == [(1, None)]
    assert input_shapes(inputs, other, 8, 1, None) == {"ids": (1, 32), "mask": (1, 16)}


PLACES = """<ir_version: 8, opset_import: ["" : 18]> g (float[64, 64] x) => (float[places, 3] y) {
  sum = Add(weight, x)  found = NonZero(sum)  cast = Cast<to = 1>(found)  turned = Transpose<perm = [1, 0]>(cast)
  y = MatMul(turned, matrix)
}"""


def test_a_shape_that_depends_on_weights_is_found_by_a_run():
    """The places of 1,000 values that are not 0 in the sum of a weight and the input, [1000, 2], times a matrix."""
    weight, model = np.zeros((64, 64), np.float32), onnx.parser.parse_model(PLACES)
    weight.flat[:1000] = 1
    arrays = {"weight": weight, "matrix": np.ones((2, 3), np.float32)}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in arrays.items())
    found = work_of(model.SerializeToString(), {"x": (64, 64)}, "model").gflop
    assert found == {"fp32": pytest.approx(2e-9 * 1000 * 2 * 3)}


def test_a_board_and_its_mode_have_one_notation():
    found = BOARD_MODES["orin-nano-super:15W"]
    assert found.mode == mode_of(*found) == DEVICES["orin-nano-super"].modes["15W"]
    every = "orin-nano-super:15W orin-nano-super:25W orin-nano-super:MAXN_SUPER orin-nano:7W orin-nano:15W"
    assert list(BOARD_MODES) == every.split()


@pytest.fixture(scope="module")
def compared():
    return compare()


def test_the_constants_are_the_fit():
    assert fit([one for one in published().measurements if not one.check]) == FITTED


def test_the_errors_are_those_of_measurements_left_out(compared):
    assert errors(compared) == ERRORS
    for one in compared:
        if not one.measurement.check:
            assert one.prediction.low_ms < one.measurement.ms < one.prediction.high_ms, one.measurement


def test_each_source_and_network_is_used():
    found = published()
    assert {one.source for one in found.measurements} == set(found.sources)
    assert {one.network for one in found.measurements} == set(found.networks)


#: Layers with both halves, one of them, and none; with a single head, which gets another one.
LAYERS = tuple(LayerShape(*sizes) for sizes in ((4, 32, 512), (0, 0, 256), (3, 16, 0), (1, 32, 128), (0, 0, 0)))
IMAGES = {"image_size": 32, "patch_size": 8, "channels": 3, "max_positions": 17}


@pytest.mark.parametrize(("architecture", "sizes"), [("bert", {"vocab_size": 100}), ("vit", IMAGES)])
def test_the_work_by_the_sizes_of_layers_is_that_of_the_file(architecture, sizes):
    config = TransformerConfig(architecture=architecture, layers=LAYERS, dim=128, **sizes)
    feeds = {
        name: torch.from_numpy(array).repeat(2, *[1] * (array.ndim - 1)) for name, array in feeds_of(config, 32).items()
    }
    model = SequenceClassifier(Transformer(config), 3)
    plain = to_onnx(model, feeds, ["logits"], dynamic_of({name: array.numpy() for name, array in feeds.items()}))
    file = half(fewest_kernels(plain))  # as an export writes it
    for rows, tokens in ((1, 32), (8, 128)):
        tokens = tokens if architecture == "bert" else config.max_positions
        shapes = {
            name: (rows, tokens) if array.ndim == 2 else (rows, *array.shape[1:]) for name, array in feeds.items()
        }
        of_file, of_sizes = work_of(file, shapes, "model"), transformer_work(config, tokens, rows, 3)
        assert (len(of_sizes.kernels), of_sizes.others, of_sizes.batch) == (len(of_file.kernels), of_file.others, rows)
        assert of_sizes.gflop == {"fp16": pytest.approx(of_file.gflop["fp16"], rel=1e-6)}
        assert of_sizes.weight_bytes == pytest.approx(of_file.weight_bytes, rel=0.01)
        of_file, of_sizes = (predict(work, None, DEFAULT_BOARD.mode) for work in (of_file, of_sizes))
        assert of_sizes.milliseconds == pytest.approx(of_file.milliseconds, rel=1e-3)
        assert of_sizes.regimes == of_file.regimes
