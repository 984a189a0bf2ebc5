"""Matrix products with weights, which are what INT8 computes."""

from __future__ import annotations

from typing import NamedTuple

from onnx import ModelProto, NodeProto


class Projection(NamedTuple):
    """A matrix product with weights.

    Attributes:
        name: of the torch module, which is that of its bias; without a bias, of the node.
    """

    name: str
    node: NodeProto


def projections(model: ModelProto, has_head: bool) -> list[Projection]:
    """Return the products with weights in the order of computation; of a model with a head, up to the last norm."""
    weights = {initializer.name for initializer in model.graph.initializer}
    nodes = list(model.graph.node)
    norms = [index for index, node in enumerate(nodes) if node.op_type == "LayerNormalization"]
    last = max(norms) if has_head else len(nodes)
    biases = {
        node.input[0]: node.input[1].removesuffix(".bias")
        for node in nodes
        if node.op_type == "Add" and node.input[1] in weights and node.input[1].endswith(".bias")
    }
    return [
        Projection(biases.get(node.output[0], node.name), node)
        for node in nodes[:last]
        if node.op_type == "MatMul" and node.input[1] in weights
    ]
