"""Encoders in the form that TensorRT runs with the fewest kernels; KERNELS.md counts them.

TensorRT computes queries, keys and values in one product, and attention in one kernel. Between the two it copies them,
unless they have no bias; in INT8 one copy remains, which also applies the scales. So, in FP16:

- Keys have no bias. It adds the same to all logits of a query, and a softmax does not see that.
- The values' bias moves into that of the output projection, because the attention weights of a query sum to one.
- The queries' bias moves into weights. For every token x of a layer normalisation with factors g and shifts b,
  sum((x - b) / g) = 0. So there is a vector u with x @ u = 1, and W + outer(u, bias) gives what W and the bias gave.
  The tokens are shifted by a multiple of g before, or u could be large; weights and output projection take it back.

In INT8 one product with one bias makes all three. A single head gets a second one of zeros in both, because TensorRT
does not fuse the attention of one. All of that is exact but for rounding, which :mod:`.projections` limits.
:mod:`.tokens` orders the tokens so that nothing around the layers is copied.
"""

from __future__ import annotations

import onnx

from export.bundle.fewest_kernels.attention import attention_of
from export.bundle.fewest_kernels.graph import Graph
from export.bundle.fewest_kernels.projections import rewrite
from export.bundle.fewest_kernels.tokens import order_by_position
from export.quantize.nested import nested_nodes
from export.quantize.precision import checked

#: From here on Split, Squeeze, Unsqueeze and ReduceSum take sizes and axes as inputs, and DequantizeLinear has an axis.
_LEAST_OPSET = 13


def fewest_kernels(model: bytes) -> bytes:
    """Return a model for TensorRT that computes the same with fewer kernels.

    Args:
        model: in FP32, or with QuantizeLinear and DequantizeLinear before its products. Only self-attention with one
            projection each for queries, keys and values of tokens [N, T, d] changes, and what surrounds it. Below
            opset 13, and in a model with branches, nothing does.
    """
    parsed = onnx.load_from_string(model)
    if any(one.version < _LEAST_OPSET for one in parsed.opset_import if one.domain in ("", "ai.onnx")):
        return model
    if next(nested_nodes(parsed.graph.node), None) is not None:
        return model
    graph = Graph(parsed)
    merged = []
    softmaxes = [node for node in graph.nodes if node.op_type == "Softmax"]
    for softmax in softmaxes:
        found = attention_of(graph, softmax)
        if found is not None and rewrite(graph, found):
            merged.append(found.merged)
            graph.index()
    graph.sweep()
    if merged and len(merged) == len(softmaxes):
        order_by_position(graph, merged)
    graph.finish()
    return checked(parsed)
