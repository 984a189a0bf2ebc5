"""Variants of an FP32 ONNX model for each runtime: fused for ONNX Runtime, FP16 for TensorRT.

TensorRT reads standard operators only, and neither dynamic quantisation nor zero points; ONNX Runtime has operators of
its own for transformers. So a tier has a file for each. TensorRT networks are strongly typed here: they compute in the
types of these files. :mod:`export.quantize` has the variants in INT8.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx
import onnx_ir
from onnx import GraphProto, ModelProto
from onnxruntime.transformers.float16 import convert_float_to_float16
from onnxruntime.transformers.onnx_model import OnnxModel
from onnxscript.rewriter.ort_fusions import optimize_for_ort

from export.quantize.precision import keep_fp32

_RUNTIME_DOMAIN = "com.microsoft"
#: Operators that ONNX Runtime has in the standard domain, although no version of ONNX has them.
_RUNTIME_OPERATORS = frozenset({"SimplifiedLayerNormalization"})


def fused(model: bytes) -> bytes:
    """Return the model with ONNX Runtime's own attention, normalisations, BiasGelu and FastGelu.

    By onnxscript: the optimizer of ``onnxruntime.transformers`` finds no attention in the graph that torch exports. A
    layer's own number of heads and its scale are kept; a fused operator's default scale is 1/sqrt(r).
    """
    optimised, _ = optimize_for_ort(onnx_ir.from_proto(onnx.load_from_string(model)), clear_metadata=True)
    return checked(onnx_ir.to_proto(optimised), _RUNTIME_OPERATORS)


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
    return checked(_half(loaded(model), fp32_head, fp16_tensors, fp32_operators))


def loaded(model: bytes) -> ModelProto:
    """Return a model to change, parsed."""
    parsed = onnx.load_from_string(model)
    # Recorded types and shapes between nodes would contradict the changes; they can be inferred again.
    del parsed.graph.value_info[:]
    return parsed


def checked(model: ModelProto, unknown: Collection[str] = ()) -> bytes:
    """Return the bytes of a model that ONNX's checker accepts.

    Args:
        unknown: operators of the standard domain that the checker does not know, and which only the runtime checks.
    """
    nodes = [node for node in model.graph.node if not node.domain and node.op_type in unknown]
    for node in nodes:
        node.domain = _RUNTIME_DOMAIN
    onnx.checker.check_model(model, full_check=True)
    for node in nodes:
        node.domain = ""
    data: bytes = model.SerializeToString()
    return data


def _half(
    model: ModelProto, fp32_head: bool, fp16_tensors: Collection[str], fp32_operators: Collection[str]
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
