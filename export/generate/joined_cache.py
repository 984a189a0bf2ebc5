"""The attention of a decoder's graph as TensorRT computes it in one kernel: over earlier and new tokens together.

The graph of :mod:`export.generate.decoder` computes their scores apart, so that ONNX Runtime never copies the cache.
TensorRT copies it even so, to pad the operands of its products, and recognises no attention. It does where keys and
values are concatenated first. For a single new token and as many heads of keys as of queries, its kernel even reads
both parts where they are. Nor does it recognise the attention of Gemma 2, for its tanh between scores and softmax; it
does when exponentials compute that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from onnx import ModelProto, NodeProto, numpy_helper
from onnx.helper import make_node
from onnxruntime.transformers.onnx_model import OnnxModel

from export.quantize.precision import checked, links, loaded


class _Part(NamedTuple):
    """The attention to earlier or to new tokens.

    Attributes:
        add: adds a mask [N, 1, T, S] to the scores [N, H, T, S].
        scores: input of ``add`` in the layout of the product, [N, G, H / G * T, S].
        tanh: between the product and the scores, as Gemma 2 has it.
        keys: transposes the keys, the second operand of the product.
        sum: the product of the weights and the values.
    """

    add: NodeProto
    scores: str
    tanh: NodeProto | None
    keys: NodeProto
    sum: NodeProto


def join_caches(model: bytes, heads_per_key: int) -> bytes:
    """Return a decoder's graph with one product for all scores, and one of weights and values, in each layer.

    Args:
        model: as :func:`export.generate.decoder.decoder_onnx` returns it.
        heads_per_key: H / G. These heads stay rows of one product, so that no key is repeated.
    """
    parsed = loaded(model)
    graph = parsed.graph
    made, readers = links(graph)
    masks: dict[tuple[str, str], str] = {}
    for softmax in [node for node in graph.node if node.op_type == "Softmax"]:
        halves = zip(made[softmax.input[0]].input, readers[softmax.output[0]], strict=True)
        earlier, new = (_part(made[masked], cut, made, readers) for masked, cut in halves)
        pair = earlier.add.input[1], new.add.input[1]
        if pair not in masks:
            masks[pair] = _mask(parsed, pair, heads_per_key)
        keys, values = f"{softmax.name}.keys", f"{softmax.name}.values"
        graph.node.append(make_node("Concat", [earlier.keys.input[0], new.keys.input[0]], [keys], keys, axis=2))
        graph.node.append(make_node("Concat", [earlier.sum.input[1], new.sum.input[1]], [values], values, axis=2))
        earlier.keys.input[0] = keys
        if earlier.tanh:
            _compute_by_exponential(parsed, earlier.tanh)
        earlier.add.input[:] = [earlier.scores, masks[pair]]
        softmax.input[0] = earlier.add.output[0]
        (total,) = readers[earlier.sum.output[0]]
        graph.node.remove(total)
        graph.node.append(make_node("MatMul", [softmax.output[0], values], [total.output[0]], total.name))
    # One token of each row: TensorRT runs this gather within the last normalisation.
    for gather in [node for node in graph.node if node.op_type == "GatherElements"]:
        (select,) = readers[gather.output[0]]
        last = made[made[gather.input[1]].input[0]].input[0]
        graph.node.remove(select)
        graph.node.append(make_node("GatherND", [gather.input[0], last], [select.output[0]], select.name, batch_dims=1))
    changed = OnnxModel(parsed)
    changed.prune_graph(allow_remove_graph_inputs=False)
    changed.topological_sort()
    return checked(parsed)


def _part(
    add: NodeProto, cut: NodeProto, made: Mapping[str, NodeProto], readers: Mapping[str, list[NodeProto]]
) -> _Part:
    scores = add.input[0]
    if made[scores].op_type == "Reshape":
        scores = made[scores].input[0]
    product = made[scores]
    tanh = None
    while product.op_type != "MatMul":
        tanh = product if product.op_type == "Tanh" else tanh
        product = made[product.input[0]]
    (following,) = readers[cut.output[0]]
    if following.op_type == "Reshape":
        (following,) = readers[following.output[0]]
    return _Part(add, scores, tanh, made[product.input[1]], following)


def _compute_by_exponential(model: ModelProto, tanh: NodeProto) -> None:
    """Replace tanh(x) by 1 - 2 / (1 + exp(2 x)), which has its limits even where the exponential is infinite.

    For a small x the difference cancels digits; :func:`keep_fp32` leaves enough of them.
    """
    graph, (x,), name = model.graph, tanh.input, tanh.name
    one, two = (numpy_helper.from_array(np.array(value, np.float32), f"{name}.{value}") for value in (1, 2))
    graph.initializer.extend([one, two])
    graph.node.remove(tanh)
    doubled, power, sum_, quotient = (f"{name}.{term}" for term in ("doubled", "power", "sum", "quotient"))
    for operator, inputs, output in (
        ("Mul", [x, two.name], doubled),
        ("Exp", [doubled], power),
        ("Add", [power, one.name], sum_),
        ("Div", [two.name, sum_], quotient),
        ("Sub", [one.name, quotient], tanh.output[0]),
    ):
        graph.node.append(make_node(operator, inputs, [output], f"{name}.{operator}"))


def _mask(model: ModelProto, parts: tuple[str, str], heads_per_key: int) -> str:
    """Return the name of the mask [N, 1, H / G * T, L + T], from those of earlier and of new tokens, [N, 1, T, ·]."""
    joined, rows = f"{parts[0]}.joined", f"{parts[0]}.rows"
    model.graph.node.append(make_node("Concat", parts, [joined], joined, axis=3))
    if heads_per_key == 1:
        return joined
    shape = numpy_helper.from_array(np.array([0, 1, -1, 0]), f"{rows}.shape")  # 0 keeps a dimension
    model.graph.initializer.append(shape)
    for node in (
        make_node("Concat", [joined] * heads_per_key, [f"{rows}.repeated"], f"{rows}.repeated", axis=1),
        make_node("Reshape", [f"{rows}.repeated", shape.name], [rows], rows),
    ):
        model.graph.node.append(node)
    return rows
