"""Parts of an FP16 graph that compute in FP32, because FP16 lacks the range or the precision for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto
from onnxruntime.transformers.onnx_model import OnnxModel

#: What leads from a mean of squares to the normalised tensor.
_NORMALISING = {"Add", "Sqrt", "Reciprocal", "Div", "Mul", "Pow"}
#: What leads from positions to the angles of a rotary embedding: arithmetic, and changes of the first input's shape.
_COMPUTING, _RESHAPING = {"Mul", "Add", "MatMul", "Concat"}, {"Unsqueeze", "Reshape", "Transpose", "Expand"}


class _Part(NamedTuple):
    """Nodes, and the name of the FP16 tensor from other nodes that they read, if they read one."""

    nodes: list[NodeProto]
    read: str | None


def keep_fp32(converted: ModelProto, original: ModelProto) -> None:
    """Move some parts of an FP16 model back to FP32, between casts.

    These are RMS normalisations, the angles of rotary embeddings, and a tanh computed by exponentials. FP16 has no
    square of a number above 255, rounds an angle above 64 radians to multiples of 1/16, and has three digits for the
    difference of 1 and almost 1.

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
    """Yield what computes x / sqrt(mean(x²) + epsilon), from the square to the quotient."""
    made, readers = _links(graph)
    constants = {tensor.name: tensor for tensor in graph.initializer}
    for mean in [node for node in graph.node if node.op_type == "ReduceMean"]:
        square = made.get(mean.input[0])
        if square is None or not _squares(square, constants):
            continue
        nodes, read = [square, mean], square.input[0]
        while read not in nodes[-1].input or len(nodes) < 3:
            following = readers.get(nodes[-1].output[0], [])
            if len(following) != 1 or following[0].op_type not in _NORMALISING:
                break
            nodes.append(following[0])
        yield _Part(nodes, read)


def _squares(node: NodeProto, constants: dict[str, TensorProto]) -> bool:
    if node.op_type == "Mul":
        return bool(node.input[0] == node.input[1])
    exponent = constants.get(node.input[1]) if node.op_type == "Pow" else None
    return exponent is not None and onnx.numpy_helper.to_array(exponent).tolist() in (2, [2])


def _angles(graph: GraphProto) -> Iterator[_Part]:
    """Yield what computes sines and cosines of positions, which are casts of integers."""
    made, _ = _links(graph)
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
    made, readers = _links(graph)
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


def _links(graph: GraphProto) -> tuple[dict[str, NodeProto], dict[str, list[NodeProto]]]:
    """Return which node makes a tensor, and which nodes read it."""
    made = {name: node for node in graph.node for name in node.output}
    readers: dict[str, list[NodeProto]] = {}
    for node in graph.node:
        for name in set(node.input):
            readers.setdefault(name, []).append(node)
    return made, readers
