"""The inputs of a TensorRT network whose values index a table, such as token ids an embedding."""

from __future__ import annotations

from typing import Any

#: Layers after which the values of a tensor are still those of an input.
_KEEPING = {"CAST", "IDENTITY", "SHUFFLE", "SQUEEZE", "UNSQUEEZE"}


def index_limits(trt: Any, network: Any) -> dict[str, int]:
    """Return the smallest size of an axis that each input of a parsed network indexes, by the input's name.

    TensorRT takes indices from 0 to below the size (NVIDIA's operator reference, Gather), so not the negative ones of
    ONNX, and checks none: one outside gives zeros (NVIDIA/TensorRT#4774) or reads other memory. Indices that the
    network computes, those into an axis without a fixed size, and those of GatherND have no limit here.
    """
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    producers = {layer.get_output(index).name: layer for layer in layers for index in range(layer.num_outputs)}
    limits: dict[str, int] = {}
    for layer in layers:
        if layer.type != trt.LayerType.GATHER:
            continue
        data, indices = layer.get_input(0), layer.get_input(1)
        while (producer := producers.get(indices.name)) and producer.type.name in _KEEPING:
            indices = producer.get_input(0)
        size = _axis_size(trt, layer, data.shape)
        if indices.is_network_input and size >= 0:
            limits[indices.name] = min(size, limits.get(indices.name, size))
    return limits


def _axis_size(trt: Any, gather: Any, shape: Any) -> int:
    """Return the size of the axis that a layer indexes; -1 where it is not known, or there are several."""
    gather.__class__ = trt.IGatherLayer  # a network returns its layers as ILayer
    return -1 if gather.mode == trt.GatherMode.ND else int(shape[gather.axis])
