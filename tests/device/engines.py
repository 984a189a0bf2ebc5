"""ONNX models for the runner, and their engines for this device."""

from contextlib import closing, contextmanager
from itertools import pairwise

import numpy as np
import onnxruntime
import pytest

from edge.runtimes.tensorrt.package import logger_of
from edge.runtimes.tensorrt.runner import TensorRtRunner
from tests.device.networks import build, model_of

trt = pytest.importorskip("tensorrt")  # skips the tests that import this module

REBUILD = "Build it again."


def affine(width=4, seed=0, depth=1):
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


def mixed():
    """An output ``not_NAME`` [n, m] for an input ``NAME`` [n, m] of each datatype."""
    ends = [", ".join(f"{kind}[n, m] {of}{name}" for name, kind in MIXED.items()) for of in ("", "not_")]
    nodes = " ".join(f"not_{name} = {'Not' if name == 'bool' else 'Neg'}({name})" for name in MIXED)
    return model_of(f"mixed ({ends[0]}) => ({ends[1]}) {{ {nodes} }}")


def step():
    """One step of a loop: ``next = state / 2 + token`` and ``sum`` of the row, all FP32 [n, 4] but ``sum`` [n, 1]."""
    text = """step (float[n, 4] state, float[n, 4] token) => (float[n, 4] next, float[n, 1] sum) {
        halved = Mul(state, half) next = Add(halved, token) sum = ReduceSum(next, axes) }"""
    return model_of(text, half=np.float32(0.5), axes=np.array([1]))


def rows(least, best, most, width=4, name="x"):
    return {name: ((least, width), (best, width), (most, width))}


STEP_PROFILE = rows(1, 2, 4, name="state") | rows(1, 2, 4, name="token")


def engine(onnx, *profiles):
    logger = logger_of("tensorrt")
    built = build(trt, logger, onnx, *profiles, configure=lambda config: config.clear_flag(trt.BuilderFlag.TF32))
    assert built is not None, logger.messages
    return bytes(built)


def loaded(data, **options):
    return TensorRtRunner(data, "tensorrt", subject="model m.onnx", rebuild=REBUILD, **options)


def reference(onnx):
    session = onnxruntime.InferenceSession(onnx, providers=["CPUExecutionProvider"])
    names = [tensor.name for tensor in session.get_outputs()]
    return lambda feeds: dict(zip(names, session.run(names, dict(feeds)), strict=True))


@contextmanager
def running(onnx, *profiles, **options):
    with closing(loaded(engine(onnx, *profiles), **options)) as runner:
        yield runner


def some(count, seed=0, width=4):
    return np.random.default_rng(seed).standard_normal((count, width)).astype(np.float32)


def close_to(one, other):
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype
        and one[name].shape == other[name].shape
        and np.allclose(one[name], other[name], rtol=1e-5, atol=1e-6)
        for name in other
    )
