"""Variants of an FP32 ONNX model for each runtime: fused for ONNX Runtime, FP16 for TensorRT.

TensorRT reads standard operators only, and neither dynamic quantisation nor zero points; ONNX Runtime has operators of
its own for transformers. So a tier has a file for each. TensorRT networks are strongly typed here: they compute in the
types of these files. :mod:`export.quantize.int8` has the variants in INT8.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

import onnx
import onnx_ir
from onnx import GraphProto, ModelProto, NodeProto, TensorProto
from onnxruntime.transformers.float16 import convert_float_to_float16
from onnxruntime.transformers.onnx_model import OnnxModel
from onnxscript.rewriter.ort_fusions import optimize_for_ort

from export.quantize.nested import nested_nodes

#: What leads from a mean or sum of squares to the normalised tensor.
_NORMALISING = {"Add", "Sqrt", "Clip", "Reciprocal", "Div", "Mul", "Pow"}
#: What leads from positions to the angles of a rotary embedding: arithmetic, and changes of the first input's shape.
_COMPUTING, _RESHAPING = {"Mul", "Add", "MatMul", "Concat"}, {"Unsqueeze", "Reshape", "Transpose", "Expand"}


class _Part(NamedTuple):
    """Nodes, and the name of the FP16 tensor from other nodes that they read, if they read one."""

    nodes: list[NodeProto]
    read: str | None


def keep_fp32(converted: ModelProto, original: ModelProto) -> None:
    """Move some parts of an FP16 model back to FP32, between casts.

    These are RMS normalisations, divisions by a vector's length, the angles of rotary embeddings, and a tanh computed
    by exponentials. FP16 has no square of a number above 255, rounds an angle above 64 radians to multiples of 1/16,
    and has three digits for the difference of 1 and almost 1.

    Args:
        original: the same model in FP32, whose constants these parts get.
    """
    graph = converted.graph
    constants = {tensor.name: tensor for tensor in original.graph.initializer if tensor.data_type == TensorProto.FLOAT}
    parts = [*_normalisations(graph), *_angles(graph), *_exponentials(graph)]
    if not parts:
        return
    del graph.value_info[:]  # the types of what passes between these nodes
    for part in parts:
        _widen(graph, part, constants)
    read = {name for node in graph.node for name in node.input}
    for tensor in [tensor for tensor in graph.initializer if tensor.name not in read]:
        graph.initializer.remove(tensor)
    OnnxModel(converted).topological_sort()  # the casts are at the end


def _normalisations(graph: GraphProto) -> Iterator[_Part]:
    """Yield what computes x / sqrt(mean(x²) + epsilon) or x / max(sqrt(sum(x²)), epsilon), from square to quotient."""
    made, readers = links(graph)
    constants = {tensor.name: tensor for tensor in graph.initializer}
    for mean in [node for node in graph.node if node.op_type in ("ReduceMean", "ReduceSum")]:
        square = made.get(mean.input[0])
        if square is None or not _squares(square, constants):
            continue
        nodes, read = [square, mean], square.input[0]
        while read not in nodes[-1].input or len(nodes) < 3:
            following = readers.get(nodes[-1].output[0], [])
            if len(following) != 1 or following[0].op_type not in _NORMALISING:
                break
            nodes.append(following[0])
        if mean.op_type == "ReduceMean" or read in nodes[-1].input:
            yield _Part(nodes, read)


def _squares(node: NodeProto, constants: dict[str, TensorProto]) -> bool:
    if node.op_type == "Mul":
        return bool(node.input[0] == node.input[1])
    exponent = constants.get(node.input[1]) if node.op_type == "Pow" else None
    return exponent is not None and onnx.numpy_helper.to_array(exponent).tolist() in (2, [2])


def _angles(graph: GraphProto) -> Iterator[_Part]:
    """Yield what computes sines and cosines of positions, which are casts of integers."""
    made, _ = links(graph)
    constants = {tensor.name for tensor in graph.initializer}
    nodes: dict[str, NodeProto] = {}
    for wave in [node for node in graph.node if node.op_type in ("Sin", "Cos")]:
        found, waiting = {wave.output[0]: wave}, [wave.input[0]]
        while waiting:
            name = waiting.pop()
            node = made.get(name)
            if name in found or name in constants:
                continue
            if node is None or node.op_type not in {"Cast"} | _COMPUTING | _RESHAPING:
                found = {}
                break
            found[name] = node
            if node.op_type != "Cast":
                waiting += node.input[:1] if node.op_type in _RESHAPING else node.input
        nodes |= found
    if nodes:
        yield _Part(list(nodes.values()), None)


def _exponentials(graph: GraphProto) -> Iterator[_Part]:
    """Yield what computes 1 - 2 / (1 + exp(2 x))."""
    made, readers = links(graph)
    for power in [node for node in graph.node if node.op_type == "Exp"]:
        nodes = [made[power.input[0]], power]
        for operator in ("Add", "Div", "Sub"):
            nodes += [node for node in readers[nodes[-1].output[0]] if node.op_type == operator]
        if [node.op_type for node in nodes] == ["Mul", "Exp", "Add", "Div", "Sub"]:
            yield _Part(nodes, nodes[0].input[0])


def _widen(graph: GraphProto, part: _Part, constants: dict[str, TensorProto]) -> None:
    inside = {name for node in part.nodes for name in node.output}
    others = [node for node in graph.node if not inside.intersection(node.output)]
    leaving = inside.intersection(name for node in others for name in node.input)
    leaving |= inside.intersection(output.name for output in graph.output)
    known = {name for node in graph.node for name in node.output} | {tensor.name for tensor in graph.initializer}
    for node in part.nodes:
        if node.op_type == "Cast":
            node.attribute[0].i = TensorProto.FLOAT
        for place, name in enumerate(node.input):
            if name in inside:
                node.input[place] = f"{name}.wide"
                continue
            if name not in constants and name != part.read:
                continue
            node.input[place] = wide = f"{name}.fp32"
            if wide in known:
                continue
            known.add(wide)
            if name in constants:
                graph.initializer.add().CopyFrom(constants[name])
                graph.initializer[-1].name = wide
            else:
                graph.node.append(onnx.helper.make_node("Cast", [name], [wide], wide, to=TensorProto.FLOAT))
        for place, name in enumerate(node.output):
            node.output[place] = f"{name}.wide"
    for name in sorted(leaving):
        cast = onnx.helper.make_node("Cast", [f"{name}.wide"], [name], f"{name}.narrow", to=TensorProto.FLOAT16)
        graph.node.append(cast)


def links(graph: GraphProto) -> tuple[dict[str, NodeProto], dict[str, list[NodeProto]]]:
    """Return which node makes a tensor, and which nodes read it."""
    made = {name: node for node in graph.node for name in node.output}
    readers: dict[str, list[NodeProto]] = {}
    for node in graph.node:
        for name in set(node.input):
            readers.setdefault(name, []).append(node)
    return made, readers


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
    model: bytes, *, fp32_head: bool = False, fp16_tensors: Collection[str] = (), fp32_operators: Collection[str] = ()
) -> bytes:
    """Return the model in FP16 for TensorRT, weights too, with softmaxes and what :func:`keep_fp32` keeps in FP32.

    A model with softmaxes in branches has all of them in FP16: the converter would put the casts around them outside.

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
    has_nested = any(node.op_type == "Softmax" for node in nested_nodes(model.graph.node))
    blocked = [*fp32_operators, *([] if has_nested else ["Softmax"])]
    converted = convert_float_to_float16(model, keep_io_types=kept, op_block_list=blocked)
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
