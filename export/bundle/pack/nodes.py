"""Nodes that a user's graph gets: pooling of its vectors of tokens, and reshapes of its inputs and outputs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Literal

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from export.quantize.nested import nodes_of

#: Ways from the vectors of a text's tokens to one: their mean, or the first of them.
Pooling = Literal["mean", "cls"]
#: The names of new tensors begin with it.
_PREFIX = "fewheads"
#: No division by zero: a text without tokens has a vector of zeros, whose length torch takes as 1e-12, too.
_LEAST_TOKENS, _LEAST_LENGTH = 1, 1e-12


def embed(model: ModelProto, read: str, mask: str, pooling: Pooling | None, *, normalize: bool, output: str) -> None:
    """Change a graph so that an embedding, FP32 [N, width], is its only output.

    Args:
        read: the output that becomes it: vectors of tokens, [N, tokens, width], or with a ``pooling`` of None
            embeddings, [N, width].
        mask: the input, INT64 [N, tokens], that is 1 for tokens and 0 for padding.
        normalize: whether embeddings get the length 1.
        output: name of the embedding; a tensor of the graph that has it gets another one.
    """
    graph = model.graph
    before = next(one for one in graph.output if one.name == read).type.tensor_type
    sizes = before.shape.dim
    shape = [sizes[0].dim_param or "batch", sizes[-1].dim_value]
    new = _Nodes(graph)
    _rename(graph, output, other := new.free(output))
    read = other if read == output else read
    vector = new.add("Cast", read, to=TensorProto.FLOAT)
    if pooling == "cls":
        vector = new.add("Gather", vector, new.constant(np.int64(0)), axis=1)
    elif pooling == "mean":
        tokens = new.constant(np.array([1]))
        counted = new.add("Cast", mask, to=TensorProto.FLOAT)
        number = new.add("ReduceSum", counted, tokens, keepdims=1)
        # Before the sum, which could exceed the range of FP16.
        shares = new.add("Div", counted, new.add("Clip", number, new.constant(np.float32(_LEAST_TOKENS))))
        weights = new.add("Unsqueeze", shares, new.constant(np.array([2])))
        vector = new.add("ReduceSum", new.add("Mul", vector, weights), tokens, keepdims=0)
    if normalize:
        # Not ReduceL2, whose axes became an input in opset 18. Files in FP16 keep these nodes in FP32: FP16 has neither
        # the square of a number above 255 nor 1e-12.
        squares = new.add("ReduceSum", new.add("Mul", vector, vector), new.constant(np.array([1])), keepdims=1)
        length = new.add("Clip", new.add("Sqrt", squares), new.constant(np.float32(_LEAST_LENGTH)))
        vector = new.add("Div", vector, length)
    new.add("Identity", vector, output=output)
    del graph.output[:]
    graph.output.append(helper.make_tensor_value_info(output, TensorProto.FLOAT, shape))
    _remove_unread(graph)


def reshape(model: ModelProto, name: str, outside: Sequence[int], inside: Sequence[int], *, batched: bool) -> None:
    """Give an input or output another shape for clients.

    Args:
        name: of the input or output, which keeps it.
        outside, inside: shapes without the batch for clients and for the graph's own nodes, with at most one -1 each.
        batched: whether both have a batch in front.
    """
    graph = model.graph
    new = _Nodes(graph)
    _rename(graph, name, own := new.free(name))
    is_input = any(one.name == name for one in graph.input)
    reads, gives, target = (name, own, inside) if is_input else (own, name, outside)
    # 0 keeps the size of the batch.
    new.add("Reshape", reads, new.constant(np.array([0] * batched + list(target), np.int64)), output=gives)
    if is_input:
        graph.node.insert(0, graph.node.pop())
    tensor = next(one for one in (*graph.input, *graph.output) if one.name == name)
    sizes = tensor.type.tensor_type.shape.dim
    shape = [sizes[0].dim_param or "batch"] * batched + [size if size >= 0 else f"{name}_size" for size in outside]
    tensor.CopyFrom(helper.make_tensor_value_info(name, tensor.type.tensor_type.elem_type, shape))


def _rename(graph: GraphProto, name: str, new: str) -> None:
    """Rename a tensor in all nodes, and not in the lists of inputs and outputs."""
    for node in nodes_of(graph.node):
        for names in (node.input, node.output):
            for place, one in enumerate(names):
                if one == name:
                    names[place] = new


class _Nodes:
    """Appends nodes and constants to a graph."""

    def __init__(self, graph: GraphProto) -> None:
        self._graph = graph
        self._taken = {name for node in nodes_of(graph.node) for name in (node.name, *node.input, *node.output)}
        self._taken.update(tensor.name for tensor in graph.initializer)

    def free(self, kind: str) -> str:
        """Return a name that no tensor and no node has, also in a graph that was changed here before, and take it."""
        name = next(name for number in count() if (name := f"{_PREFIX}/{kind}_{number}") not in self._taken)
        self._taken.add(name)
        return name

    def add(self, operator: str, *inputs: str, output: str | None = None, **attributes: int) -> str:
        """Append a node, and return the name of its output."""
        name = self.free(operator)
        self._graph.node.append(helper.make_node(operator, inputs, [output or name], name=name, **attributes))
        return output or name

    def constant(self, value: object) -> str:
        name = self.free("constant")
        self._graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
        return name


def _remove_unread(graph: GraphProto) -> None:
    """Remove nodes whose outputs nobody reads, and their weights, such as those of a pooler that is not used."""
    read = {one.name for one in graph.output}
    kept: list[NodeProto] = []
    for node in reversed(graph.node):  # in the order of their computation
        if not read.intersection(node.output):
            continue
        kept.append(node)
        for inner in nodes_of([node]):
            read.update(inner.input)
            nested = (part for one in inner.attribute for part in (one.g, *one.graphs))
            read.update(output.name for part in nested for output in part.output)
    del graph.node[:]
    graph.node.extend(reversed(kept))
    for weights in [one for one in graph.initializer if one.name not in read]:
        graph.initializer.remove(weights)
        for default in [one for one in graph.input if one.name == weights.name]:
            graph.input.remove(default)
