"""The attention blocks of a TensorRT network, and why one was not fused into a single kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

#: Head dimensions that fused FP16 attention allows (NVIDIA/TensorRT#2981).
MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256


class Attention(msgspec.Struct, frozen=True):
    """A softmax between two matrix products.

    Attributes:
        datatype: of the first product, as TensorRT calls it: ``HALF``, ``FLOAT``.
        query_dim: features of a query and a key in one head; -1 where the network does not fix it.
        value_dim: features of a value in one head; -1 likewise.
    """

    datatype: str
    query_dim: int
    value_dim: int


def attention_blocks(trt: Any, network: Any) -> list[Attention]:
    """Return the attention blocks of a parsed network, in its order."""
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    producers = {name: layer for layer in layers for name in _outputs(layer)}
    consumers: dict[str, list[Any]] = {}
    for layer in layers:
        for name in _inputs(layer):
            consumers.setdefault(name, []).append(layer)

    def before(layer: Any) -> list[Any]:
        return [producers[name] for name in _inputs(layer) if name in producers]

    def after(layer: Any) -> list[Any]:
        return [consumer for name in _outputs(layer) for consumer in consumers.get(name, [])]

    blocks = []
    for softmax in (layer for layer in layers if layer.type == trt.LayerType.SOFTMAX):
        scores, heads = _nearest_product(trt, softmax, before), _nearest_product(trt, softmax, after)
        if scores and heads:
            query = scores.get_input(0)
            blocks.append(Attention(query.dtype.name, int(query.shape[-1]), int(heads.get_output(0).shape[-1])))
    return blocks


def describe(blocks: list[Attention], fused: bool) -> str:
    """Describe how many blocks there are, whether they were fused, and why not where the rules explain it.

    ``fused`` means that at least one was: an engine's bytes do not show which.
    """
    if not blocks:
        return "no attention"
    count = f"{len(blocks)} block{'s' if len(blocks) > 1 else ''}"
    obstacles = sorted({obstacle for block in blocks if (obstacle := _obstacle(block))})
    state = "not fused" if not fused else "fused in part" if obstacles else "fused"
    return f"{count}, {state}" + (f": {'; '.join(obstacles)}" if obstacles else "")


def unexplained(blocks: list[Attention], fused: bool) -> str:
    """Return a warning where the rules allow fused attention and the engine has none; empty otherwise."""
    free = [block for block in blocks if not _obstacle(block)]
    allowed = sorted({f"head dimension {block.query_dim} in {block.datatype}" for block in free})
    if fused or not allowed:
        return ""
    return (
        f"attention is not fused although {' and '.join(allowed)} allows it, so the engine is slower than it could be; "
        "build it again with --replace and more --workspace-mib, or export heads of 16, 32 or 64 features"
    )


def _obstacle(block: Attention) -> str | None:
    if block.datatype == "FLOAT":
        return "FP32, and fusion needs FP16"
    if -1 in (block.query_dim, block.value_dim):
        return None
    if block.query_dim != block.value_dim:
        return f"head dimension {block.query_dim} of queries and {block.value_dim} of values differ"
    if block.query_dim < MIN_HEAD_DIM:
        return f"head dimension {block.query_dim} is below {MIN_HEAD_DIM}"
    if block.query_dim > MAX_HEAD_DIM:
        return f"head dimension {block.query_dim} is above {MAX_HEAD_DIM}"
    return None


def _nearest_product(trt: Any, start: Any, neighbours: Callable[[Any], list[Any]]) -> Any | None:
    """Return the first matrix product from ``start`` on, through layers that only scale, mask, cast or reshape."""
    kinds = trt.LayerType
    passed = {kinds.ELEMENTWISE, kinds.SHUFFLE, kinds.CAST, kinds.SELECT}
    queue, seen = neighbours(start), set()
    while queue:
        layer = queue.pop(0)
        if layer.type == kinds.MATRIX_MULTIPLY:
            return layer
        if layer.type in passed and layer.name not in seen:
            seen.add(layer.name)
            queue += neighbours(layer)
    return None


def _inputs(layer: Any) -> list[str]:
    # An optional input that is not used is None.
    tensors = (layer.get_input(index) for index in range(layer.num_inputs))
    return [tensor.name for tensor in tensors if tensor is not None]


def _outputs(layer: Any) -> list[str]:
    return [layer.get_output(index).name for index in range(layer.num_outputs)]
