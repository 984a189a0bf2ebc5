"""Attention in the form that TensorRT runs with the fewest kernels; KERNELS.md lists the forms that were tried.

TensorRT computes queries, keys and values in one product, and attention in one kernel. Between the two it copies them,
unless they have no bias; in INT8 one copy remains, which also applies the scales. So, in FP16:

- Keys have no bias. It adds the same to all logits of a query, and a softmax does not see that.
- The values' bias moves into that of the output projection, because the attention weights of a query sum to one.
- The queries' bias moves into weights. For every token x of a layer normalisation with factors g and shifts b,
  sum((x - b) / g) = 0. So there is a vector u with x @ u = 1, and W + outer(u, bias) gives what W and the bias gave.
  The tokens are shifted by a multiple of g before, or u could be large; weights and output projection take it back.

In INT8 one product with one bias makes all three. A single head gets a second one of zeros in both, because TensorRT
does not fuse the attention of one. All of that is exact but for rounding, which :data:`_MOST_NOISE` limits.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, numpy_helper
from onnx.helper import get_attribute_value, make_node

from edge.datatypes import Array
from export.precision import checked

#: Multiples of a normalisation's factors by which its tokens may be shifted.
_SHIFTS = (0.0, 0.25, -0.25, 0.5, -0.5, 1.0, -1.0)
#: The rounding error that biases in weights may cause, as a multiple of that of the products without them.
_MOST_NOISE = 2.0
_HEADS, _TRANSPOSED_HEADS = [0, 2, 1, 3], [0, 2, 3, 1]
_ROUNDING = ("Mul", "QuantizeLinear", "DequantizeLinear")


def fewest_kernels(model: bytes) -> bytes:
    """Return a model for TensorRT that computes the same with fewer kernels.

    Args:
        model: in FP32, or with QuantizeLinear and DequantizeLinear before its products. Only self-attention with one
            projection each for queries, keys and values of tokens [N, T, d] changes.
    """
    parsed = onnx.load_from_string(model)
    graph = _Graph(parsed)
    for softmax in [node for node in graph.nodes if node.op_type == "Softmax"]:
        found = _attention_of(graph, softmax)
        if found is not None:
            _rewrite(graph, found)
            graph.index()
    graph.finish()
    return checked(parsed)


class _Weight(NamedTuple):
    """Weights [features, outputs], in INT8 with a scale for each output."""

    values: Array
    scales: Array | None = None

    def padded(self, rows: int, outputs: int) -> _Weight:
        """Return the weights with further rows and outputs of zeros."""
        scales = None if self.scales is None else np.pad(self.scales, (0, outputs), constant_values=1)
        return _Weight(np.pad(self.values, ((0, rows), (0, outputs))), scales)


class _Projection(NamedTuple):
    """A product with weights; ``factor`` multiplies its sum with the bias, [outputs]."""

    product: NodeProto
    weight: _Weight
    bias: Array
    factor: float

    def padded(self, outputs: int) -> _Projection:
        """Return the projection with further outputs, of zero."""
        return self._replace(weight=self.weight.padded(0, outputs), bias=np.pad(self.bias, (0, outputs)))


class _Attention(NamedTuple):
    """The nodes of an attention.

    Attributes:
        logits, weighted: the products of queries with keys, and of attention weights with values.
        merged: the Reshape that puts the heads of a token side by side.
        output, added: the output projection and its bias.
    """

    heads: int
    head_dim: int
    projections: tuple[_Projection, _Projection, _Projection]
    logits: NodeProto
    weighted: NodeProto
    merged: NodeProto
    output: NodeProto
    added: NodeProto


class _Graph:
    """Nodes, with what makes and what reads each tensor."""

    def __init__(self, model: ModelProto) -> None:
        self._graph = model.graph
        inferred = onnx.shape_inference.infer_shapes(model, data_prop=True).graph.value_info
        self.ranks = {value.name: len(value.type.tensor_type.shape.dim) for value in inferred}
        self.nodes = list(model.graph.node)
        self._constants = {tensor.name: tensor for tensor in model.graph.initializer}
        self._outputs = {output.name for output in model.graph.output}
        self.index()

    def index(self) -> None:
        """Look again at what makes and reads each tensor."""
        self._makers = {name: node for node in self.nodes for name in node.output}
        self.readers: dict[str, list[NodeProto]] = {}
        for node in self.nodes:
            for name in node.input:
                self.readers.setdefault(name, []).append(node)

    def array(self, name: str) -> Array | None:
        """Return a constant, or None."""
        found = self._constants.get(name)
        return None if found is None else numpy_helper.to_array(found)

    def maker(self, name: str, *operators: str) -> NodeProto | None:
        """Return what makes a tensor, if it is one of these operators."""
        node = self._makers.get(name)
        return node if node is not None and node.op_type in operators else None

    def reader(self, name: str, *operators: str) -> NodeProto | None:
        """Return the only node that reads a tensor, if it is one of these operators and no client reads it."""
        readers = self.readers.get(name, [])
        alone = len(readers) == 1 and name not in self._outputs
        return readers[0] if alone and readers[0].op_type in operators else None

    def is_output(self, name: str) -> bool:
        """Return whether clients read a tensor."""
        return name in self._outputs

    def constant(self, name: str, array: Array) -> str:
        """Add a constant and return its name."""
        while name in self._constants:
            name += ".new"
        self._constants[name] = numpy_helper.from_array(np.ascontiguousarray(array), name)
        self._graph.initializer.append(self._constants[name])
        return name

    def insert(self, before: NodeProto, operator: str, inputs: list[str], name: str, **attributes: object) -> str:
        """Add a node in front of another one, and return the name of its output."""
        place = next(index for index, node in enumerate(self.nodes) if node is before)
        self.nodes.insert(place, make_node(operator, inputs, [name], name, **attributes))
        return name

    def finish(self) -> None:
        """Write the nodes into the model, without those, and without constants, that no output needs."""
        needed, kept = set(self._outputs), []
        for node in reversed(self.nodes):
            if needed.intersection(node.output):
                needed.update(node.input)
                kept.append(node)
        del self._graph.node[:]
        del self._graph.value_info[:]
        self._graph.node.extend(reversed(kept))
        for tensor in [tensor for tensor in self._graph.initializer if tensor.name not in needed]:
            self._graph.initializer.remove(tensor)


def _attention_of(graph: _Graph, softmax: NodeProto) -> _Attention | None:
    """Return the attention around a softmax, or None where the graph has another form."""
    logits = graph.maker(softmax.input[0], "MatMul", "Add")
    if logits is not None and logits.op_type == "Add":  # of a mask
        logits = next((node for name in logits.input if (node := graph.maker(name, "MatMul"))), None)
    weighted = graph.reader(softmax.output[0], "MatMul")
    turned = graph.reader(weighted.output[0], "Transpose") if weighted else None
    merged = graph.reader(turned.output[0], "Reshape") if turned else None
    if not (logits and weighted and turned and merged) or _order(turned) != _HEADS:
        return None
    output = graph.reader(merged.output[0], "MatMul", *_ROUNDING)
    while output is not None and output.op_type != "MatMul":
        output = graph.reader(output.output[0], "MatMul", *_ROUNDING)
    added = graph.reader(output.output[0], "Add") if output else None
    sides = (logits.input[0], _HEADS), (logits.input[1], _TRANSPOSED_HEADS), (weighted.input[1], _HEADS)
    found = [_projection_of(graph, *side) for side in sides]
    q, k, v = found
    if not (q and k and v and output and added) or _bias_of(graph, added) is None:
        return None
    shapes = {(sizes, one.product.input[0], one.weight.values.shape) for one, sizes in (q, k, v)}
    (heads, head_dim), read, _ = next(iter(shapes))
    if len(shapes) > 1 or graph.ranks.get(read) != 3:
        return None
    projections = (q[0], k[0], v[0])
    return _Attention(heads, head_dim, projections, logits, weighted, merged, output, added)


def _projection_of(graph: _Graph, name: str, order: list[int]) -> tuple[_Projection, tuple[int, int]] | None:
    """Return what makes an operand of attention, whose axes have this order after the split, and (heads, head_dim)."""
    factor, sizes, found = 1.0, None, [0, 1, 2, 3]
    bias: Array | None = None
    while len(graph.readers.get(name, ())) == 1 and not graph.is_output(name):
        node = graph.maker(name, "Transpose", "Reshape", "Mul", "Div", "Add", "MatMul")
        if node is None:
            return None
        if node.op_type == "MatMul":
            weight = _weight_of(graph, node.input[1])
            if weight is None or sizes is None or found != order or np.prod(sizes) != weight.values.shape[1]:
                return None
            zeros = np.zeros(weight.values.shape[1], np.float32)
            return _Projection(node, weight, zeros if bias is None else bias, factor), sizes
        if node.op_type == "Transpose" and sizes is None:
            found = [_order(node)[axis] for axis in found]
        elif node.op_type == "Reshape" and sizes is None:
            sizes = _last_two(graph, node.input[1])
        elif node.op_type in ("Mul", "Div") and bias is None and (number := graph.array(node.input[1])) is not None:
            if number.size != 1:
                return None
            factor *= float(number.item()) ** (1 if node.op_type == "Mul" else -1)
        elif node.op_type == "Add" and bias is None and sizes is not None:
            bias = _bias_of(graph, node)
            if bias is None:
                return None
        else:
            return None
        constants = [name for name in node.input if graph.array(name) is not None]
        name = next(one for one in node.input if one not in constants)
    return None


def _order(transpose: NodeProto) -> list[int]:
    return list(get_attribute_value(transpose.attribute[0]))


def _last_two(graph: _Graph, shape: str) -> tuple[int, int] | None:
    """Return the last two sizes of a shape of four, if they are constant."""
    concat = graph.maker(shape, "Concat")
    parts = [graph.array(name) for name in (concat.input if concat else [shape])]
    sizes = [size for part in parts for size in ([-1] if part is None else part.tolist())]
    return (sizes[2], sizes[3]) if len(sizes) == 4 and min(sizes[2:]) > 0 else None


def _bias_of(graph: _Graph, add: NodeProto) -> Array | None:
    found = [array for name in add.input if (array := graph.array(name)) is not None and array.ndim == 1]
    return found[0] if len(found) == 1 else None


def _weight_of(graph: _Graph, name: str) -> _Weight | None:
    array = graph.array(name)
    if array is not None:
        return _Weight(array) if array.ndim == 2 else None
    rounded = graph.maker(name, "DequantizeLinear")
    values, scales = (graph.array(one) for one in rounded.input[:2]) if rounded else (None, None)
    return _Weight(values, scales) if values is not None and scales is not None and scales.ndim == 1 else None


def _rewrite(graph: _Graph, found: _Attention) -> None:
    rounded = {one.weight.scales is not None for one in found.projections}
    output = _weight_of(graph, found.output.input[1])
    if len(rounded) > 1 or output is None:
        return
    if found.heads == 1:
        if output.scales is not None:  # TensorRT fuses attention of one head whose output is rounded
            return
        width = found.head_dim
        q, k, v = (one.padded(width) for one in found.projections)
        found, output = found._replace(heads=2, projections=(q, k, v)), output.padded(width, 0)
        _set_weight(graph, found.output, output)
    if rounded == {True}:
        _join(graph, found)
    elif output.scales is None:
        _remove_biases(graph, found, output.values)
    else:
        return
    shape = np.array([0, 0, found.heads * found.head_dim])
    del found.merged.attribute[:]  # with allowzero, 0 is a size
    found.merged.input[1] = graph.constant(f"{found.merged.name}.shape", shape)


def _set_weight(graph: _Graph, product: NodeProto, weight: _Weight) -> None:
    name = f"{product.name}.fewest"
    product.input[1] = constant = graph.constant(name, weight.values)
    if weight.scales is not None:
        zeros = graph.constant(f"{name}.zero", np.zeros(len(weight.scales), np.int8))
        inputs = [constant, graph.constant(f"{name}.scale", weight.scales), zeros]
        product.input[1] = graph.insert(product, "DequantizeLinear", inputs, f"{constant}.rounded", axis=1)


def _to_heads(graph: _Graph, before: NodeProto, name: str, heads: int, head_dim: int, order: list[int]) -> str:
    """Add the split of [N, T, heads * head_dim] into heads, and return its name."""
    shape = graph.constant(f"{name}.shape", np.array([0, 0, heads, head_dim]))
    split = graph.insert(before, "Reshape", [name, shape], f"{name}.split")
    return graph.insert(before, "Transpose", [split], f"{name}.heads", perm=order)


def _join(graph: _Graph, found: _Attention) -> None:
    """Make queries, keys and values in one product, with one bias and one transposition."""
    q = found.projections[0]
    weights = [one.weight for one in found.projections]
    scales = np.concatenate([weight.scales for weight in weights if weight.scales is not None])
    _set_weight(graph, q.product, _Weight(np.concatenate([weight.values for weight in weights], axis=1), scales))
    heads, before, name = found.heads, found.logits, q.product.output[0]
    bias = graph.constant(f"{name}.bias", np.concatenate([one.bias for one in found.projections]))
    added = graph.insert(before, "Add", [name, bias], f"{name}.sum")
    turned = _to_heads(graph, before, added, 3 * heads, found.head_dim, _HEADS)
    parts = graph.constant(f"{name}.parts", np.full(3, heads))
    place = next(index for index, node in enumerate(graph.nodes) if node is before)
    names = [f"{name}.{part}" for part in "qkv"]
    graph.nodes.insert(place, make_node("Split", [turned, parts], names, f"{name}.qkv", axis=1))
    for index, one in enumerate(found.projections):
        if one.factor != 1:
            factor = graph.constant(f"{names[index]}.factor", np.float32(one.factor))
            names[index] = graph.insert(before, "Mul", [names[index], factor], f"{names[index]}.scaled")
    names[1] = graph.insert(before, "Transpose", [names[1]], f"{names[1]}.transposed", perm=[0, 1, 3, 2])
    found.logits.input[:] = names[:2]
    found.weighted.input[1] = names[2]


def _remove_biases(graph: _Graph, found: _Attention, output: Array) -> None:
    """Leave queries, keys and values without biases and factors."""
    weights = [one.factor * one.weight.values.astype(np.float64) for one in found.projections]
    q, _, v = found.projections
    bias, moved = q.factor * q.bias.astype(np.float64), v.factor * v.bias.astype(np.float64)
    output_bias = _bias_of(graph, found.added)
    assert output_bias is not None
    output_bias = output_bias + moved @ output
    if bias.any() and (shift := _shift_of(graph, found)) is not None:
        norm, factors, shifts, residual = shift
        if (absorbed := _absorbed(factors, shifts, weights, bias)) is not None:
            delta, weights, bias = absorbed[0], absorbed[1], np.zeros_like(bias)
            norm.input[2] = graph.constant(f"{norm.name}.shifts", (shifts + delta).astype(np.float32))
            if residual:
                output_bias = output_bias - delta
    operands = []
    for one, weight, order in zip(found.projections, weights, (_HEADS, _TRANSPOSED_HEADS, _HEADS), strict=True):
        _set_weight(graph, one.product, _Weight(weight.astype(np.float32)))
        name = one.product.output[0]
        operands.append(_to_heads(graph, found.logits, name, found.heads, found.head_dim, order))
    if bias.any():
        name = operands[0]
        array = bias.astype(np.float32).reshape(1, found.heads, 1, found.head_dim)
        operands[0] = graph.insert(found.logits, "Add", [name, graph.constant(f"{name}.bias", array)], f"{name}.sum")
    found.logits.input[:] = operands[:2]
    found.weighted.input[1] = operands[2]
    added = graph.constant(f"{found.output.name}.sum", output_bias.astype(np.float32))
    found.added.input[:] = [found.output.output[0], added]


def _shift_of(graph: _Graph, found: _Attention) -> tuple[NodeProto, Array, Array, bool] | None:
    """Return the normalisation before attention, its factors and shifts, and whether its output is the residual, too.

    None where something else reads its output.
    """
    read = found.projections[0].product.input[0]
    norm = graph.maker(read, "LayerNormalization")
    if norm is None or len(norm.input) != 3 or graph.is_output(read):
        return None
    factors, shifts = graph.array(norm.input[1]), graph.array(norm.input[2])
    products = {one.product.output[0] for one in found.projections}
    others = [node for node in graph.readers[read] if node.output[0] not in products]
    residual = [node for node in others if node.op_type == "Add" and found.added.output[0] in node.input]
    if factors is None or shifts is None or factors.ndim != 1 or others != residual:
        return None
    return norm, factors.astype(np.float64), shifts.astype(np.float64), bool(residual)


def _absorbed(factors: Array, shifts: Array, weights: list[Array], bias: Array) -> tuple[Array, list[Array]] | None:
    """Return a shift of the tokens, and weights that undo it and add the queries' bias; None if they are too inexact.

    Rounding errors grow with the tokens' and the weights' squares; a token's mean square is factors² + shifts².
    """
    if not factors.all():
        return None
    best, least = None, _MOST_NOISE
    for multiple in _SHIFTS:
        delta = multiple * factors
        total = ((shifts + delta) / factors).sum()
        if not total:
            continue
        u = 1 / (factors * total)
        wanted = [bias, np.zeros_like(bias), np.zeros_like(bias)]
        found = [weight + np.outer(u, add - delta @ weight) for weight, add in zip(weights, wanted, strict=True)]
        before, after = (factors**2 + (shifts + moved) ** 2 for moved in (0.0, delta))
        noise = max(
            np.sqrt((after @ new**2).sum() / (before @ old**2).sum()) for old, new in zip(weights, found, strict=True)
        )
        if noise < least:
            best, least = (delta, found), noise
    return best
