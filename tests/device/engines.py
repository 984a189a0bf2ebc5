"""ONNX models for the runner, and their engines for this device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper

from edge.datatypes import Array
from edge.runtimes.tensorrt.package import logger_of
from edge.runtimes.tensorrt.runner import TensorRtRunner
from tests.device.networks import Shapes, build, serialized

trt = pytest.importorskip("tensorrt")  # skips the tests that import this module

#: Input to the smallest, the best and the largest shape.
Profile = Shapes
FLOAT = TensorProto.FLOAT

REBUILD = "Build it again."


def affine(width: int = 4, seed: int = 0, depth: int = 1) -> bytes:
    """``y [n, width]`` of ``x [n, width]``, all FP32: a matrix product and an addition, ``depth`` times."""
    random = np.random.default_rng(seed)
    constants = {
        "matrix": random.standard_normal((width, width)).astype(np.float32) / width,
        "offset": random.standard_normal(width).astype(np.float32),
    }
    nodes, last = [], "x"
    for index in range(depth):
        after = "y" if index == depth - 1 else f"after{index}"
        nodes.append(helper.make_node("MatMul", [last, "matrix"], [f"product{index}"]))
        nodes.append(helper.make_node("Add", [f"product{index}", "offset"], [after]))
        last = after
    return serialized(nodes, [("x", FLOAT, ["n", width])], [("y", FLOAT, ["n", width])], constants)


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
    nodes = [helper.make_node(operator, [name], [f"not_{name}"]) for name, (_, operator) in MIXED.items()]
    inputs = [(name, datatype, ["n", "m"]) for name, (datatype, _) in MIXED.items()]
    return serialized(nodes, inputs, [(f"not_{name}", *rest) for name, *rest in inputs], {})


def step() -> bytes:
    """One step of a loop: ``next = state / 2 + token`` and ``sum`` of the row, all FP32 [n, 4] but ``sum`` [n, 1]."""
    nodes = [
        helper.make_node("Mul", ["state", "half"], ["halved"]),
        helper.make_node("Add", ["halved", "token"], ["next"]),
        helper.make_node("ReduceSum", ["next", "axes"], ["sum"]),
    ]
    inputs = [("state", FLOAT, ["n", 4]), ("token", FLOAT, ["n", 4])]
    outputs = [("next", FLOAT, ["n", 4]), ("sum", FLOAT, ["n", 1])]
    return serialized(nodes, inputs, outputs, {"half": np.float32(0.5), "axes": np.array([1])})


def rows(least: int, best: int, most: int, width: int = 4, name: str = "x") -> Profile:
    return {name: ((least, width), (best, width), (most, width))}


STEP_PROFILE: Profile = rows(1, 2, 4, name="state") | rows(1, 2, 4, name="token")


def engine(onnx: bytes, *profiles: Profile) -> bytes:
    """Build an engine without our builder."""
    logger = logger_of("tensorrt")
    built = build(trt, logger, onnx, *profiles, configure=lambda config: config.clear_flag(trt.BuilderFlag.TF32))
    assert built is not None, logger.messages
    return bytes(built)


def loaded(data: bytes, **options: object) -> TensorRtRunner:
    return TensorRtRunner(data, "tensorrt", subject="model m.onnx", rebuild=REBUILD, **options)  # type: ignore[arg-type]


def reference(onnx: bytes) -> Callable[[Mapping[str, Array]], dict[str, Array]]:
    """Return a function that computes a model with ONNX Runtime."""
    session = onnxruntime.InferenceSession(onnx, providers=["CPUExecutionProvider"])
    names = [tensor.name for tensor in session.get_outputs()]
    return lambda feeds: dict(zip(names, session.run(names, dict(feeds)), strict=True))


@contextmanager
def running(onnx: bytes, *profiles: Profile, **options: object) -> Iterator[TensorRtRunner]:
    runner = loaded(engine(onnx, *profiles), **options)
    try:
        yield runner
    finally:
        runner.close()


def some(count: int, seed: int = 0, width: int = 4) -> Array:
    """Return rows of random numbers."""
    return np.random.default_rng(seed).standard_normal((count, width)).astype(np.float32)


def close_to(one: Mapping[str, Array], other: Mapping[str, Array]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype
        and one[name].shape == other[name].shape
        and np.allclose(one[name], other[name], rtol=1e-5, atol=1e-6)
        for name in other
    )
