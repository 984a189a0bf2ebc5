"""Inspection of a parsed TensorRT network: attention blocks, and inputs that index tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

#: Head dimensions that fused FP16 attention supports (NVIDIA/TensorRT#2981).
MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256
#: Layers that do not change the values of a tensor.
_PRESERVING = {"CAST", "IDENTITY", "SHUFFLE", "SQUEEZE", "UNSQUEEZE"}


class Attention(msgspec.Struct, frozen=True):
    """A softmax between two matrix products."""

    datatype: str  # of the first product, in TensorRT's terms: HALF, FLOAT
    query_dim: int  # features of a query and of a key in one head; -1 if dynamic
    value_dim: int  # features of a value in one head; -1 if dynamic

    @property
    def obstacle(self) -> str | None:
        """Why TensorRT cannot fuse it; None if no known rule forbids it."""
        if self.datatype == "FLOAT":
            return "FP32, and fusion needs FP16"
        if -1 in (self.query_dim, self.value_dim):
            return None
        if self.query_dim != self.value_dim:
            return f"head dimension {self.query_dim} of queries and {self.value_dim} of values differ"
        if self.query_dim < MIN_HEAD_DIM:
            return f"head dimension {self.query_dim} is below {MIN_HEAD_DIM}"
        if self.query_dim > MAX_HEAD_DIM:
            return f"head dimension {self.query_dim} is above {MAX_HEAD_DIM}"
        return None


def attention_blocks(trt: Any, network: Any) -> list[Attention]:
    """Return the attention blocks of a network, in its order."""
    layers = _layers(network)
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
    """Describe the number of blocks, whether they were fused, and the known obstacles.

    ``fused`` means that at least one was: the bytes of an engine do not show which.
    """
    if not blocks:
        return "no attention"
    count = f"{len(blocks)} block{'s' if len(blocks) > 1 else ''}"
    obstacles = sorted({block.obstacle for block in blocks if block.obstacle})
    state = "not fused" if not fused else "fused in part" if obstacles else "fused"
    return f"{count}, {state}" + (f": {'; '.join(obstacles)}" if obstacles else "")


def unexplained(blocks: list[Attention], fused: bool) -> str:
    """Return a warning if no rule forbids fused attention and the engine has none; empty otherwise."""
    free = [block for block in blocks if not block.obstacle]
    allowed = sorted({f"head dimension {block.query_dim} in {block.datatype}" for block in free})
    if fused or not allowed:
        return ""
    return (
        f"attention is not fused although {' and '.join(allowed)} allows it, so the engine is slower than it could be; "
        "build it again with --replace and more --workspace-mib, or export heads of 16, 32 or 64 features"
    )


def index_limits(trt: Any, network: Any) -> dict[str, int]:
    """Return, for each input whose values index an axis (such as token ids an embedding), the smallest axis size.

    TensorRT accepts indices from 0 to size - 1 (NVIDIA's operator reference, Gather), so not the negative ones of
    ONNX, and checks none: an index outside gives zeros (NVIDIA/TensorRT#4774) or reads other memory. Indices that the
    network computes, indices into a dynamic axis, and those of GatherND have no limit here.
    """
    layers = _layers(network)
    producers = {name: layer for layer in layers for name in _outputs(layer)}
    limits: dict[str, int] = {}
    for layer in layers:
        if layer.type != trt.LayerType.GATHER:
            continue
        data, indices = layer.get_input(0), layer.get_input(1)
        while (producer := producers.get(indices.name)) and producer.type.name in _PRESERVING:
            indices = producer.get_input(0)
        size = _axis_size(trt, layer, data.shape)
        if indices.is_network_input and size >= 0:
            limits[indices.name] = min(size, limits.get(indices.name, size))
    return limits


def _axis_size(trt: Any, gather: Any, shape: Any) -> int:
    """Return the size of the axis that a layer indexes; -1 if it is dynamic, or if there are several."""
    gather.__class__ = trt.IGatherLayer  # a network returns its layers as ILayer
    return -1 if gather.mode == trt.GatherMode.ND else int(shape[gather.axis])


def _nearest_product(trt: Any, start: Any, neighbours: Callable[[Any], list[Any]]) -> Any | None:
    """Return the first matrix product after ``start``, past layers that only scale, mask, cast or reshape."""
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


def _layers(network: Any) -> list[Any]:
    return [network.get_layer(index) for index in range(network.num_layers)]


def _inputs(layer: Any) -> list[str]:
    # An optional input that is not used is None.
    tensors = (layer.get_input(index) for index in range(layer.num_inputs))
    return [tensor.name for tensor in tensors if tensor is not None]


def _outputs(layer: Any) -> list[str]:
    return [layer.get_output(index).name for index in range(layer.num_outputs)]
