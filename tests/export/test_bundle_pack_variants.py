"""FP16 and INT8 files of packed networks with convolutions: what is in them, how exact they are, what is refused."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from edge.bundles.bundle import Bundle
from edge.bundles.golden import check_outputs
from edge.bundles.manifest import Profile
from edge.errors import GoldenError, UsageError
from edge.runtimes.tensorrt.build import compile_onnx
from export.bundle.pack.golden import largest_rms
from export.models.convert import outputs_of
from tests.support.marks import with_rtx
from tests.support.onnx_graphs import FLOAT, constant, model_of, node, packed, value, write
from tests.support.stock_client import served_bundles


def weight(name, *shape):
    values = np.random.default_rng([0, *name.encode()]).normal(size=shape) / np.sqrt(np.prod(shape[1:]))
    return constant(name, values.astype(np.float32))


def detector(rows="batch", *more, outputs=None, constants=()):
    """A detector for images of 16 x 16: boxes [N, 64, 4] and scores [N, 64, 2] of two classes.

    A normalised convolution with a variance far beyond FP16, a residual block, a grouped convolution and two heads.
    """
    statistics = [constant(f"bn.{name}", np.full(8, x, np.float32)) for name, x in NORMALISATION.items()]
    shapes = {name: constant(f"{name}.shape", np.array([0 if rows == "batch" else 1, -1, n])) for name, n in HEADS}
    nodes = [
        node("Conv", ["image", "stem", "stem.bias"], ["conv"], strides=[2, 2], pads=[1] * 4),
        node("BatchNormalization", ["conv", *(one.name for one in statistics)], ["normal"]),
        node("Relu", ["normal"], ["features"]),
        node("Conv", ["features", "block"], ["inner"], "block", pads=[1] * 4),
        node("Add", ["features", "inner"], ["sum"], "residual"),
        node("Conv", ["sum", "grouped"], ["deep"], "grouped", pads=[1] * 4, group=8),
    ]
    for name, _ in HEADS:
        nodes += [
            node("Conv", ["deep", f"{name}.weight"], [f"{name}.map"]),
            node("Transpose", [f"{name}.map"], [f"{name}.last"], perm=[0, 2, 3, 1]),
            node("Reshape", [f"{name}.last", f"{name}.shape"], [f"{name}.raw"]),
        ]
    nodes += [node("Identity", ["boxes.raw"], ["boxes"]), node("Sigmoid", ["scores.raw"], ["scores"]), *more]
    weights = [
        *(weight("stem", 8, 3, 3, 3), constant("stem.bias", np.zeros(8, np.float32)), weight("block", 8, 8, 3, 3)),
        *(weight("grouped", 8, 1, 3, 3), *(weight(f"{name}.weight", n, 8, 1, 1) for name, n in HEADS)),
    ]
    ends = outputs or [value(name, (rows, 64, n)) for name, n in HEADS]
    return model_of(
        nodes, [value("image", (rows, 3, 16, 16))], ends, [*statistics, *shapes.values(), *weights, *constants]
    )


HEADS = (("boxes", 4), ("scores", 2))
#: The scale is beyond FP16, too; only their quotient is usual.
NORMALISATION = {"scale": 1e6, "bias": 0.1, "mean": 0.0, "variance": 1e12}


def images(rows, seed=0):
    return np.random.default_rng(seed).normal(size=(rows, 3, 16, 16)).astype(np.float32)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """A bundle of the detector with all variants, calibrated with other images than the golden ones."""
    root = tmp_path_factory.mktemp("detector")
    np.savez(root / "golden.npz", image=images(12, seed=1))
    np.savez(root / "calibration.npz", image=images(40, seed=2))
    options = ("--fp16", "--int8", "--inputs", root / "golden.npz", "--calibration", root / "calibration.npz")
    return Bundle.open(packed(write(root / "detector.onnx", detector()), *options)["bundle"])


def test_each_tier_has_its_files_and_their_measured_errors(bundle):
    files = {
        tier.name: [(artifact.runtime, artifact.precision, artifact.opset) for artifact in tier.artifacts]
        for tier in bundle.manifest.tiers
    }
    assert files == {
        "x1": [("any", "fp32", 17), ("tensorrt", "fp16", 17)],
        "x1-int8": [("onnxruntime", "int8", 19), ("tensorrt", "int8", 19)],
    }
    # The error of each file is computed again here, from the bytes in the bundle.
    for tier in bundle.manifest.tiers:
        for artifact in tier.artifacts[1 if tier.name == "x1" else 0 :]:
            got = outputs_of(bundle.read(artifact.file), bundle.golden.inputs, artifact.file)
            for name, want in bundle.golden.outputs.items():
                difference = got[name].astype(np.float64) - want
                place = f"golden inputs: golden.npz, tier {tier.name}, {artifact.precision} for {artifact.runtime}"
                measures = {m.metric: m for m in bundle.manifest.measures if m.split == f"{place}, output {name}"}
                rms, largest = measures["relative_rms_error"], measures["largest_relative_error"]
                assert rms.value == pytest.approx(np.sqrt(np.square(difference).mean()) / want.std(), rel=1e-3)
                assert largest.value == pytest.approx(np.abs(difference).max() / want.std(), rel=1e-3)
                assert 0 < rms.interval[0] < rms.value < rms.interval[1]
                assert rms.n == 12
                assert rms.value < largest_rms(artifact.precision)


def test_int8_is_at_ungrouped_convolutions_alone(bundle):
    for file in ("x1-int8.onnxruntime.int8.onnx", "x1-int8.tensorrt.int8.onnx"):
        graph = onnx.load_from_string(bundle.read(file)).graph
        made = {name: one for one in graph.node for name in one.output}
        types = {tensor.name: tensor for tensor in graph.initializer}
        quantized = 0
        for one in graph.node:
            before = [made[name].op_type for name in one.input if name in made]
            if one.op_type != "Conv" or one.name == "grouped":
                # The sum reads what the block reads, before it is rounded.
                assert "DequantizeLinear" not in before
                continue
            quantized += 1
            assert before[:2] == ["DequantizeLinear", "DequantizeLinear"]
            stored, scale, zero = (types[name] for name in made[one.input[1]].input)
            assert stored.data_type == TensorProto.INT8
            assert list(scale.dims) == [stored.dims[0]]  # per channel
            assert not numpy_helper.to_array(zero).any()  # symmetric
        assert quantized == 4


def gemm(beta, transposed):
    nodes = [
        node("Gemm", ["x", "w", "bias"], ["wide"], "gemm", transB=transposed, beta=beta),
        node("MatMul", ["wide", "v"], ["y"], "product"),
    ]
    w = weight("w", 6, 4) if transposed else weight("w", 4, 6)
    constants = [w, constant("bias", np.full(6, 3, np.float32)), weight("v", 6, 4)]
    return model_of(nodes, [value("x", ("batch", 4))], [value("y", ("batch", 4))], constants)


def products():
    """Return a model of products with a stack of matrices, a matrix and a vector."""
    nodes = [
        node("MatMul", ["x", "stack"], ["stacked"], "stacked"),
        node("MatMul", ["stacked", "matrix"], ["y"], "product"),
        node("MatMul", ["stacked", "vector"], ["z"], "vector"),
    ]
    weights = [weight("stack", 2, 4, 4), weight("matrix", 4, 4), weight("vector", 4)]
    outputs = [value("y", ("batch", 2, 1, 4)), value("z", ("batch", 2, 1))]
    return model_of(nodes, [value("x", ("batch", 2, 1, 4))], outputs, weights)


@pytest.mark.parametrize(
    ("data", "scales"),
    [
        *((gemm(1.0, transposed), {"gemm": 6, "product": 4}) for transposed in (0, 1)),
        (gemm(0.1, 0), {"product": 4}),  # its bias is scaled
        (products(), {"product": 4}),
    ],
)
def test_products_with_a_matrix_are_int8_for_each_output_channel(tmp_path, data, scales):
    bundle = Bundle.open(packed(write(tmp_path / "model.onnx", data), "--int8")["bundle"])
    assert channels(bundle) == scales


def channels(bundle):
    """Return the number of the weights' scales for each operator in INT8."""
    graph = onnx.load_from_string(bundle.read("x1-int8.onnxruntime.int8.onnx")).graph
    made = {name: one for one in graph.node for name in one.output}
    sizes = {tensor.name: tensor.dims for tensor in graph.initializer}
    return {
        one.name: sizes[made[one.input[1]].input[1]][0]
        for one in graph.node
        if one.op_type in ("Gemm", "MatMul") and one.input[1] in made
    }


