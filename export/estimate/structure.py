"""The kernels of an ONNX graph by its structure, without building an engine.

- Products with weights that read the same tensor, such as queries, keys and values, are one kernel.
- A softmax is one kernel with the products before and behind it.
- A sum of normalised tokens is one kernel, and what follows it another.
- The connected operators between those are one kernel. They need none where they only reshape or transpose what those
  wrote, or where they are elementwise and follow a product in floating point or a convolution.

So does TensorRT-RTX fuse the graphs that ``fewheads export`` writes. TensorRT 10.3 on an Orin may fuse differently: it
lists 7.4 kernels for a layer of ViT-B/16 in FP16 as PyTorch exports it, where TensorRT-RTX lists ten.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from onnx import NodeProto, TensorProto, numpy_helper

RECURRENT = ("RNN", "GRU", "LSTM")
PRODUCTS = ("MatMul", "Gemm", "Conv", *RECURRENT)
#: They change how a tensor is described, not the memory behind it, or are computed on the host.
_RESHAPES = {"Cast", "Identity", "Reshape", "Shape", "Squeeze", "Unsqueeze", "Flatten"}
_TRANSPOSES = {*_RESHAPES, "Transpose"}
_QUANTIZES = {"QuantizeLinear", "DequantizeLinear"}
_ELEMENTWISE = {*_RESHAPES, "Add", "Sub", "Mul", "Div", "Pow", "Sqrt", "Exp", "Neg", "Abs", "Max", "Min", "Clip"}
_ELEMENTWISE |= {"Where", "Erf", "Tanh", "Sigmoid", "Relu", "LeakyRelu", "Gelu", "HardSigmoid", "HardSwish", "Elu"}


class Structure(NamedTuple):
    """The kernels of a graph.

    Attributes:
        products: the nodes of each kernel.
        attentions: the softmax and the products of each.
        others: the number of all other kernels.
    """

    products: list[list[NodeProto]]
    attentions: list[list[NodeProto]]
    others: int


class _Tensor(NamedTuple):
    depth: int  # products and softmaxes on the longest way to it
    group: int  # of the nodes between products that make it; -1 where a product, a softmax or nobody does
    maker: int  # the product or softmax that makes it; -1 elsewhere


def structure_of(nodes: Sequence[NodeProto], constants: Mapping[str, TensorProto]) -> Structure:
    """Return the kernels of nodes in the order of a run.

    Args:
        constants: the weights by name.
    """
    fixed = set(constants)
    tensors: dict[str, _Tensor] = {}
    groups: list[list[int]] = []  # the places of each group's nodes; empty if it was joined with another
    reads: dict[int, set[int]] = {}  # products and softmaxes: those from which they read, directly or through a group
    sums: dict[int, int] = {}  # of tokens: the group of each
    sources: list[set[int]] = []  # of each group: the products and softmaxes that it reads
    for index, node in enumerate(nodes):
        if fixed.issuperset(filter(None, node.input)):
            fixed.update(node.output)
            continue
        inputs = [tensors[name] for name in node.input if name in tensors]
        depth = max((tensor.depth for tensor in inputs), default=0)
        read = {tensor.maker for tensor in inputs if tensor.maker >= 0}
        is_sum = _sums_tokens(node, constants) and "LayerNormalization" in {
            nodes[each].op_type for tensor in inputs if tensor.group >= 0 for each in groups[tensor.group]
        }
        if is_sum:
            sums[index] = max(tensor.group for tensor in inputs)
        if is_sum or node.op_type in (*PRODUCTS, "Softmax"):
            reads[index] = read.union(*(sources[tensor.group] for tensor in inputs if tensor.group >= 0))
            tensors.update(dict.fromkeys(node.output, _Tensor(depth + 1, -1, index)))
        else:
            same = sorted({tensor.group for tensor in inputs if tensor.group >= 0 and tensor.depth == depth})
            made = _Tensor(depth, len(groups), -1)
            groups.append([index, *(each for group in same for each in groups[group])])
            sources.append(read.union(*(sources[group] for group in same)))
            tensors.update(dict.fromkeys((name for each in groups[-1] for name in nodes[each].output), made))
            for group in same:
                groups[group] = []
    softmaxes = [index for index in reads if nodes[index].op_type == "Softmax"]
    weightless = {index for index in reads if nodes[index].op_type == "MatMul" and fixed.isdisjoint(nodes[index].input)}
    attentions = [
        [*(reads[index] & weightless), index, *(each for each in weightless if index in reads[each])]
        for index in softmaxes
    ]
    attentions = [each for each in attentions if len(each) > 1]
    within = {index for each in attentions for index in each}
    last = within.difference(*(reads[index] for index in within))
    products: dict[object, list[NodeProto]] = {}
    for index in reads:
        node = nodes[index]
        if index not in within and index not in sums and node.op_type != "Softmax":
            shared = node.op_type in ("MatMul", "Gemm") and node.input[1] in fixed
            products.setdefault(node.input[0] if shared else index, []).append(node)
    others = len(set(sums.values())) + sum(index not in within for index in softmaxes)
    makers = {name: node.op_type for node in nodes for name in node.output}
    quantised = {index for index in reads if makers.get(nodes[index].input[0]) == "DequantizeLinear"}
    convolutions = {index for index in reads if nodes[index].op_type == "Conv"}
    for members, read in zip(groups, sources, strict=True):
        operators = {nodes[index].op_type for index in members}
        others += not (
            operators <= _RESHAPES
            or read & (within - last)
            or (read and operators <= _TRANSPOSES)
            or (read and operators <= _ELEMENTWISE and not read & (sums.keys() | quantised - convolutions))
            or (read and operators <= _ELEMENTWISE | _QUANTIZES and read <= convolutions)
        )
    return Structure(list(products.values()), [[nodes[index] for index in each] for each in attentions], others)


def _sums_tokens(node: NodeProto, constants: Mapping[str, TensorProto]) -> bool:
    """Return whether a node sums over tokens, the first or second dimension, and drops it, as a mean of states does."""
    if node.op_type != "ReduceSum" or len(node.input) < 2 or node.input[1] not in constants:
        return False
    kept = next((attribute.i for attribute in node.attribute if attribute.name == "keepdims"), 1)
    return not kept and numpy_helper.to_array(constants[node.input[1]]).tolist() in ([0], [1])
