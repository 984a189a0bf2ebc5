"""Queries, keys and values without copies between their product and attention."""

from __future__ import annotations

import numpy as np
from onnx.helper import make_node

from export.bundle.fewest_kernels.attention import HEADS, Attention, Weight, weight_of
from export.bundle.fewest_kernels.graph import Graph
from export.bundle.fewest_kernels.projections import remove_biases, set_weight, to_heads


def rewrite(graph: Graph, found: Attention) -> bool:
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


def _join(graph: Graph, found: Attention) -> None:
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