def test_a_file_without_its_small_output_does_not_pass_the_golden_check(tmp_path):
    def data(scale):
        nodes = [
            node("MatMul", ["x", "w"], ["raw"]),
            *(node("Mul", ["raw", "pixels"], ["boxes"]), node("Mul", ["raw", "scale"], ["scores"])),
        ]
        constants = [*(weight("w", 4, 4), constant("pixels", np.float32(500)), constant("scale", np.float32(scale)))]
        outputs = [value("boxes", ("batch", 4)), value("scores", ("batch", 4))]
        return model_of(nodes, [value("x", ("batch", 4))], outputs, constants)

    bundle = Bundle.open(packed(write(tmp_path / "model.onnx", data(0.3)), "--fp16", "--int8")["bundle"])
    broken = outputs_of(data(0.0), bundle.golden.inputs, "broken")
    for artifact in (artifact for tier in bundle.manifest.tiers for artifact in tier.artifacts):
        good = outputs_of(bundle.read(artifact.file), bundle.golden.inputs, artifact.file)
        check_outputs(good, bundle.golden, artifact.tolerance, artifact.file)
        with pytest.raises(GoldenError, match="output 'scores'"):
            check_outputs({**good, "scores": broken["scores"]}, bundle.golden, artifact.tolerance, artifact.file)


