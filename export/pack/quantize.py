"""INT8 for any FP32 graph: QuantizeLinear and DequantizeLinear at convolutions and products with weights.

Symmetric, as TensorRT demands: per channel for weights, and per tensor for activations, from the largest magnitude in
calibration. Biases, sums and everything else stay FP32.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import onnx
from onnx import ModelProto, NodeProto
from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static
from onnxruntime.quantization.quant_utils import add_pre_process_metadata

from edge.datatypes import Array
from export.bundle.pack.quantize import simplified
from export.quantize.int8 import INT8_OPSET

#: Operators with weights as the second input.
_OPERATORS = ["Conv", "MatMul", "Gemm"]
#: A convolution in groups has few products for each weight that it reads, and loses the most. The quantizer drops the
#: factor ``beta`` of a bias.
_ONE = ("group", "alpha", "beta")
_COPY = ".for_int8"


def quantized(model: bytes, calibration: Sequence[Mapping[str, Array]], opset: int) -> ModelProto | None:
    """Return the model with INT8 convolutions and products; None if no operator has weights for it.

    Args:
        calibration: the inputs of each run.
        opset: of the model; below :data:`export.quantize.int8.INT8_OPSET` it is raised to that.
    """
    loaded = onnx.load_model_from_string(model)
    if opset < INT8_OPSET:
        loaded = onnx.version_converter.convert_version(loaded, INT8_OPSET)
    prepared = simplified(loaded)
    chosen = _with_weights(prepared)
    if not chosen:
        return None
    _isolate(prepared, chosen)
    add_pre_process_metadata(prepared)  # without it, the quantizer warns that nothing was folded
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "int8.onnx")
        quantize_static(
            prepared,
            path,
            _Calibration(calibration),
            op_types_to_quantize=_OPERATORS,
            nodes_to_quantize=[node.name for node in chosen],
            per_channel=True,
            activation_type=QuantType.QInt8,
            weight_type=QuantType.QInt8,
            extra_options={
                "ActivationSymmetric": True,
                "WeightSymmetric": True,
                "OpTypesToExcludeOutputQuantization": _OPERATORS,
                "QuantizeBias": False,  # TensorRT reads no INT32 biases
            },
        )
        made = onnx.load(path)
    _join(made)
    return made


class _Calibration(CalibrationDataReader):  # type: ignore[misc]
    def __init__(self, runs: Iterable[Mapping[str, Array]]) -> None:
        self._runs: Iterator[Mapping[str, Array]] = iter(runs)

    def get_next(self) -> dict[str, Array] | None:
        """Return the inputs of the next run, or None at the end."""
        return next((dict(run) for run in self._runs), None)


def _with_weights(model: ModelProto) -> list[NodeProto]:
    """Return the operators that become INT8; all nodes get names, by which these are chosen.

    Their second input is a weight in FP32, for a product a matrix, whose columns the quantizer takes for the channels.
    """
    weights = {one.name: len(one.dims) for one in model.graph.initializer if one.data_type == onnx.TensorProto.FLOAT}
    for number, node in enumerate(model.graph.node):
        node.name = node.name or f"{node.op_type}.{number}"
    return [
        node
        for node in model.graph.node
        if node.op_type in _OPERATORS
        and node.input[1] in weights
        and (node.op_type == "Conv" or weights[node.input[1]] == 2)
        and all(onnx.helper.get_attribute_value(one) == 1 for one in node.attribute if one.name in _ONE)
    ]


def _isolate(model: ModelProto, chosen: Sequence[NodeProto]) -> None:
    """Give the chosen operators copies of their inputs, because the quantizer changes a tensor for all its readers.

    Without them, the sum of a residual block would read INT8, too.
    """
    graph, names = model.graph, {node.name for node in chosen}
    weights = {tensor.name: tensor for tensor in graph.initializer}
    nodes, copied = list(graph.node), set()
    del graph.node[:]
    for node in nodes:
        for place, name in enumerate(node.input[:2] if node.name in names else ()):
            node.input[place] = copy = f"{name}{_COPY}"
            if copy in copied:
                continue
            copied.add(copy)
            if name in weights:
                graph.initializer.add().CopyFrom(weights[name])
                graph.initializer[-1].name = copy
            else:
                graph.node.append(onnx.helper.make_node("Identity", [name], [copy], copy))
        graph.node.append(node)
    read = {name for node in graph.node for name in node.input} | {output.name for output in graph.output}
    for tensor in [tensor for tensor in graph.initializer if tensor.name not in read]:
        graph.initializer.remove(tensor)


def _join(model: ModelProto) -> None:
    """Remove the copies of activations."""
    copies = {node.name: node for node in model.graph.node if node.op_type == "Identity" and node.name.endswith(_COPY)}
    for node in copies.values():
        model.graph.node.remove(node)
    for node in model.graph.node:
        for place, name in enumerate(node.input):
            if name in copies:
                node.input[place] = copies[name].input[0]
