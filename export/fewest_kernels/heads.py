"""Nodes around the heads of an attention."""

from __future__ import annotations

import numpy as np
from onnx import NodeProto

from export.bundle.fewest_kernels.attention import Weight
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