@with_rtx
@pytest.mark.parametrize("tier", ["x1", "x1-int8"])
def test_tensorrt_compiles_the_files_for_it(bundle, tier):
    artifact = bundle.artifact("tensorrt", tier)
    data, profile = bundle.read(artifact.file), bundle.manifest.profile
    assert compile_onnx(data, profile, flavor="tensorrt_rtx", compute_capability="SM86", subject=tier).data


def test_the_limit_of_an_error_is_a_share_of_reversed_pairs():
    generator = np.random.default_rng(0)
    for precision, share in (("fp16", 0.01), ("int8", 0.05)):
        first, second = generator.normal(size=(2, 400_000))
        errors = largest_rms(precision) * generator.normal(size=(2, 400_000))
        reversed_pairs = ((first > second) != (first + errors[0] > second + errors[1])).mean()
        assert reversed_pairs == pytest.approx(share, rel=0.05)


def row_model(*nodes, constants, datatype=FLOAT):
    arrays = [constant(name, np.asarray(array, np.float32)) for name, array in constants.items()]
    return model_of(nodes, [value("x", ("batch", 4))], [value("y", ("batch", 4), datatype)], arrays)


OVERFLOW = row_model(
    *(node("MatMul", ["x", "w"], ["big"]), node("Mul", ["big", "big"], ["square"]), node("Sqrt", ["square"], ["y"])),
    constants={"w": 1e3 * np.eye(4)},
)
#: A column a thousand times as large as the others sets their scale, which rounds them to zero.
OUTLIER = row_model(
    *(node("Mul", ["x", "sizes"], ["wide"]), node("MatMul", ["wide", "w"], ["y"])),
    constants={"sizes": [1e3, 1, 1, 1], "w": np.diag([1e-3, 1, 1, 1])},
)
WHOLE_NUMBERS = row_model(
    *(node("MatMul", ["x", "w"], ["large"]), node("Cast", ["large"], ["y"], to=TensorProto.INT64)),
    constants={"w": np.full((4, 4), 777.0)},
    datatype=TensorProto.INT64,
)
RELU = row_model(node("Relu", ["x"], ["y"]), constants={})


