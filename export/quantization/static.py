"""INT8 with fixed scales for TensorRT: QuantizeLinear and DequantizeLinear before matrix products."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, numpy_helper
from onnx.helper import make_node

from edge.datatypes import Array
from export.bundle.fewest_kernels import fewest_kernels
from export.quantize.precision import checked, half, loaded
from export.quantize.ranges import LEVELS, InputRange, projections, scale_of

#: QuantizeLinear and DequantizeLinear take FP16 scales from here on; TensorRT 10.3 reads up to 20.
INT8_OPSET = 19


def static_int8(model: bytes, ranges: Mapping[str, InputRange], *, fp32_head: bool = False) -> bytes:
    """Return the model for TensorRT with INT8 matrix products, and FP16 for the rest.

    Each product with a range gets QuantizeLinear and DequantizeLinear on both inputs: symmetric, as TensorRT demands,
    per channel for weights, and per tensor for activations. All else is that of :func:`export.quantize.precision.half`.

    Args:
        model: in FP32, as :func:`export.models.convert.to_onnx` writes it.
        ranges: of :func:`export.quantize.ranges.input_ranges`, or those that a model was trained with.
        fp32_head: see :func:`export.quantize.precision.half`.
    """
    return half(fewest_kernels(quantized(model, ranges)), fp32_head=fp32_head)


def quantized(model: bytes, ranges: Mapping[str, InputRange]) -> bytes:
    """Return the model with INT8 matrix products, and FP32 for the rest; see :func:`static_int8`."""
    source = onnx.version_converter.convert_version(loaded(model), INT8_OPSET)
    graph = source.graph
    names = {node.output[0]: node.name for node in projections(source, has_head=False) if node.name in ranges}
    unknown = sorted(set(ranges) - set(names.values()))
    assert not unknown, f"ranges of products that the model lacks: {unknown}"
    weights = {tensor.name: tensor for tensor in graph.initializer}
    nodes = list(graph.node)
    del graph.node[:]
    done: set[str] = set()
    for node in nodes:
        if name := names.get(node.output[0]):
            read, weight = node.input[0], numpy_helper.to_array(weights[node.input[1]])  # [features, outputs]
            largest, factors = ranges[name]
            if read not in done:  # queries, keys and values share it
                done.add(read)
                graph.node.extend(_input_nodes(source, read, largest, factors))
            graph.node.append(_weight_node(source, name, weight if factors is None else weight * factors[:, None]))
            node.input[:] = [f"{read}.rounded", f"{name}.rounded"]
        graph.node.append(node)
    used = {name for node in graph.node for name in node.input}
    for tensor in [tensor for tensor in graph.initializer if tensor.name not in used]:
        graph.initializer.remove(tensor)
    return checked(source)


def _input_nodes(model: ModelProto, read: str, largest: float, factors: Array | None) -> list[NodeProto]:
    """Return what rounds an input, as ``INPUT.rounded``."""
    nodes, smoothed = [], read
    if factors is not None:
        smoothed = f"{read}.smoothed"
        nodes.append(make_node("Mul", [read, _constant(model, f"{read}.factors", 1 / factors)], [smoothed], smoothed))
    scale = _constant(model, f"{read}.scale", scale_of(np.float32(largest)))
    zero = _constant(model, f"{read}.zero", np.zeros((), np.int8))
    for operator, source, made in (
        ("QuantizeLinear", smoothed, f"{read}.int8"),
        ("DequantizeLinear", f"{read}.int8", f"{read}.rounded"),
    ):
        nodes.append(make_node(operator, [source, scale, zero], [made], made))
    return nodes


def _weight_node(model: ModelProto, name: str, weight: Array) -> NodeProto:
    """Return what gives the rounded weights of a product, ``NAME.rounded``, from [features, outputs]."""
    scales = scale_of(np.abs(weight).max(axis=0))
    levels = np.clip(np.round(weight / scales), -LEVELS, LEVELS).astype(np.int8)
    arrays = {"int8": levels, "scale": scales, "zero": np.zeros(len(scales), np.int8)}
    inputs = [_constant(model, f"{name}.{what}", array) for what, array in arrays.items()]
    return make_node("DequantizeLinear", inputs, [f"{name}.rounded"], f"{name}.rounded", axis=1)


def _constant(model: ModelProto, name: str, array: Array) -> str:
    model.graph.initializer.append(numpy_helper.from_array(array, name))
    return name
