"""One product for queries, keys and values: without biases where weights can take them, else with one bias."""

from __future__ import annotations

import numpy as np
from onnx import NodeProto
from onnx.helper import make_node

from edge.datatypes import Array
from export.bundle.fewest_kernels.attention import HEADS, TRANSPOSED_HEADS, AttentionNodes, Weight, bias_of, weight_of
from export.bundle.fewest_kernels.graph import Graph


def set_weight(graph: Graph, product: NodeProto, weight: Weight) -> None:
    """Give a product other weights."""
    name = f"{product.name}.fewest"
    product.input[1] = constant = graph.constant(name, weight.values)
    if weight.scales is not None:
        zeros = graph.constant(f"{name}.zero", np.zeros(len(weight.scales), np.int8))
        inputs = [constant, graph.constant(f"{name}.scale", weight.scales), zeros]
        product.input[1] = graph.insert(product, "DequantizeLinear", inputs, f"{constant}.rounded", axis=1)


def to_heads(graph: Graph, before: NodeProto, name: str, heads: int, head_dim: int, order: list[int]) -> str:
    """Add the split of [N, T, heads * head_dim] into heads, and return its name."""
    shape = graph.constant(f"{name}.shape", np.array([0, 0, heads, head_dim]))
    split = graph.insert(before, "Reshape", [name, shape], f"{name}.split")
    return graph.insert(before, "Transpose", [split], f"{name}.heads", perm=order)


#: Multiples of a normalisation's factors by which its tokens may be shifted.
_SHIFTS = (0.0, 0.25, -0.25, 0.5, -0.5, 1.0, -1.0)
#: The rounding error that biases in weights may cause, as a multiple of that of the products without them.
_MOST_NOISE = 2.0


def remove_biases(graph: Graph, found: AttentionNodes, output: Array) -> None:
    """Leave queries, keys and values without biases and factors."""
    weights = [one.factor * one.weight.values.astype(np.float64) for one in found.projections]
    q, _, v = found.projections
    bias, moved = q.factor * q.bias.astype(np.float64), v.factor * v.bias.astype(np.float64)
    output_bias = bias_of(graph, found.added)
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
    # Values may be computed behind the logits.
    sides = (found.logits, HEADS), (found.logits, TRANSPOSED_HEADS), (found.weighted, HEADS)
    for one, weight, (reader, order) in zip(found.projections, weights, sides, strict=True):
        set_weight(graph, one.product, Weight(weight.astype(np.float32)))
        name = one.product.output[0]
        operands.append(to_heads(graph, reader, name, found.heads, found.head_dim, order))
    if bias.any():
        name = operands[0]
        array = bias.astype(np.float32).reshape(1, found.heads, 1, found.head_dim)
        operands[0] = graph.insert(found.logits, "Add", [name, graph.constant(f"{name}.bias", array)], f"{name}.sum")
    found.logits.input[:] = operands[:2]
    found.weighted.input[1] = operands[2]
    added = graph.constant(f"{found.output.name}.sum", output_bias.astype(np.float32))
    found.added.input[:] = [found.output.output[0], added]


def _shift_of(graph: Graph, found: AttentionNodes) -> tuple[NodeProto, Array, Array, bool] | None:
    """Return the normalisation before attention, its factors and shifts, and whether its output is the residual, too.

    None where something else reads its output.
    """
    read = found.projections[0].product.input[0]
    norm = graph.maker(read, "LayerNormalization")
    if norm is None or len(norm.input) != 3 or graph.is_output(read):
        return None
    factors, shifts = graph.array(norm.input[1]), graph.array(norm.input[2])
    products = {one.product.output[0] for one in found.projections}
    readers = [node for node in graph.readers[read] if node.op_type != "Shape"]
    others = [node for node in readers if node.output[0] not in products]
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


def rewrite(graph: Graph, found: AttentionNodes) -> bool:
    """Change an attention, and return whether it could be."""
    rounded = {one.weight.scales is not None for one in found.projections}
    output = weight_of(graph, found.output.input[1])
    if len(rounded) > 1 or output is None:
        return False
    if found.heads == 1:
        if output.scales is not None:  # TensorRT fuses attention of one head whose output is rounded
            return False
        width = found.head_dim
        q, k, v = (one.padded(width) for one in found.projections)
        found, output = found._replace(heads=2, projections=(q, k, v)), output.padded(width, 0)
        set_weight(graph, found.output, output)
    if rounded == {True}:
        _join(graph, found)
    elif output.scales is None:
        remove_biases(graph, found, output.values)
    else:
        return False
    shape = np.array([0, 0, found.heads * found.head_dim])
    del found.merged.attribute[:]  # with allowzero, 0 is a size
    found.merged.input[1] = graph.constant(f"{found.merged.name}.shape", shape)
    return True


def _join(graph: Graph, found: AttentionNodes) -> None:
    """Make queries, keys and values in one product, with one bias and one transposition."""
    q = found.projections[0]
    weights = [one.weight for one in found.projections]
    scales = np.concatenate([weight.scales for weight in weights if weight.scales is not None])
    set_weight(graph, q.product, Weight(np.concatenate([weight.values for weight in weights], axis=1), scales))
    heads, before, name = found.heads, found.logits, q.product.output[0]
    bias = graph.constant(f"{name}.bias", np.concatenate([one.bias for one in found.projections]))
    added = graph.insert(before, "Add", [name, bias], f"{name}.sum")
    turned = to_heads(graph, before, added, 3 * heads, found.head_dim, HEADS)
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
