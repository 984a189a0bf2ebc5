"""The work of an ONNX graph for inputs of given shapes: its kernels, their operations and bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto
from onnx.reference import ReferenceEvaluator

from edge.errors import BundleError, Raw
from export.estimate.structure import PRODUCTS, RECURRENT, structure_of
from export.estimate.work import ITEM_BYTES, Kernel, Work
from export.quantize.nested import nested_nodes

#: At most the values of a constant from which a shape may follow.
_FEW_BYTES = 4096
#: Operators with products that are not counted.
_UNCOUNTED = {"Attention", "ConvInteger", "ConvTranspose", "DeformConv", "Einsum"}
_UNCOUNTED |= {"MatMulInteger", "QLinearConv", "QLinearMatMul"}
_MEASURE = "Measure this model on a board: fewheads bench."
_PRECISIONS = {TensorProto.FLOAT: "fp32", TensorProto.FLOAT16: "fp16"}


def work_of(model: bytes, shapes: Mapping[str, tuple[int, ...]], subject: str) -> Work:
    """Count the work of a run; see :class:`ModelWork`."""
    return ModelWork(model, subject).at(shapes)


class ModelWork:
    """The work of a model for inputs of several shapes.

    Args:
        model: the bytes of an ONNX file with standard operators.

    Raises:
        BundleError: an operator is not counted.
    """

    def __init__(self, model: bytes, subject: str) -> None:
        self._model, self._subject = onnx.load_from_string(model), subject
        graph = self._model.graph
        foreign = next((node.domain for node in graph.node if node.domain not in ("", "ai.onnx")), None)
        if foreign:
            given, expected = f"operators of {foreign}", "standard ONNX operators, as in files for TensorRT"
            fix = "Export the bundle with --artifacts tensorrt too."
            raise BundleError(subject, given=Raw(given), expected=expected, fix=fix)
        uncounted = next(
            (node.op_type for node in graph.node if node.op_type in _UNCOUNTED or _has_products(node)), None
        )
        if uncounted:
            given, expected = f"the operator {uncounted}", f"products by {', '.join(PRODUCTS)}"
            raise BundleError(subject, given=Raw(given), expected=expected, fix=_MEASURE)
        # The inference copies the model several times, and no shape follows from large weights.
        self._weights: dict[str, bytes] = {}
        for tensor in graph.initializer:
            if len(tensor.raw_data) > _FEW_BYTES:
                self._weights[tensor.name] = tensor.raw_data
                tensor.ClearField("raw_data")
        del graph.value_info[:]
        for value in graph.output:
            value.type.tensor_type.ClearField("shape")

    def at(self, shapes: Mapping[str, tuple[int, ...]]) -> Work:
        """Count the work of a run for inputs of these shapes.

        Raises:
            BundleError: a product's shape does not follow from the inputs' shapes.
        """
        graph = _Graph(self._inferred(shapes), self._subject)
        structure = structure_of(graph.nodes, graph.constants)
        kernels = [graph.product(nodes) for nodes in structure.products]
        kernels += [graph.attention(nodes) for nodes in structure.attentions]
        batch = next((shape[0] for shape in shapes.values() if len(shape) > 1), 1)
        return Work(tuple(kernels), structure.others, batch)

    def _inferred(self, shapes: Mapping[str, tuple[int, ...]]) -> ModelProto:
        """Return the model with inputs of fixed shapes, and the shapes that follow.

        Where the inference does not find the shape of a product, one run on zeros shows it.
        """
        for value in self._model.graph.input:
            if value.name in shapes:
                for dimension, size in zip(value.type.tensor_type.shape.dim, shapes[value.name], strict=True):
                    dimension.dim_value = size
        model = onnx.shape_inference.infer_shapes(self._model, data_prop=True)
        graph = model.graph
        fixed = {value.name for value in (*graph.input, *graph.value_info, *graph.output) if _is_fixed(value)}
        fixed |= {tensor.name for tensor in graph.initializer}
        if any(not {node.input[0], node.output[0]} <= fixed for node in graph.node if node.op_type in PRODUCTS):
            for tensor in graph.initializer:
                if tensor.name in self._weights:
                    tensor.raw_data = self._weights[tensor.name]
            _add_computed_shapes(model)
        return model


def _has_products(node: NodeProto) -> bool:
    """Return whether a node has graphs of its own with products: how often they run depends on the input."""
    return any(inner.op_type in {*PRODUCTS, *_UNCOUNTED} for inner in nested_nodes([node]))


def _is_fixed(value: ValueInfoProto) -> bool:
    kind = value.type.tensor_type
    return kind.HasField("shape") and all(dimension.HasField("dim_value") for dimension in kind.shape.dim)


def _add_computed_shapes(model: ModelProto) -> None:
    feeds = {
        value.name: np.zeros(
            [dimension.dim_value for dimension in value.type.tensor_type.shape.dim],
            onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type),
        )
        for value in model.graph.input
    }
    try:
        with np.errstate(all="ignore"):  # zeros may divide zeros
            arrays = ReferenceEvaluator(model).run(None, feeds, intermediate=True)
    except Exception:  # it raises whatever its operators do; what is missing is reported where it is needed
        return
    del model.graph.value_info[:]
    outputs = {value.name: value for value in model.graph.output}
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray | np.generic):  # an optional input that a node leaves out
            continue
        kind = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
        value = onnx.helper.make_tensor_value_info(name, kind, array.shape)
        if name in outputs:
            outputs[name].CopyFrom(value)
        else:
            model.graph.value_info.append(value)


class _Graph:
    def __init__(self, model: ModelProto, subject: str) -> None:
        graph = model.graph
        self.nodes = list(graph.node)
        self._subject = subject
        self.constants = {tensor.name: tensor for tensor in graph.initializer}
        self._makers = {name: node for node in self.nodes for name in node.output}
        self._types = {value.name: value.type.tensor_type for value in (*graph.input, *graph.value_info, *graph.output)}

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        if name in self.constants:
            return tuple(self.constants[name].dims)
        kind = self._types.get(name)
        sizes = [d.dim_value if d.HasField("dim_value") else 0 for d in kind.shape.dim] if kind else []
        if kind is None or not kind.HasField("shape") or 0 in sizes:
            given, expected = f"a tensor {name!r} of unknown shape", "shapes that follow from the inputs"
            raise BundleError(self._subject, given=Raw(given), expected=expected, fix=_MEASURE)
        return tuple(sizes)

    def operations(self, node: NodeProto) -> int:
        """Return the operations of a product, or of all products of a recurrent layer."""
        first = self.shape(node.input[0])
        if node.op_type in RECURRENT:  # the weights are [directions, gates * units, features], of inputs and of states
            features = sum(self.shape(weights)[-1] for weights in node.input[1:3])
            return 2 * prod(first[:2]) * prod(self.shape(node.input[1])[:2]) * features
        output = self.shape(node.output[0])
        if node.op_type == "Conv":
            return 2 * prod(output) * prod(self.shape(node.input[1])[1:])
        transposed = any(attribute.name == "transA" and attribute.i for attribute in node.attribute)
        return 2 * prod(output) * first[0 if transposed else -1]

    def precision(self, node: NodeProto) -> str:
        """Return the precision of a product: INT8 where both inputs come from DequantizeLinear."""
        makers = [self._makers.get(name) for name in node.input[:2]]
        if all(maker is not None and maker.op_type == "DequantizeLinear" for maker in makers):
            return "int8"
        name = node.input[0]
        self.shape(name)  # its error is that of a tensor of unknown type, too
        kind = self.constants[name].data_type if name in self.constants else self._types[name].elem_type
        return _PRECISIONS.get(kind, "fp32")

    def is_constant(self, name: str) -> bool:
        """Return whether a tensor is a weight, however it is scaled, cast or turned."""
        while name not in self.constants:
            maker = self._makers.get(name)
            if maker is None or maker.op_type not in ("DequantizeLinear", "QuantizeLinear", "Cast", "Transpose"):
                return maker is not None and maker.op_type == "Constant"
            name = maker.input[0]
        return True

    def product(self, nodes: Sequence[NodeProto]) -> Kernel:
        """Return the kernel of products that read the same tensor, or of one convolution or recurrent layer."""
        node, precision = nodes[0], self.precision(nodes[0])
        output, width = self.shape(node.output[0]), self.shape(node.input[1])
        channels = 1 if node.op_type == "Conv" else -1
        if node.op_type in RECURRENT:
            inner = width[-1]
        else:
            inner = prod(width[1:]) if node.op_type == "Conv" else self.shape(node.input[0])[-1]
        weights = [name for each in nodes for name in each.input[1:] if self.is_constant(name)]
        values = prod(self.shape(node.input[0])) + sum(prod(self.shape(each.output[0])) for each in nodes)
        if not weights:
            values += prod(width)
        return Kernel(
            "product",
            gflop=1e-9 * sum(map(self.operations, nodes)),
            precision=precision,
            rows=prod(output) // (1 if len(width) == 1 else output[channels]),
            inner=inner,
            convolution=node.op_type == "Conv",
            weight_bytes=sum(map(self._weight_bytes, weights)),
            activation_bytes=values * ITEM_BYTES[precision],
        )

    def attention(self, nodes: Sequence[NodeProto]) -> Kernel:
        """Return the kernel of a softmax and the products around it."""
        products = [node for node in nodes if node.op_type == "MatMul"]
        gflop = 1e-9 * sum(map(self.operations, products))
        inner = min(min(self.shape(node.output[0])[-1], self.shape(node.input[0])[-1]) for node in products)
        return Kernel("attention", gflop, self.precision(products[0]), inner=inner)

    def _weight_bytes(self, name: str) -> int:
        """Return the bytes of a weight as they are stored, before they are scaled, cast or turned."""
        while name not in self.constants:
            maker = self._makers[name]
            if maker.op_type == "Constant":
                return 0
            name = maker.input[0]
        tensor = self.constants[name]
        return int(prod(tensor.dims) * np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)).itemsize)
