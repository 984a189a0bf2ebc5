"""Matrix products with weights, which are what INT8 computes."""

from __future__ import annotations

from onnx import ModelProto, NodeProto


def projections(model: ModelProto, has_head: bool) -> list[NodeProto]:
    """Return the products with weights in the order of computation; of a model with a head, up to the last norm.

    Their names are those of the torch modules: see :func:`export.models.convert.to_onnx`.
    """
    weights = {initializer.name for initializer in model.graph.initializer}
    nodes = list(model.graph.node)
    norms = [index for index, node in enumerate(nodes) if node.op_type == "LayerNormalization"]
    last = max(norms) if has_head else len(nodes)
    return [node for node in nodes[:last] if node.op_type == "MatMul" and node.input[1] in weights]
