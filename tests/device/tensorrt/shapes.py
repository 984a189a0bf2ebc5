"""Shapes and sizes of a model's tensors once the shapes of its inputs are known."""

from __future__ import annotations

import math
from collections.abc import Mapping

import onnx
from onnx import TensorProto

_ALIGNMENT = 512


def tensor_shapes(model: onnx.ModelProto, inputs: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors that shape inference finds when the inputs have these shapes."""
    return {name: shape for name, (shape, _) in _inferred(model, inputs).items()}


def activation_bytes(model: onnx.ModelProto, inputs: Mapping[str, tuple[int, ...]]) -> int:
    """Return how much memory a run takes between inputs and outputs: its two largest tensors, which is a guess."""
    ends = {value.name for value in (*model.graph.input, *model.graph.output)}
    sizes = sorted(size for name, (_, size) in _inferred(model, inputs).items() if name not in ends)
    return -(-sum(sizes[-2:]) // _ALIGNMENT) * _ALIGNMENT


def weights_bytes(model: onnx.ModelProto) -> int:
    """Return the size of a model's initializers."""
    return sum(_size(tensor.data_type, tuple(tensor.dims)) for tensor in model.graph.initializer)


def _inferred(model: onnx.ModelProto, inputs: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[tuple[int, ...], int]]:
    fixed = onnx.ModelProto()
    fixed.CopyFrom(model)
    del fixed.graph.value_info[:]
    for value in fixed.graph.input:
        if value.name in inputs:
            for dim, size in zip(value.type.tensor_type.shape.dim, inputs[value.name], strict=True):
                dim.dim_value = size
    for value in fixed.graph.output:
        value.type.tensor_type.ClearField("shape")
    found = {}
    graph = onnx.shape_inference.infer_shapes(fixed, data_prop=True).graph
    for value in (*graph.input, *graph.value_info, *graph.output):
        kind = value.type.tensor_type
        if kind.HasField("shape") and all(dim.HasField("dim_value") for dim in kind.shape.dim):
            shape = tuple(dim.dim_value for dim in kind.shape.dim)
            found[value.name] = (shape, _size(kind.elem_type, shape))
    return found


def _size(elem_type: int, shape: tuple[int, ...]) -> int:
    if elem_type == TensorProto.STRING:
        return 0
    return math.prod(shape, start=onnx.helper.tensor_dtype_to_np_dtype(elem_type).itemsize)
