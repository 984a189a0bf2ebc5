"""Small ONNX models, and a plain build of their engines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

FEATURES, CLASSES = 8, 3
Shapes = Mapping[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]
#: Batches from 1 to 8.
BATCHES: Shapes = {"x": ((1, FEATURES), (4, FEATURES), (8, FEATURES))}


def serialized(
    nodes: list[onnx.NodeProto], inputs: Any, outputs: Any, constants: dict[str, Any], opset: int = 17
) -> bytes:
    """Return the bytes of a model. Inputs and outputs are name, ONNX type and shape; a dimension may be a name."""
    tensors = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    ends = [[helper.make_tensor_value_info(*each) for each in some] for some in (inputs, outputs)]
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(helper.make_graph(nodes, "model", *ends, tensors), opset_imports=opsets)
    model.ir_version = 9
    content: bytes = model.SerializeToString()
    return content


def classifier(precision: str = "fp32") -> bytes:
    """Return softmax(x W): x [N, 8], probabilities [N, 3]. In ``int8`` both factors are quantized."""
    element, dtype = (TensorProto.FLOAT16, np.float16) if precision == "fp16" else (TensorProto.FLOAT, np.float32)
    constants = {"w": weights().astype(dtype)}
    nodes, factors = [], ["x", "w"]
    if precision == "int8":
        constants |= {"scale": np.float32(1 / 64), "zero": np.int8(0)}
        for name in factors:
            nodes.append(helper.make_node("QuantizeLinear", [name, "scale", "zero"], [f"{name}_q"]))
            nodes.append(helper.make_node("DequantizeLinear", [f"{name}_q", "scale", "zero"], [f"{name}_d"]))
        factors = ["x_d", "w_d"]
    nodes.append(helper.make_node("MatMul", factors, ["scores"], name="product"))
    nodes.append(helper.make_node("Softmax", ["scores"], ["y"], name="softmax"))
    return serialized(nodes, [("x", element, ["N", FEATURES])], [("y", element, ["N", CLASSES])], constants)


def weights() -> npt.NDArray[np.float32]:
    """Return W [8, 3], of multiples of 1/64 within ±1, so that INT8 represents it."""
    return (np.arange(FEATURES * CLASSES).reshape(FEATURES, CLASSES) * 5 % 17 - 8).astype(np.float32) / 64


def probabilities(x: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return softmax(x W) in float64."""
    scores = x.astype(np.float64) @ weights().astype(np.float64)
    exponents = np.exp(scores - scores.max(axis=-1, keepdims=True))
    result: npt.NDArray[np.float64] = exponents / exponents.sum(axis=-1, keepdims=True)
    return result


def build(trt: Any, logger: Any, model: bytes, *profiles: Shapes, configure: Any = None) -> Any:
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
