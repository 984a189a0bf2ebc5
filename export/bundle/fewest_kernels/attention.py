"""The attentions of a graph."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from onnx import NodeProto
from onnx.helper import get_attribute_value

from edge.datatypes import Array
from export.bundle.fewest_kernels.graph import Graph

#: The axes of [N, T, heads, head_dim] in queries and values, and in keys.
HEADS, TRANSPOSED_HEADS = [0, 2, 1, 3], [0, 2, 3, 1]
_ROUNDING = ("Mul", "QuantizeLinear", "DequantizeLinear")


class Weight(NamedTuple):
    """Weights [features, outputs], in INT8 with a scale for each output."""

    values: Array
    scales: Array | None = None

    def padded(self, rows: int, outputs: int) -> Weight:
        """Return the weights with further rows and outputs of zeros."""
        scales = None if self.scales is None else np.pad(self.scales, (0, outputs), constant_values=1)
        return Weight(np.pad(self.values, ((0, rows), (0, outputs))), scales)


class Projection(NamedTuple):
    """A product with weights; ``factor`` multiplies its sum with the bias, [outputs]."""

    product: NodeProto
    weight: Weight
    bias: Array
    factor: float

    def padded(self, outputs: int) -> Projection:
        """Return the projection with further outputs, of zero."""
        return self._replace(weight=self.weight.padded(0, outputs), bias=np.pad(self.bias, (0, outputs)))


class AttentionNodes(NamedTuple):
    """The nodes of an attention.

    Attributes:
        logits, weighted: the products of queries with keys, and of attention weights with values.
        merged: the Reshape that puts the heads of a token side by side.
        output, added: the output projection and its bias.
    """

    heads: int
    head_dim: int
    projections: tuple[Projection, Projection, Projection]
    logits: NodeProto
    weighted: NodeProto
    merged: NodeProto
    output: NodeProto
    added: NodeProto


def attention_of(graph: Graph, softmax: NodeProto) -> AttentionNodes | None:
    """Return the attention around a softmax, or None where the graph has another form."""
    masked = graph.maker(softmax.input[0], "Add")
    terms = masked.input if masked else softmax.input
    logits = next((node for name in terms if (node := _scaled_product(graph, name))), None)
    weighted = graph.reader(softmax.output[0], "MatMul")
    turned = graph.reader(weighted.output[0], "Transpose") if weighted else None
    merged = graph.reader(turned.output[0], "Reshape") if turned else None
    if not (logits and weighted and turned and merged) or order_of(turned) != HEADS:
        return None
    output = graph.reader(merged.output[0], "MatMul", *_ROUNDING)
    while output is not None and output.op_type != "MatMul":
        output = graph.reader(output.output[0], "MatMul", *_ROUNDING)
    added = graph.reader(output.output[0], "Add") if output else None
    sides = (logits.input[0], HEADS), (logits.input[1], TRANSPOSED_HEADS), (weighted.input[1], HEADS)
    found = [_projection_of(graph, *side) for side in sides]
    q, k, v = found
    if not (q and k and v and output and added) or bias_of(graph, added) is None:
        return None
    shapes = {(sizes, one.product.input[0], one.weight.values.shape) for one, sizes in (q, k, v)}
    (heads, head_dim), read, _ = next(iter(shapes))
    if len(shapes) > 1 or graph.rank(read) != 3:
        return None
    projections = (q[0], k[0], v[0])
    return AttentionNodes(heads, head_dim, projections, logits, weighted, merged, output, added)


def _scaled_product(graph: Graph, name: str) -> NodeProto | None:
    """Return the product that makes a tensor, by itself or with a constant factor, which stays where it is."""
    scaled = graph.maker(name, "Mul", "Div")
    factor = graph.array(scaled.input[1]) if scaled else None
    return graph.maker(scaled.input[0] if scaled and factor is not None and factor.size == 1 else name, "MatMul")


def _projection_of(graph: Graph, name: str, order: list[int]) -> tuple[Projection, tuple[int, int]] | None:
    """Return what makes an operand of attention, whose axes have this order after the split, and (heads, head_dim)."""
    factor, sizes, found = 1.0, None, [0, 1, 2, 3]
    bias: Array | None = None
    while len(graph.readers.get(name, ())) == 1 and not graph.is_output(name):
        node = graph.maker(name, "Transpose", "Reshape", "Mul", "Div", "Add", "MatMul")
        if node is None:
            return None
        if node.op_type == "MatMul":
            weight = weight_of(graph, node.input[1])
            if weight is None or sizes is None or found != order:
                return None
            outputs = weight.values.shape[1]
            sizes = (outputs // sizes[1] if sizes[0] == -1 else sizes[0], sizes[1])
            if np.prod(sizes) != outputs:
                return None
            zeros = np.zeros(weight.values.shape[1], np.float32)
            return Projection(node, weight, zeros if bias is None else bias, factor), sizes
        if node.op_type == "Transpose" and sizes is None:
            found = [order_of(node)[axis] for axis in found]
        elif node.op_type == "Reshape" and sizes is None:
            sizes = _last_two(graph, node)
        elif node.op_type in ("Mul", "Div") and bias is None and (number := graph.array(node.input[1])) is not None:
            if number.size != 1:
                return None
            factor *= float(number.item()) ** (1 if node.op_type == "Mul" else -1)
        elif node.op_type == "Add" and bias is None and sizes is not None:
            bias = bias_of(graph, node)
            if bias is None:
                return None
        else:
            return None
        constants = [name for name in node.input if graph.array(name) is not None]
        name = next(one for one in node.input if one not in constants)
    return None


def order_of(transpose: NodeProto) -> list[int]:
    """Return the axes of a Transpose."""
    return list(get_attribute_value(transpose.attribute[0]))


def _last_two(graph: Graph, split: NodeProto) -> tuple[int, int] | None:
    """Return the last two sizes of a Reshape to [N, T, heads, head_dim], if they are constant; heads may be -1."""
    concat = graph.maker(split.input[1], "Concat")
    parts = [graph.array(name) for name in (concat.input if concat else [split.input[1]])]
    sizes = [size for part in parts for size in ([0] if part is None else part.tolist())]
    if len(sizes) != 4 or not sizes[2] or sizes[3] <= 0:
        return None
    # Where they are other than those of the tokens, as in windows, attention is among others.
    same = [size in (0, graph.size(split.input[0], axis)) for axis, size in enumerate(sizes[:2])]
    inferred = [index for index, size in enumerate(sizes[:2]) if size == -1]
    return (sizes[2], sizes[3]) if sum(same) + len(inferred) == 2 and len(inferred) < 2 else None


def bias_of(graph: Graph, add: NodeProto) -> Array | None:
    """Return the constant that a sum adds to each token, or None."""
    found = [array for name in add.input if (array := graph.array(name)) is not None and array.ndim == 1]
    return found[0] if len(found) == 1 else None


def weight_of(graph: Graph, name: str) -> Weight | None:
    """Return the second operand of a product if it is constant, rounded or not, and None otherwise."""
    array = graph.array(name)
    if array is not None:
        return Weight(array) if array.ndim == 2 else None
    rounded = graph.maker(name, "DequantizeLinear")
    values, scales = (graph.array(one) for one in rounded.input[:2]) if rounded else (None, None)
    return Weight(values, scales) if values is not None and scales is not None and scales.ndim == 1 else None
