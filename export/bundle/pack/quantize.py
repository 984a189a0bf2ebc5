"""Graphs that ONNX Runtime has folded, and their INT8 convolutions and products with weights.

Scales are symmetric, as TensorRT demands: per channel for weights, and per tensor for activations, from the largest
magnitude in calibration. Biases, sums and everything else stay FP32.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import ModelProto, NodeProto

from edge.datatypes import Array
from edge.runtimes.onnxruntime_runner import OnnxRuntimeRunner
from export.quantize.int8 import INT8_OPSET, quantized
from export.quantize.ranges import InputRange, with_outputs

#: Operators with weights as the second input.
_OPERATORS = ["Conv", "MatMul", "Gemm"]
#: A convolution in groups has few products for each weight that it reads, and loses the most.
_ONE = ("group", "alpha", "beta")


def in_int8(model: bytes, calibration: Sequence[Mapping[str, Array]], opset: int) -> bytes | None:
    """Return the model with INT8 convolutions and products, by the inputs of some runs; None without weights for it."""
    loaded = onnx.load_model_from_string(model)
    if opset < INT8_OPSET:
        loaded = onnx.version_converter.convert_version(loaded, INT8_OPSET)
    prepared = simplified(loaded)
    taken = {""}
    for number, node in enumerate(prepared.graph.node):  # ranges go by unique names
        node.name = node.name if node.name not in taken else f"{node.op_type}.{number}"
        taken.add(node.name)
    data: bytes = prepared.SerializeToString()
    reads = {node.name: node.input[0] for node in _with_weights(prepared)}
    if not reads:
        return None
    largest = dict.fromkeys(reads.values(), 0.0)
    between = sorted(largest.keys() - {tensor.name for tensor in prepared.graph.input})
    runner = OnnxRuntimeRunner(with_outputs(prepared, between), subject="model to calibrate") if between else None
    try:
        for feeds in calibration:
            values = {**feeds, **(runner.infer(feeds) if runner else {})}
            largest = {name: max(peak, float(np.abs(values[name]).max())) for name, peak in largest.items()}
    finally:
        if runner:
            runner.close()
    return quantized(data, {name: InputRange(largest[read]) for name, read in reads.items()})


def _with_weights(model: ModelProto) -> list[NodeProto]:
    """Return the operators that become INT8: their second input is a weight in FP32, for a product a matrix."""
    weights = {one.name: len(one.dims) for one in model.graph.initializer if one.data_type == onnx.TensorProto.FLOAT}
    return [
        node
        for node in model.graph.node
        if node.op_type in _OPERATORS
        and node.input[1] in weights
        and (node.op_type == "Conv" or weights[node.input[1]] == 2)
        and all(onnx.helper.get_attribute_value(one) == 1 for one in node.attribute if one.name in _ONE)
    ]


def simplified(model: ModelProto) -> ModelProto:
    """Return a model with folded constants; convolutions take batch normalisations, which may be beyond FP16."""
    options = onnxruntime.SessionOptions()
    # The basic level writes standard operators only.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    with tempfile.TemporaryDirectory() as directory:
        options.optimized_model_filepath = path = str(Path(directory, "simplified.onnx"))
        onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        folded = onnx.load(path)
    used = {node.domain for node in folded.graph.node} | {""}
    for unused in [each for each in folded.opset_import if each.domain not in used]:
        folded.opset_import.remove(unused)
    return folded
