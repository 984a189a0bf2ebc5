"""ONNX models for the runner, and their engines for this device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from itertools import pairwise

import numpy as np
import onnxruntime
import pytest

from edge.datatypes import Array
from edge.runtimes.tensorrt.package import logger_of
from edge.runtimes.tensorrt.runner import TensorRtRunner
from tests.device.networks import Shapes, build, model_of

trt = pytest.importorskip("tensorrt")  # skips the tests that import this module

#: Input to the smallest, the best and the largest shape.
Profile = Shapes

REBUILD = "Build it again."


def affine(width: int = 4, seed: int = 0, depth: int = 1) -> bytes:
    """``y [n, width]`` of ``x [n, width]``, all FP32: a matrix product and an addition, ``depth`` times."""
    random = np.random.default_rng(seed)
    names = pairwise(["x", *(f"after{index}" for index in range(depth - 1)), "y"])
    nodes = " ".join(f"{after}_p = MatMul({last}, matrix) {after} = Add({after}_p, offset)" for last, after in names)
    return model_of(
        f"affine (float[n, {width}] x) => (float[n, {width}] y) {{ {nodes} }}",
        matrix=random.standard_normal((width, width)).astype(np.float32) / width,
        offset=random.standard_normal(width).astype(np.float32),
    )


#: Inputs of :func:`mixed`: name, and its datatype in ONNX's syntax.
MIXED = {"fp32": "float", "fp16": "float16", "int64": "int64", "int32": "int32", "bool": "bool"}


def mixed() -> bytes:
    """An output ``not_NAME`` [n, m] for an input ``NAME`` [n, m] of each datatype."""
    ends = [", ".join(f"{kind}[n, m] {of}{name}" for name, kind in MIXED.items()) for of in ("", "not_")]
    nodes = " ".join(f"not_{name} = {'Not' if name == 'bool' else 'Neg'}({name})" for name in MIXED)
    return model_of(f"mixed ({ends[0]}) => ({ends[1]}) {{ {nodes} }}")


def step() -> bytes:
    """One step of a loop: ``next = state / 2 + token`` and ``sum`` of the row, all FP32 [n, 4] but ``sum`` [n, 1]."""
    text = """step (float[n, 4] state, float[n, 4] token) => (float[n, 4] next, float[n, 1] sum) {
        halved = Mul(state, half) next = Add(halved, token) sum = ReduceSum(next, axes) }"""
    return model_of(text, half=np.float32(0.5), axes=np.array([1]))


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
    with closing(loaded(engine(onnx, *profiles), **options)) as runner:
        yield runner


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
