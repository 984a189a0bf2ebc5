"""Small ONNX models, and a plain build of their engines."""

import numpy as np

from tests.support.models import graph_of, serialized

FEATURES, CLASSES = 8, 3
#: Batches from 1 to 8.
BATCHES = {"x": ((1, FEATURES), (4, FEATURES), (8, FEATURES))}


def model_of(text, opset=17, **constants):
    """Return the bytes of a model, of a graph in the syntax of :mod:`onnx.parser`."""
    return serialized(graph_of(text, **{name: np.asarray(value) for name, value in constants.items()}), opset)


def classifier(precision="fp32"):
    """Return softmax(x W): x [N, 8], probabilities [N, 3]. In ``int8`` both factors are quantized."""
    element, dtype = ("float16", np.float16) if precision == "fp16" else ("float", np.float32)
    constants = {"w": weights().astype(dtype)}
    nodes, factors = "", "x, w"
    if precision == "int8":
        constants |= {"scale": np.float32(1 / 64), "zero": np.int8(0)}
        factors = "x_d, w_d"
        for name in "xw":
            nodes += (
                f"{name}_q = QuantizeLinear({name}, scale, zero) {name}_d = DequantizeLinear({name}_q, scale, zero) "
            )
    ends = f"({element}[N, {FEATURES}] x) => ({element}[N, {CLASSES}] y)"
    return model_of(f"model {ends} {{ {nodes} scores = MatMul({factors}) y = Softmax(scores) }}", **constants)


def weights():
    """Return W [8, 3], of multiples of 1/64 within ±1, so that INT8 represents it."""
    return (np.arange(FEATURES * CLASSES).reshape(FEATURES, CLASSES) * 5 % 17 - 8).astype(np.float32) / 64


def probabilities(x):
    scores = x.astype(np.float64) @ weights().astype(np.float64)
    exponents = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return exponents / exponents.sum(axis=-1, keepdims=True)


def build(trt, logger, model, *profiles, configure=None):
    """Return a serialized engine, strongly typed; None if the builder fails."""
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    assert parser.parse(model), [parser.get_error(index).desc() for index in range(parser.num_errors)]
    config = builder.create_builder_config()
    for shapes in profiles:
        profile = builder.create_optimization_profile()
        for name, allowed in shapes.items():
            profile.set_shape(name, *allowed)
        assert config.add_optimization_profile(profile) >= 0
    if configure:
        configure(config)
    return builder.build_serialized_network(network, config)
