"""Variants of an FP32 ONNX model for each runtime: fused or INT8 for ONNX Runtime, FP16 or INT8 for TensorRT.

TensorRT reads standard operators only, and neither dynamic quantisation nor zero points; ONNX Runtime has operators of
its own for transformers. So a tier has a file for each. TensorRT networks are strongly typed here: they compute in the
types of these files.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import onnx
import onnx_ir
from onnx import GraphProto, ModelProto
from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_dynamic, quantize_static
from onnxruntime.quantization.quant_utils import add_pre_process_metadata
from onnxruntime.transformers.float16 import convert_float_to_float16
from onnxruntime.transformers.onnx_model import OnnxModel
from onnxscript.rewriter.ort_fusions import optimize_for_ort

from edge.datatypes import Array
from export.mixed_precision import keep_fp32

#: QuantizeLinear and DequantizeLinear take FP16 scales from here on; TensorRT 10.3 reads up to 20.
INT8_OPSET = 19

#: Rows of a calibration step; all its intermediate results stay in memory.
_CALIBRATION_ROWS = 8


def fused(model: bytes) -> bytes:
    """Return the model with ONNX Runtime's own attention, SkipLayerNormalization, BiasGelu and FastGelu.

    By onnxscript: the optimizer of ``onnxruntime.transformers`` finds no attention in the graph that torch exports. A
    layer's own number of heads and its scale are kept; a fused operator's default scale is 1/sqrt(r).
    """
    optimised, _ = optimize_for_ort(onnx_ir.from_proto(onnx.load_from_string(model)), clear_metadata=True)
    return _checked(onnx_ir.to_proto(optimised))


def dynamic_int8(model: bytes, *, has_head: bool = True) -> bytes:
    """Return the model for ONNX Runtime with INT8 weights, per channel, and inputs quantised at run time.

    ``model`` is the plain one: ONNX Runtime fuses the rest when it loads, and is no slower than on a fused one.
    Embeddings stay FP32: they cost memory but no time, and would be quantised per tensor. The head stays FP32, too.
    """
    source = _without_gemm(_load(model))
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "int8.onnx"
        quantize_dynamic(
            _preprocessed(source),
            path,
            op_types_to_quantize=["MatMul"],
            nodes_to_quantize=_projections(source, has_head),
            per_channel=True,
            weight_type=QuantType.QInt8,
        )
        return _checked(onnx.load(path))


def half(
    model: bytes,
    *,
    fp32_head: bool = False,
    fp16_tensors: Collection[str] = (),
    fp32_operators: Collection[str] = (),
) -> bytes:
    """Return the model in FP16 for TensorRT, weights too, with softmaxes and what :func:`keep_fp32` keeps in FP32.

    Token ids stay INT64, and inputs and outputs FP32. A LayerNormalization reads and returns FP16 and sums in FP32, its
    ``stash_type``. TensorRT-RTX fuses attention with and without the casts around a softmax.

    Args:
        fp32_head: whether all that follows the last normalisation stays FP32.
        fp16_tensors: inputs and outputs that become FP16.
        fp32_operators: further operators that stay FP32, by type.
    """
    return _checked(_half(_load(model), fp32_head, fp16_tensors, fp32_operators))


def static_int8(
    model: bytes, calibration: Mapping[str, Array], *, has_head: bool = True, fp32_head: bool = False
) -> bytes:
    """Return the model for TensorRT with INT8 matrix products, and FP16 for the rest.

    Each product with weights gets QuantizeLinear and DequantizeLinear on both inputs: symmetric, as TensorRT demands,
    per channel for weights, and per tensor for activations, from the largest value in calibration. Products between
    tokens, residuals, normalisations and the head are those of :func:`half`.

    Args:
        calibration: real inputs by name, as many rows of each.
        has_head: whether a task head follows the last normalisation.
        fp32_head: see :func:`half`.
    """
    source = _load(model)
    upgraded = onnx.version_converter.convert_version(source, INT8_OPSET)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "int8.onnx"
        quantize_static(
            _preprocessed(upgraded),
            path,
            _Calibration(calibration),
            op_types_to_quantize=["MatMul"],
            nodes_to_quantize=_projections(upgraded, has_head),
            per_channel=True,
            activation_type=QuantType.QInt8,
            weight_type=QuantType.QInt8,
            extra_options={
                "ActivationSymmetric": True,
                "WeightSymmetric": True,
                # The product itself leaves in FP16: its sum with the bias and the residual needs more than 8 bits.
                "OpTypesToExcludeOutputQuantization": ["MatMul"],
                "QDQOpTypePerChannelSupportToAxis": {"MatMul": 1},
            },
        )
        return _checked(_half(onnx.load(path), fp32_head))


class _Calibration(CalibrationDataReader):  # type: ignore[misc]
    def __init__(self, inputs: Mapping[str, Array]) -> None:
        self._steps = self._iterate(inputs)

    def get_next(self) -> dict[str, Array] | None:
        """Return the next step, or None at the end."""
        return next(self._steps, None)

    @staticmethod
    def _iterate(inputs: Mapping[str, Array]) -> Iterator[dict[str, Array]]:
        for start in range(0, len(next(iter(inputs.values()))), _CALIBRATION_ROWS):
            yield {name: array[start : start + _CALIBRATION_ROWS] for name, array in inputs.items()}


def _load(model: bytes) -> ModelProto:
    loaded = onnx.load_from_string(model)
    # Recorded types and shapes between nodes would contradict the changes; they can be inferred again.
    del loaded.graph.value_info[:]
    return loaded


def _checked(model: ModelProto) -> bytes:
    onnx.checker.check_model(model, full_check=True)
    data: bytes = model.SerializeToString()
    return data


def _without_gemm(model: ModelProto) -> ModelProto:
    """Write each Gemm as products and sums: the quantizer transposes its weights even where another node reads them."""
    nodes = list(model.graph.node)
    del model.graph.node[:]
    for node in nodes:
        if node.op_type != "Gemm":
            model.graph.node.append(node)
            continue
        values = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
        plain = not values.get("transA") and values.get("alpha", 1) == values.get("beta", 1) == 1
        assert plain, f"{node.name} is not a layer's product"
        left, right = node.input[:2]
        added, output = list(node.input[2:]), node.output[0]
        product = f"{output}.product" if added else output
        if values.get("transB"):
            turned = f"{output}.transposed"
            made = onnx.helper.make_node("Transpose", [right], [turned], f"{node.name}.transpose", perm=[1, 0])
            model.graph.node.append(made)
            right = turned
        model.graph.node.append(onnx.helper.make_node("MatMul", [left, right], [product], node.name))
        if added:
            model.graph.node.append(onnx.helper.make_node("Add", [product, *added], [output], f"{node.name}.add"))
    return model


def _preprocessed(model: ModelProto) -> ModelProto:
    """Mark the model as preprocessed, because the exporter has folded its constants; otherwise each call warns."""
    add_pre_process_metadata(model)
    return model


def _half(
    model: ModelProto, fp32_head: bool, fp16_tensors: Collection[str] = (), fp32_operators: Collection[str] = ()
) -> ModelProto:
    head = _without_head(model) if fp32_head else None
    kept = [tensor.name for tensor in (*model.graph.input, *model.graph.output) if tensor.name not in fp16_tensors]
    converted = convert_float_to_float16(model, keep_io_types=kept, op_block_list=["Softmax", *fp32_operators])
    # The converter appends its casts at the end.
    OnnxModel(converted).topological_sort()
    keep_fp32(converted, model)
    if head is not None:
        del converted.graph.output[:]
        converted.graph.MergeFrom(head)
    return converted


def _without_head(model: ModelProto) -> GraphProto:
    """Reduce a model to the FP32 output of its last normalisation, and return what it loses.

    The converter can leave nodes in FP32, but rounds what passes between them.
    """
    graph = model.graph
    made = {name: node for node in graph.node for name in node.output}
    normalised = [node.output[0] for node in graph.node if node.op_type == "LayerNormalization"][-1]
    body, found = {normalised}, [normalised]
    while found:
        node = made.get(found.pop())
        new = set(node.input) - body if node else set()
        body |= new
        found += new
    constants = {tensor.name: tensor for tensor in graph.initializer}
    head = GraphProto(output=graph.output)
    for node in [node for node in graph.node if not body.intersection(node.output)]:
        graph.node.remove(node)
        node.input[:] = [f"head.{name}" if name in constants else name for name in node.input]
        head.node.append(node)
    for name, tensor in constants.items():
        if any(f"head.{name}" in node.input for node in head.node):
            head.initializer.add().CopyFrom(tensor)
            head.initializer[-1].name = f"head.{name}"
        if name not in body:
            graph.initializer.remove(tensor)
    del graph.output[:]
    del graph.value_info[:]
    graph.output.append(onnx.helper.make_tensor_value_info(normalised, onnx.TensorProto.FLOAT, None))
    return head


def _projections(model: ModelProto, has_head: bool) -> list[str]:
    """Return the names of the matrix products with weights; of a model with a head, up to the last normalisation."""
    weights = {initializer.name for initializer in model.graph.initializer}
    nodes = list(model.graph.node)  # in the order of computation
    norms = [index for index, node in enumerate(nodes) if node.op_type == "LayerNormalization"]
    last = max(norms) if has_head else len(nodes)
    return [node.name for node in nodes[:last] if node.op_type == "MatMul" and node.input[1] in weights]