def test_an_error_names_only_options_that_are_not_given(tmp_path):
    path = write(tmp_path / "model.onnx", OUTLIER)
    np.savez(tmp_path / "in.npz", x=np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32))
    real = ["--inputs", tmp_path / "in.npz"]
    for given, fix in (
        ([], "Leave --int8 out, or give real inputs with --inputs and --calibration."),
        (real, "Leave --int8 out, or give real inputs with --calibration."),
        ([*real, "--calibration", tmp_path / "in.npz"], "Leave --int8 out."),
    ):
        with pytest.raises(UsageError, match="RMS error of output 'y'") as caught:
            packed(path, "--int8", *given)
        assert caught.value.fix == fix


def branches():
    """Return a network that computes one of two functions, by the sign of a sum."""
    made = [
        helper.make_graph([node(kind, ["x"], [kind])], kind, [], [value(kind, ("batch", 4))])
        for kind in ("Relu", "Neg")
    ]
    nodes = [
        node("ReduceSum", ["x"], ["sum"], keepdims=0),
        node("Greater", ["sum", "zero"], ["positive"]),
        node("If", ["positive"], ["y"], then_branch=made[0], else_branch=made[1]),
    ]
    return row_model(*nodes, constants={"zero": 0.0})


def detector_with_nms():
    """Return the detector for one image, with the non-maximum suppression inside, as detection networks have it."""
    nodes = [
        node("Transpose", ["scores"], ["by_class"], perm=[0, 2, 1]),
        node("NonMaxSuppression", ["boxes", "by_class", "most", "overlap", "least"], ["found"]),
    ]
    constants = [
        constant("most", np.array([10])),
        constant("overlap", np.array([0.5], np.float32)),
        constant("least", np.array([0.1], np.float32)),
    ]
    return detector(1, *nodes, outputs=[value("found", ("count", 3), TensorProto.INT64)], constants=constants)


@pytest.mark.parametrize(
    ("data", "option", "message"),
    [
        (OVERFLOW, "--fp16", "tensor 'square' of .* in FP16 for tensorrt: got NaN, or a value above 65504"),
        (OUTLIER, "--int8", r"RMS error of output 'y' .*: got .* of the values' spread, expected at most 0.158, .* 5%"),
        (WHOLE_NUMBERS, "--int8", "output 'y' of .* in INT8 for onnxruntime: got .* that differ, expected the same"),
        (RELU, "--int8", "got none of them, expected Conv, MatMul or Gemm with weights in FP32"),
        (detector_with_nms(), "--int8", "got NonMaxSuppression, whose outputs' sizes depend on values, expected"),
    ],
)
def test_variants_that_would_compute_something_else_are_refused(tmp_path, data, option, message):
    with pytest.raises(UsageError, match=message) as caught:
        packed(write(tmp_path / "model.onnx", data), option)
    assert f"Leave {option} out" in caught.value.fix
    assert not (tmp_path / "models").exists()


def test_control_flow_is_packed_as_it_is(tmp_path):
    with pytest.raises(UsageError, match=r"--fp16 for .*: got If in the graph, expected a graph without control flow"):
        packed(write(tmp_path / "model.onnx", branches()), "--fp16")
    # The branch depends on all rows of a run, so that there is no batch.
    options = ("--max-batch-size", 0, "--shape", "x=1x4:2x4:8x4")
    bundle = Bundle.open(packed(write(tmp_path / "model.onnx", branches()), *options)["bundle"])
    assert bundle.artifact("tensorrt").runtime == "any"
    with served_bundles([bundle.path], tmp_path / "cache") as ask:
        for sign in (1, -1):
            rows = sign * np.array([[1, -2, 3, 4], [5, 6, -7, 8]], np.float32)
            wanted = outputs_of(branches(), {"x": rows}, "model")["y"]
            assert ask("own", {"x": rows})["y"].tolist() == wanted.tolist()


