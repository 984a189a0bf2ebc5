"""Small ONNX models, and the engines that TensorRT makes of them on this device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnxruntime
import tensorrt as trt
from onnx import ModelProto, TensorProto, helper, numpy_helper

from edge.datatypes import Array
from edge.runtimes.tensorrt_package import logger_of
from edge.runtimes.tensorrt_runner import TensorRtRunner

Shape = tuple[int, ...]
#: Input to the least, the best and the largest shape.
Profile = Mapping[str, tuple[Shape, Shape, Shape]]

REBUILD = "Build it again."


def model(graph: object) -> bytes:
    proto: ModelProto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    return proto.SerializeToString()


def value(name: str, shape: Sequence[int | str], datatype: int = TensorProto.FLOAT) -> object:
    return helper.make_tensor_value_info(name, datatype, shape)


def affine(width: int = 4, seed: int = 0, depth: int = 1) -> bytes:
    """``y [n, width]`` of ``x [n, width]``, all FP32: a matrix product and an addition, ``depth`` times."""
    random = np.random.default_rng(seed)
    matrix = numpy_helper.from_array(random.standard_normal((width, width)).astype(np.float32) / width, "matrix")
    offset = numpy_helper.from_array(random.standard_normal(width).astype(np.float32), "offset")
    nodes, last = [], "x"
    for index in range(depth):
        after = "y" if index == depth - 1 else f"after{index}"
        nodes.append(helper.make_node("MatMul", [last, "matrix"], [f"product{index}"]))
        nodes.append(helper.make_node("Add", [f"product{index}", "offset"], [after]))
        last = after
    return model(
        helper.make_graph(nodes, "affine", [value("x", ["n", width])], [value("y", ["n", width])], [matrix, offset])
    )


#: Inputs and outputs of :func:`mixed`: name, ONNX datatype, operator.
MIXED = {
    "fp32": (TensorProto.FLOAT, "Neg"),
    "fp16": (TensorProto.FLOAT16, "Neg"),
    "int64": (TensorProto.INT64, "Neg"),
    "int32": (TensorProto.INT32, "Neg"),
    "bool": (TensorProto.BOOL, "Not"),
}


def mixed() -> bytes:
    """An output ``not_NAME`` [n, m] for an input ``NAME`` [n, m] of each datatype."""
    return model(
        helper.make_graph(
            [helper.make_node(operator, [name], [f"not_{name}"]) for name, (_, operator) in MIXED.items()],
            "mixed",
            [value(name, ["n", "m"], datatype) for name, (datatype, _) in MIXED.items()],
            [value(f"not_{name}", ["n", "m"], datatype) for name, (datatype, _) in MIXED.items()],
        )
    )


def step() -> bytes:
    """One step of a loop: ``next = state / 2 + token`` and ``sum`` of the row, all FP32 [n, 4] but ``sum`` [n, 1]."""
    half = numpy_helper.from_array(np.array(0.5, np.float32), "half")
    axes = numpy_helper.from_array(np.array([1], np.int64), "axes")
    nodes = [
        helper.make_node("Mul", ["state", "half"], ["halved"]),
        helper.make_node("Add", ["halved", "token"], ["next"]),
        helper.make_node("ReduceSum", ["next", "axes"], ["sum"]),
    ]
    inputs = [value("state", ["n", 4]), value("token", ["n", 4])]
    return model(
        helper.make_graph(nodes, "step", inputs, [value("next", ["n", 4]), value("sum", ["n", 1])], [half, axes])
    )


def rows(least: int, best: int, most: int, width: int = 4, name: str = "x") -> Profile:
    return {name: ((least, width), (best, width), (most, width))}


def engine(onnx: bytes, *profiles: Profile) -> bytes:
    """Build an engine with TensorRT itself, whatever our builder does."""
    logger = logger_of("tensorrt")
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    assert trt.OnnxParser(network, logger).parse(onnx)
    config = builder.create_builder_config()
    config.clear_flag(trt.BuilderFlag.TF32)
    for profile in profiles:
        shapes = builder.create_optimization_profile()
        for name, allowed in profile.items():
            shapes.set_shape(name, *allowed)
        assert config.add_optimization_profile(shapes) >= 0
    built = builder.build_serialized_network(network, config)
    assert built is not None, logger.messages
    return bytes(built)


def loaded(data: bytes, **options: object) -> TensorRtRunner:
    return TensorRtRunner(data, "tensorrt", subject="model m.onnx", rebuild=REBUILD, **options)  # type: ignore[arg-type]


def reference(onnx: bytes) -> Callable[[Mapping[str, Array]], dict[str, Array]]:
    """Return ONNX Runtime's answers."""
    session = onnxruntime.InferenceSession(onnx, providers=["CPUExecutionProvider"])
    names = [tensor.name for tensor in session.get_outputs()]
    return lambda feeds: dict(zip(names, session.run(names, dict(feeds)), strict=True))
