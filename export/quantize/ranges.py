"""Ranges of the inputs of matrix products, measured on real inputs without padding.

An input has one scale for all its features, so a few large features cost the others their precision. Smoothing divides
each feature by a factor of its own, and multiplies the weights by it: Xiao et al. 2023, "SmoothQuant". The factors are
powers of two, so that neither side is rounded. In BERT the input of a projection is also that of the residual, so that
the normalisation cannot take the factors in; they are a product before QuantizeLinear.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, numpy_helper

from edge.datatypes import Array
from edge.runtimes.onnxruntime_runner import OnnxRuntimeRunner
from export.quantize.precision import loaded


def projections(model: ModelProto, has_head: bool) -> list[NodeProto]:
    """Return the products with weights in the order of computation; of a model with a head, up to the last norm.

    Their names are those of the torch modules: see :func:`export.models.convert.to_onnx`.
    """
    weights = {initializer.name for initializer in model.graph.initializer}
    nodes = list(model.graph.node)
    norms = [index for index, node in enumerate(nodes) if node.op_type == "LayerNormalization"]
    last = max(norms) if has_head else len(nodes)
    return [node for node in nodes[:last] if node.op_type == "MatMul" and node.input[1] in weights]


#: Levels of INT8 on each side of 0.
LEVELS = 127
#: Inputs of a model by name, without padding.
Feeds = Mapping[str, Array]
#: Products without smoothing, by the last part of their names: GELU's outputs have large values in different features
#: for different tokens, and factors for them cost accuracy.
_UNSMOOTHED = ("down",)


class Scheme(msgspec.Struct, frozen=True):
    """How ranges are chosen. The defaults lost least on the hold-outs; see LIMITS.md in :mod:`export.reduce`.

    Attributes:
        smoothing: exponent of the inputs in SmoothQuant's factors, 0 to 1, the weights having the rest; None leaves the
            factors out.
        fp16: products that stay in FP16, by the last part of their names. The second of a feed-forward is a third of
            all multiplications and causes most of the error; the output projection is a twelfth, and attention would be
            copied to be rounded for it.
    """

    smoothing: float | None = 0.5
    fp16: tuple[str, ...] = ("down", "output_proj")


#: INT8 for all products, from the largest values.
LARGEST = Scheme(smoothing=None, fp16=())


class InputRange(NamedTuple):
    """Range of the input of a product.

    Attributes:
        largest: absolute value, after the division by ``factors``; larger ones are clipped.
        factors: of each feature, [features]; None without smoothing.
    """

    largest: float
    factors: Array | None = None


def input_ranges(
    model: bytes, batches: Sequence[Feeds], scheme: Scheme, *, has_head: bool = True
) -> dict[str, InputRange]:
    """Return the range of the input of each product, by the product's name; those that share an input share its range.

    Args:
        model: in FP32, as :func:`export.models.convert.to_onnx` writes it.
        batches: inputs without padding.
        has_head: whether a task head follows the last normalisation; its products have no range.
    """
    source = loaded(model)
    weights = {tensor.name: tensor for tensor in source.graph.initializer}
    readers: dict[str, list[str]] = {}
    spread: dict[str, Array] = {}  # of the weights of each feature, over all products that read it
    for node in projections(source, has_head):
        if node.name.rpartition(".")[2] in scheme.fp16:
            continue
        read = node.input[0]
        readers.setdefault(read, []).append(node.name)
        sizes = np.abs(numpy_helper.to_array(weights[node.input[1]])).max(axis=1)
        spread[read] = np.maximum(spread.get(read, 0), sizes)
    runner = OnnxRuntimeRunner(with_outputs(source, list(readers)), subject="model to calibrate")
    try:
        peaks = _peaks(runner, batches)
    finally:
        runner.close()
    found: dict[str, InputRange] = {}
    for read, names in readers.items():
        factors = None
        if scheme.smoothing is not None and not any(name.rpartition(".")[2] in _UNSMOOTHED for name in names):
            factors = _factors(peaks[read], spread[read], scheme.smoothing)
        largest = float((peaks[read] if factors is None else peaks[read] / factors).max())
        found |= dict.fromkeys(names, InputRange(largest, factors))
    return found


def scale_of(largest: Array) -> Array:
    """Return the scale of INT8 for a largest absolute value, float32 of the same shape.

    It is rounded to FP16, in which the file for TensorRT has it. A scale of 0 becomes 1.
    """
    scales: Array = np.asarray(largest / LEVELS, np.float16).astype(np.float32)
    return np.where(scales > 0, scales, np.float32(1))


def with_outputs(model: ModelProto, names: Sequence[str]) -> bytes:
    """Return a model whose outputs are these tensors of it in FP32, in their order."""
    del model.graph.output[:]
    model.graph.output.extend(onnx.helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names)
    data: bytes = model.SerializeToString()
    return data


def _peaks(runner: OnnxRuntimeRunner, batches: Sequence[Feeds]) -> dict[str, Array]:
    """Return the largest absolute value of each feature, [features]."""
    peaks: dict[str, Array] = {}
    for batch in batches:
        for name, values in runner.infer(batch).items():
            found = np.abs(values).max(axis=tuple(range(values.ndim - 1)))
            peaks[name] = np.maximum(peaks.get(name, 0), found)
    return peaks


def _factors(peaks: Array, weights: Array, exponent: float) -> Array:
    # A feature that is never used, or never read, keeps a factor of 1.
    used = (peaks > 0) & (weights > 0)
    ratio = np.where(used, peaks, 1) ** exponent / np.where(used, weights, 1) ** (1 - exponent)
    return np.where(used, np.exp2(np.round(np.log2(ratio))), 1).astype(np.float32)