@with_rtx
def test_tensorrt_compiles_control_flow():
    profile = {"x": Profile(min=(1, 4), opt=(2, 4), max=(8, 4))}
    compile_onnx(branches(), profile, flavor="tensorrt_rtx", compute_capability="SM86", subject="If")


def test_a_detector_with_non_maximum_suppression_is_for_onnx_runtime(tmp_path):
    written = packed(write(tmp_path / "model.onnx", detector_with_nms()))
    assert written["only_onnxruntime"] == "NonMaxSuppression, whose outputs' sizes depend on values"
    bundle = Bundle.open(written["bundle"])
    assert [artifact.runtime for artifact in bundle.manifest.tiers[0].artifacts] == ["onnxruntime"]
    with served_bundles([bundle.path], tmp_path / "cache") as ask:
        for seed in (4, 5):  # two images, with different numbers of boxes
            wanted = outputs_of(bundle.read("model.onnx"), {"image": images(1, seed)}, "model")["found"]
            assert ask("own", {"image": images(1, seed)})["found"].tolist() == wanted.tolist()


def reduced(nodes, domains=(), functions=(), constants=()):
    """Return a network whose weights are not in FP32, and not only initializers of the graph."""
    made = helper.make_graph(nodes, "g", [value("x", ("batch", 4))], [value("y", ("batch", 4))], constants)
    opsets = [helper.make_opsetid("", 17), *(helper.make_opsetid(domain, 1) for domain in domains)]
    return helper.make_model(made, opset_imports=opsets, functions=functions, ir_version=8).SerializeToString()


HALF = constant("half", np.eye(4, dtype=np.float16))
WITH_CONSTANT = [
    node("Constant", [], ["half"], value=HALF),
    *(node("Cast", ["half"], ["w"], to=FLOAT), node("MatMul", ["x", "w"], ["y"])),
]
WITH_FUNCTION = helper.make_function("own", "times", ["x"], ["y"], WITH_CONSTANT, [helper.make_opsetid("", 17)])
WEIGHTS_IN_INT8 = [constant("stored", np.eye(4, dtype=np.int8)), constant("scale", np.float32(1))]
DEQUANTIZED = [node("DequantizeLinear", ["stored", "scale"], ["w"]), node("MatMul", ["x", "w"], ["y"])]


@pytest.mark.parametrize(
    ("data", "precision"),
    [
        (reduced(WITH_CONSTANT), "FP16"),
        (reduced([node("times", ["x"], ["y"], domain="own")], ["own"], [WITH_FUNCTION]), "FP16"),
        (reduced(DEQUANTIZED, constants=WEIGHTS_IN_INT8), "INT8"),
    ],
    ids=["constant", "function", "weights"],
)
def test_only_graphs_in_fp32_are_converted(data, precision, tmp_path):
    path = write(tmp_path / "model.onnx", data)
    message = rf"--fp16 for .*: got a graph in {precision}, expected a graph in FP32\. .*, or give the model in FP32\.$"
    with pytest.raises(UsageError, match=message):
        packed(path, "--fp16")
    (artifact,) = Bundle.open(packed(path)["bundle"]).manifest.tiers[0].artifacts
    assert artifact.precision == precision.lower()


def test_calibration_without_a_batch_counts_items_first(tmp_path):
    np.savez(tmp_path / "items.npz", image=images(5)[:, None])
    options = ("--int8", "--calibration", tmp_path / "items.npz")
    made = packed(write(tmp_path / "model.onnx", detector(1)), *options)
    assert (Bundle.open(made["bundle"]).manifest.max_batch_size, made["calibration_items"]) == (0, 5)
    np.savez(tmp_path / "items.npz", image=images(5))
    with pytest.raises(UsageError, match=r"array 'image' in .*: got \[5, 3, 16, 16\], expected a shape that fits"):
        packed(write(tmp_path / "model.onnx", detector(1)), *options, name="other")
    with pytest.raises(UsageError, match=r"--calibration: got '.*items.npz', expected --int8 with it. Add --int8"):
        packed(write(tmp_path / "model.onnx", detector(1)), *options[1:], name="other")
