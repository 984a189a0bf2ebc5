"""Tokens as the rows of a matrix [T * N, features], the first tokens of all inputs first.

TensorRT orders tokens so around its fused attention, whatever the graph says. It joins a normalisation with what comes
before it, but not with a transposition or a choice of tokens behind it. So the graph orders the embeddings in front of
their normalisation, and chooses first tokens in front of the last one: as early as nothing else reads the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from onnx import NodeProto
from onnx.helper import get_attribute_value

from export.bundle.fewest_kernels.attention import weight_of
from export.bundle.fewest_kernels.graph import Graph

#: They compute each value from one of each operand.
_ELEMENTWISE = {"Add", "Sub", "Mul", "Div", "Erf", "Tanh", "Gelu", "Relu", "Sigmoid"}
#: Factor of tokens before they are added up, or FP16 could not hold the sum of a thousand.
_SHARE = 1 / 64
_ROUNDING = {"QuantizeLinear", "DequantizeLinear"}


def order_by_position(graph: Graph, merged: Sequence[NodeProto]) -> None:
    """Order tokens [N, T, features] by their position, from the embeddings to the last layer.

    Args:
        merged: the Reshape behind each attention of the graph, whose shape is [0, 0, features]; that of the heads
            before it is [0, 0, heads, head_dim].
    """
    tokens = _Tokens(graph, merged)
    if tokens.can_be_ordered():
        tokens.order()


class _Tokens:
    """The tensors of tokens, from the embeddings to the last layer."""

    def __init__(self, graph: Graph, merged: Sequence[NodeProto]) -> None:
        self._graph, self._merged = graph, merged
        self._splits = [node for node in graph.nodes if node.op_type == "Reshape" and self._is_split(node)]
        self._names = {node.output[0] for node in merged} | {node.input[0] for node in self._splits}
        size = 0
        while size < len(self._names):
            size = len(self._names)
            for node in graph.nodes:
                read = self._read(node)
                if read and self._names.issuperset(read):
                    self._names.add(node.output[0])
                elif len(read) == 1 and node.output[0] in self._names:
                    self._names.update(read)
        inside = [node for node in graph.nodes if node.output[0] in self._names and self._is_inside(node)]
        self._inside = {id(node) for node in inside}
        makers = self._inside | {id(node) for node in merged}
        made = [node.output[0] for node in graph.nodes if id(node) in makers]
        places = {name: place for place, node in enumerate(graph.nodes) for name in node.output}
        # In the order of the nodes: the number of rows is read from the first, before anything reads the others.
        self._entries = sorted(self._names.difference(made), key=lambda name: (places.get(name, -1), name))
        kept = self._inside | {id(node) for node in self._splits}
        self._exits = [(name, node) for name in made for node in graph.readers.get(name, ()) if id(node) not in kept]

    def can_be_ordered(self) -> bool:
        """Return whether no client reads tokens, and all are [N, T, features]."""
        changed = [*self._entries, *(name for name, _ in self._exits)]
        sized = all(self._graph.rank(name) == 3 and self._graph.width(name) for name in changed)
        return sized and bool(self._entries) and not any(map(self._graph.is_output, self._names))

    def order(self) -> None:
        """Change the graph."""
        graph = self._graph
        first = min(graph.nodes, key=lambda node: not self._names.intersection(node.input))
        sizes = graph.insert(first, "Shape", [self._entries[0]], "tokens.sizes")
        zero = graph.constant("tokens.first", np.array([0]))
        rows = graph.insert(first, "Gather", [sizes, zero], "tokens.rows")
        for name in self._entries:
            self._enter(name)
        for split in self._splits:
            self._turn(graph.readers[split.output[0]])
            heads = graph.array(split.input[1])
            assert heads is not None
            split.input[1] = self._shape(split, rows, heads[2:].tolist())
        for merged in self._merged:
            turned = graph.maker(merged.input[0], "Transpose")
            assert turned is not None
            turned.attribute[0].ints[:] = [2, 0, 1, 3]
            features = graph.array(merged.input[1])
            assert features is not None
            merged.input[1] = graph.constant(f"{merged.input[1]}.rows", np.array([-1, features[2]]))
        left: dict[str, str] = {}
        for name, node in self._exits:
            if self._is_first(node) and len(graph.readers[name]) == 1:
                self._choose_first(name, node, rows)
                continue
            if (mask := self._mask_of_mean(node)) is not None:
                self._average(name, node, mask, rows)
                continue
            if name not in left:
                whole = graph.insert(
                    node, "Reshape", [name, self._shape(node, rows, [graph.width(name)])], f"{name}.whole"
                )
                left[name] = graph.insert(node, "Transpose", [whole], f"{name}.by_input", perm=[1, 0, 2])
            node.input[:] = [left[name] if one == name else one for one in node.input]

    def _enter(self, name: str) -> None:
        graph = self._graph
        readers = [node for node in graph.readers[name] if id(node) in self._inside or node in self._splits]
        turned = graph.insert(readers[0], "Transpose", [name], f"{name}.by_position", perm=[1, 0, 2])
        shape = graph.constant(f"{name}.rows.shape", np.array([-1, graph.width(name)]))
        rows = graph.insert(readers[0], "Reshape", [turned, shape], f"{name}.rows")
        for node in readers:
            node.input[:] = [rows if one == name else one for one in node.input]

    def _turn(self, transposes: Sequence[NodeProto]) -> None:
        """Exchange the first two axes that heads are read from."""
        for node in transposes:
            node.attribute[0].ints[:] = [{0: 1, 1: 0}.get(axis, axis) for axis in node.attribute[0].ints]

    def _shape(self, before: NodeProto, rows: str, last: Sequence[int]) -> str:
        """Add the shape [T, N, *last]."""
        graph, name = self._graph, f"{before.name}.{before.input[0]}.sizes"
        parts = [graph.constant("tokens.rest", np.array([-1])), rows, graph.constant(f"{name}.last", np.array(last))]
        return graph.insert(before, "Concat", parts, name, axis=0)

    def _choose_first(self, name: str, node: NodeProto, rows: str) -> None:
        """Compute what follows the last attention for the first tokens only."""
        graph = self._graph
        inside, waiting, chosen = {id(node)}, {name}, name
        places = {made: place for place, maker in enumerate(graph.nodes) for made in maker.output}
        while True:
            last = max(waiting, key=places.__getitem__)
            maker = graph.maker(last)
            if any(id(reader) not in inside for reader in graph.readers[last]) or maker is None:
                break
            if len(waiting) == 1:
                chosen = last
            if id(maker) not in self._inside:
                break
            inside.add(id(maker))
            waiting = (waiting - {last}).union(self._read(maker))
        readers = graph.readers[chosen]
        zero, one = (graph.constant(f"tokens.{number}", np.array(number)) for number in (0, 1))
        count = graph.insert(readers[0], "Squeeze", [rows], "tokens.count")
        numbers = graph.insert(readers[0], "Range", [zero, count, one], "tokens.numbers")
        # ONNX Runtime makes a Slice of a Gather with a Range, and then does not run it.
        numbers = graph.insert(readers[0], "Cast", [numbers], "tokens.int32", to=6)
        first = graph.insert(readers[0], "Gather", [chosen, numbers], f"{chosen}.first")
        for reader in readers:
            reader.input[:] = [first if name == chosen else name for name in reader.input]
        node.op_type = "Identity"
        del node.input[1:], node.attribute[:]

    def _average(self, name: str, product: NodeProto, mask: str, rows: str) -> None:
        """Compute the mean of tokens without a product, for which TensorRT pads their number in two kernels."""
        graph, chosen = self._graph, self._graph.readers[product.output[0]][0]
        by_position = graph.insert(product, "Transpose", [mask], f"{name}.mask.by_position", perm=[1, 0])
        last = graph.constant("tokens.last", np.array([2]))
        weights = graph.insert(product, "Unsqueeze", [by_position, last], f"{name}.mask.weights")
        shape = self._shape(product, rows, [graph.width(name)])
        whole = graph.insert(product, "Reshape", [name, shape], f"{name}.whole")
        least = graph.constant("tokens.least", np.float32(_SHARE))
        weights = graph.insert(product, "Mul", [weights, least], f"{name}.mask.shares")
        sizes = graph.insert(product, "Shape", [whole], f"{name}.whole.sizes")
        # As wide as the tokens, so that both sums are of one shape, and one kernel.
        weights = graph.insert(product, "Expand", [weights, sizes], f"{name}.mask.wide")
        kept = graph.insert(product, "Mul", [whole, weights], f"{name}.kept")
        axis = graph.constant("tokens.first", np.array([0]))
        total, share = (
            graph.insert(product, "ReduceSum", [one, axis], f"{one}.total", keepdims=0) for one in (kept, weights)
        )
        share = graph.insert(product, "Max", [share, least], f"{name}.share")
        chosen.input[:] = [graph.insert(product, "Div", [total, share], f"{name}.mean")]
        chosen.op_type = "Identity"
        del chosen.attribute[:]

    def _mask_of_mean(self, product: NodeProto) -> str | None:
        """Return the mask [N, T] by which a product averages tokens, as :mod:`export.models.heads` does, or None."""
        graph = self._graph
        chosen = graph.reader(product.output[0], "Gather") if product.op_type == "MatMul" else None
        weights = graph.maker(product.input[0], "Unsqueeze") if chosen is not None and self._is_first(chosen) else None
        quotient = graph.maker(weights.input[0], "Div") if weights else None
        count = graph.maker(quotient.input[1], "Max", "Clip") if quotient else None
        total = graph.maker(count.input[0], "ReduceSum") if count else None
        return total.input[0] if total and quotient and total.input[0] == quotient.input[0] else None

    def _is_first(self, node: NodeProto) -> bool:
        index = self._graph.array(node.input[1]) if node.op_type == "Gather" else None
        axis = next((one.i for one in node.attribute if one.name == "axis"), 0)
        return index is not None and index.ndim == 0 and int(index) == 0 and axis == 1

    def _is_split(self, node: NodeProto) -> bool:
        shape = self._graph.array(node.input[1])
        readers = self._graph.readers.get(node.output[0], [])
        turned = bool(readers) and all(reader.op_type == "Transpose" for reader in readers)
        return turned and shape is not None and len(shape) == 4 and shape[:2].tolist() == [0, 0]

    def _is_inside(self, node: NodeProto) -> bool:
        read = self._read(node)
        return bool(read) and self._names.issuperset(read)

    def _read(self, node: NodeProto) -> list[str]:
        """Return the tensors of tokens that a node computes token by token; none if it mixes tokens."""
        graph = self._graph
        if node.op_type == "MatMul":
            return [node.input[0]] if weight_of(graph, node.input[1]) else []
        if node.op_type == "LayerNormalization":
            axis = [get_attribute_value(one) for one in node.attribute if one.name == "axis"]
            return [node.input[0]] if axis in ([], [-1]) else []
        if node.op_type in _ROUNDING:
            scale = graph.array(node.input[1])
            return [node.input[0]] if scale is not None and scale.size == 1 else []
        if node.op_type not in _ELEMENTWISE:
            return []
        arrays = {name: graph.array(name) for name in node.input}
        return [name for name, array in arrays.items() if array is None or (array.ndim > 1 and array.size > 1)]
