"""The double of TensorRT parses and fuses like TensorRT-RTX, which shares TensorRT's code."""

import functools

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from edge.runtimes.tensorrt.network import attention_blocks, index_limits
from tests.device.doubles import double as trt_double
from tests.device.networks import classifier
from tests.support.marks import with_rtx

node = helper.make_node
FLOAT, HALF = TensorProto.FLOAT, TensorProto.FLOAT16
HEADS, SHORT, USUAL, LONG, INT8_LONG = 4, 16, 64, 128, 512


def serialized(nodes, inputs, outputs, constants):
    """Return the bytes of a model. Inputs and outputs are name, ONNX type and shape; a dimension may be a name."""
    tensors = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    ends = [[helper.make_tensor_value_info(*each) for each in some] for some in (inputs, outputs)]
    opsets = [helper.make_opsetid("", 17)]
    graph = helper.make_graph(nodes, "model", *ends, tensors)
    return helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString()


class Attention:
    """softmax(q kᵀ · scale) v, with a variation; q and k have ``size`` features, v has ``value``."""

    def __init__(self, size=32, value=None, element=HALF, variation="", longest=LONG):
        self.element, self.dtype = element, {HALF: np.float16, FLOAT: np.float32}[element]
        self.nodes, self.constants = [], {}
        self.inputs = {"q": size, "k": size, "v": value or size}
        query, key = self.before(variation, size, value)
        operands = ["v"]
        if variation == "int8":
            query, key, operands = self.quantized("q"), self.quantized("k"), [self.quantized("v")]
        scores = self.add("MatMul", query, self.add("Transpose", key, perm=[0, 1, 3, 2]))
        softmax = self.softmax(variation, self.scaled(variation, scores))
        if variation == "gated":
            softmax = self.add("Mul", softmax, self.constant(np.ones((1, HEADS, 1, 1), self.dtype)))
        if variation == "int8":
            softmax = self.quantized(softmax)
        output = self.add("MatMul", softmax, *operands)
        if variation == "int8":
            self.quantized(output)
        self.nodes[-1].output[0] = "y"
        masks = [("mask", TensorProto.BOOL if variation == "where" else element, ["N", 1, 1, "S"])]
        masked = masks if variation in ("mask", "where") else []
        shapes = [(name, element, ["N", HEADS, "S", features]) for name, features in self.inputs.items()]
        outputs = [("y", element, ["N", HEADS, "S", self.inputs["v"]])]
        self.model = serialized(self.nodes, shapes + masked, outputs, self.constants)
        self.profile = {
            name: [(rows, HEADS, tokens, size) for rows, tokens in ((1, SHORT), (2, USUAL), (8, longest))]
            for name, size in self.inputs.items()
        }
        if masked:
            self.profile["mask"] = [(1, 1, 1, SHORT), (2, 1, 1, USUAL), (8, 1, 1, longest)]

    def add(self, operator, *inputs, **attributes):
        output = f"t{len(self.nodes)}"
        self.nodes.append(node(operator, inputs, [output], name=f"{operator} {output}", **attributes))
        return output

    def constant(self, value):
        name = f"c{len(self.constants)}"
        self.constants[name] = value
        return name

    def quantized(self, name):
        scale, zero = self.constant(np.array(0.05, self.dtype)), self.constant(np.int8(0))
        return self.add("DequantizeLinear", self.add("QuantizeLinear", name, scale, zero), scale, zero)

    def before(self, variation, size, value):
        if variation == "slice":
            bounds = [self.constant(np.array([bound])) for bound in (0, size // 2, 3)]
            return [self.add("Slice", name, *bounds) for name in "qk"]
        if variation == "pad":
            padding = self.constant(np.array([0] * 7 + [value - size]))
            return [self.add("Pad", name, padding) for name in "qk"]
        return ["q", "k"]

    def scaled(self, variation, scores):
        scores = self.add("Mul", scores, self.constant(np.array(0.25, self.dtype)))
        if variation == "mask":
            return self.add("Add", scores, "mask")
        if variation == "where":
            return self.add("Where", "mask", scores, self.constant(np.array(-1e4, self.dtype)))
        return scores

    def softmax(self, variation, scores):
        if variation != "cast":
            return self.add("Softmax", scores, axis=-1)
        return self.add("Cast", self.add("Softmax", self.add("Cast", scores, to=FLOAT), axis=-1), to=self.element)


def indices():
    """Return a model whose inputs index a table of 7 rows and 5 columns; ``INDEX_LIMITS`` has the limits."""
    names = ("both", "elements", "changed", "several", "dynamic")
    nodes = [
        node("Gather", ["table", "both"], ["rows"]),
        node("Cast", ["both"], ["narrow"], to=TensorProto.INT32),
        node("Unsqueeze", ["narrow", "last"], ["column"]),
        node("Gather", ["table", "column"], ["columns"], axis=-1),
        node("GatherElements", ["table", "elements"], ["each"], axis=0),
        node("Add", ["changed", "last"], ["after"]),
        node("Gather", ["table", "after"], ["shifted"]),
        node("GatherND", ["table", "several"], ["points"]),
        node("Gather", ["x", "dynamic"], ["parts"]),
    ]
    widths = {"elements": [5], "several": [2]}
    inputs = [(name, TensorProto.INT64, ["n", *widths.get(name, [])]) for name in names] + [("x", FLOAT, ["m", 4])]
    shapes = {"rows": 2, "columns": 3, "each": 2, "shifted": 2, "points": 1, "parts": 2}
    outputs = [(name, FLOAT, [None] * rank) for name, rank in shapes.items()]
    return serialized(nodes, inputs, outputs, {"table": np.zeros((7, 5), np.float32), "last": np.array([1])})


INDEX_LIMITS = {"both": 5, "elements": 7}


MODELS = {"int8": classifier("int8"), "indices": indices()}
ATTENTION = {
    **{f"{size} features": {"size": size} for size in (8, 16, 19, 256, 264)},
    **{f"int8, {size} features": {"size": size, "variation": "int8"} for size in (16, 24, 32, 64)},
    "int8, long": {"size": 64, "variation": "int8", "longest": INT8_LONG + 1},
    "fp32": {"element": FLOAT},
    "wide values": {"size": 16, "value": 64},
    "narrow values": {"size": 64, "value": 32},
    "pad": {"size": 16, "value": 64, "variation": "pad"},
    **{name: {"variation": name} for name in ("mask", "where", "cast", "slice", "gated")},
}


def parsed(trt, network, model):
    """Return the tensors, the attention and the indices of the network that the parser reads."""
    assert trt.OnnxParser(network, network_logger(trt)).parse(model)
    ends = [network.get_input(index) for index in range(network.num_inputs)]
    ends += [network.get_output(index) for index in range(network.num_outputs)]
    tensors = [(end.name, end.dtype.name, tuple(end.shape)) for end in ends]
    names = [[end.get_dimension_name(axis) for axis in range(len(end.shape))] for end in ends if end.is_network_input]
    return tensors, names, attention_blocks(trt, network), index_limits(trt, network)


@functools.cache
def network_logger(trt):
    class Quiet(trt.ILogger):
        def __init__(self):
            super().__init__()

        def log(self, severity, message):
            pass

    return Quiet()


def copied(version="10.16.2.10"):
    double = trt_double(version)
    flags = 1 << int(double.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    return double, double.parser.new_network(double.native.Log(network_logger(double)), flags)


def networks():
    rtx = pytest.importorskip("tensorrt_rtx")
    builder = rtx.Builder(network_logger(rtx))
    return rtx, builder, builder.create_network(1 << int(rtx.NetworkDefinitionCreationFlag.STRONGLY_TYPED)), *copied()


@with_rtx
@pytest.mark.parametrize("name", MODELS)
def test_double_parses_like_tensorrt_rtx(name):
    rtx, _, real, double, copy = networks()
    assert parsed(double, copy, MODELS[name]) == parsed(rtx, real, MODELS[name])


@pytest.mark.parametrize("version", ["10.3.0", "10.16.2.10", "11.4.1"])
def test_indices_are_found_in_every_version(version):
    double, copy = copied(version)
    assert parsed(double, copy, MODELS["indices"])[-1] == INDEX_LIMITS


@with_rtx
@pytest.mark.parametrize("name", ATTENTION)
def test_double_fuses_like_tensorrt_rtx(name):
    rtx, builder, real, double, copy = networks()
    attention = Attention(**ATTENTION[name])
    assert parsed(double, copy, attention.model) == parsed(rtx, real, attention.model)
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(rtx.ComputeCapability.SM86, 0)
    profile = builder.create_optimization_profile()
    for tensor, shapes in attention.profile.items():
        profile.set_shape(tensor, *shapes)
    config.add_optimization_profile(profile)
    engine = bytes(builder.build_serialized_network(real, config))
    longest = max(shapes[2][2] for shapes in attention.profile.values())
    assert bool(double.attention.fused_attention(copy, False, longest)) == (b"_gemm_mha_v2" in engine)


@with_rtx
def test_double_supports_only_operators_of_tensorrt_rtx():
    rtx, _, real, double, _ = networks()
    parser = rtx.OnnxParser(real, network_logger(rtx))
    assert not [operator for operator in double.parser._LAYERS if not parser.supports_operator(operator)]
