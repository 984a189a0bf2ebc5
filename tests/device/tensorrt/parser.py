"""The ONNX parser: accepted models, error messages, and the layers of networks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper
from onnx.inliner import inline_local_functions

from .enums import DataType, Dims, ErrorCode, GatherMode, OnnxParserFlag
from .logger import Log, checked
from .network import INetworkDefinition, ITensor
from .versions import VERSION, Native, instance, integer

_DATA_TYPES = {
    TensorProto.FLOAT: DataType.FLOAT,
    TensorProto.FLOAT16: DataType.HALF,
    TensorProto.BFLOAT16: DataType.BF16,
    TensorProto.INT8: DataType.INT8,
    TensorProto.UINT8: DataType.UINT8,
    TensorProto.INT32: DataType.INT32,
    TensorProto.INT64: DataType.INT64,
    TensorProto.BOOL: DataType.BOOL,
}
#: The support matrices of TensorRT 10.3 name opset 20 as the newest; later parsers take 24.
_MAX_OPSET = 20 if VERSION < (10, 10) else 24

#: ONNX operator to the layer that computes it. Other operators are rejected.
_LAYERS = {
    operator: layer
    for layer, operators in {
        "ACTIVATION": "Relu Sigmoid Tanh LeakyRelu Elu Selu Softsign Softplus Clip HardSigmoid ThresholdedRelu Gelu",
        "CAST": "Cast CastLike",
        "CONCATENATION": "Concat",
        "CONSTANT": "Constant ConstantOfShape",
        "CONVOLUTION": "Conv",
        "CUMULATIVE": "CumSum",
        "DECONVOLUTION": "ConvTranspose",
        "DEQUANTIZE": "DequantizeLinear",
        "EINSUM": "Einsum",
        "ELEMENTWISE": "Add Sub Mul Div Pow Min Max Equal Greater Less And Or Xor Mod Sum Mean "
        "GreaterOrEqual LessOrEqual",
        "FILL": "Range Trilu EyeLike",
        "GATHER": "Gather GatherElements GatherND",
        "IDENTITY": "Identity Dropout",
        "MATRIX_MULTIPLY": "MatMul Gemm",
        "NORMALIZATION": "LayerNormalization InstanceNormalization GroupNormalization",
        "ONE_HOT": "OneHot",
        "PARAMETRIC_RELU": "PRelu",
        "POOLING": "MaxPool AveragePool GlobalAveragePool GlobalMaxPool",
        "QUANTIZE": "QuantizeLinear",
        "REDUCE": "ReduceMean ReduceSum ReduceMax ReduceMin ReduceProd ReduceL1 ReduceL2 ReduceSumSquare "
        "ReduceLogSum ReduceLogSumExp",
        "RESIZE": "Resize",
        "SCALE": "BatchNormalization",
        "SCATTER": "ScatterElements ScatterND",
        "SELECT": "Where",
        "SHAPE": "Shape Size",
        "SHUFFLE": "Reshape Transpose Flatten DepthToSpace SpaceToDepth",
        "SLICE": "Slice Split Expand Pad Tile",
        "SOFTMAX": "Softmax LogSoftmax Hardmax",
        "SQUEEZE": "Squeeze",
        "TOPK": "TopK ArgMax ArgMin",
        "UNARY": "Exp Log Sqrt Reciprocal Abs Neg Sin Cos Tan Sinh Cosh Asin Acos Atan Asinh Acosh Atanh "
        "Ceil Floor Erf Not Sign Round IsInf IsNaN",
        "UNSQUEEZE": "Unsqueeze",
        "CONDITIONAL_OUTPUT": "If",
    }.items()
    for operator in operators.split()
}
_GATHER_MODES = {"Gather": "DEFAULT", "GatherElements": "ELEMENT", "GatherND": "ND"}
_NOT_ELEMENTARY = {"MATRIX_MULTIPLY", "ELEMENTWISE", "SELECT"}


class ParserError(Native):
    """The reason why a model or a node is rejected."""

    def code(self) -> Any:
        return self._code

    def desc(self) -> str:
        return str(self._desc)

    def node(self) -> int:
        return int(self._node)

    def node_name(self) -> str:
        return str(self._node_name)

    def node_operator(self) -> str:
        return str(self._node_operator)


class _Refused(Exception):
    def __init__(self, code: Any, reason: str, function: str = "parseNode") -> None:
        super().__init__(reason)
        self.code, self.function = code, function
        self.node: onnx.NodeProto | None = None
        self.index = -1


class OnnxParser(Native):
    """Reads an ONNX model into a network."""

    def __init__(self, network: Any, logger: Any) -> None:
        self._network = instance(network, INetworkDefinition)
        self._log = Log(checked(logger))
        self._errors: list[Any] = []
        self._flags = 1 << int(OnnxParserFlag.NATIVE_INSTANCENORM)

    num_errors = property(lambda self: len(self._errors))

    def get_error(self, index: int) -> Any:
        if not 0 <= integer(index) < len(self._errors):
            raise IndexError(f"{index} is not an error of {len(self._errors)}")
        return self._errors[index]

    def parse(self, model: Any, path: str | None = None) -> bool:
        content = bytes(memoryview(model))
        try:
            try:
                loaded = onnx.load_model_from_string(content)
            except Exception:
                reason = "Assertion failed: model->ParseFromCodedStream(&codedInput): Failed to parse the ONNX model."
                self._log.plain_error(f"(deserializeOnnxModel): MODEL_DESERIALIZE_FAILED: {reason}")
                raise _Refused(ErrorCode.MODEL_DESERIALIZE_FAILED, reason, "deserializeOnnxModel") from None
            if loaded.HasField("graph"):  # no bytes are a valid model, which has no outputs
                _Import(self._network, loaded, self._log).run()
        except _Refused as refused:
            node, index = refused.node, refused.index
            if node is not None:
                self._log.plain_error(f'While parsing node number {index} [{node.op_type} -> "{node.output[0]}"]:')
            self._log.plain_error(f"In function {refused.function}:\n[{refused.code.value}] {refused}")
            self._errors.append(
                ParserError._make(
                    _code=refused.code,
                    _desc=str(refused),
                    _node=index,
                    _node_name=node.name if node else "",
                    _node_operator=node.op_type if node else "",
                )
            )
            return False
        self._network._model = content
        return True


class _Import:
    """The import of one model into a network."""

    def __init__(self, network: Any, model: onnx.ModelProto, log: Log) -> None:
        self.network, self.log = network, log
        self.model = inline_local_functions(model)
        self.tensors: dict[str, Any] = {}
        self.unused = {tensor.name: tensor for tensor in self.model.graph.initializer}
        self.constants = dict(self.unused)
        self.broadcasts = 0

    def run(self) -> None:
        for opset in self.model.opset_import:
            if opset.domain in ("", "ai.onnx") and opset.version > _MAX_OPSET:
                reason = f"Assertion failed: opset_import {opset.version} is newer than opset {_MAX_OPSET}."
                raise _Refused(ErrorCode.UNSUPPORTED_GRAPH, reason, "importModel")
        types = self._types()
        for value in self.model.graph.input:
            if value.name not in self.constants:
                self._add_input(value)
        self._nodes(self.model.graph, types)
        for value in self.model.graph.output:
            self._add_output(value.name)

    def _types(self) -> dict[str, onnx.TypeProto.Tensor]:
        try:
            inferred = onnx.shape_inference.infer_shapes(self.model, data_prop=True)
        except Exception as error:
            raise _Refused(ErrorCode.INVALID_GRAPH, f"Assertion failed: {error}", "importModel") from None
        return _graph_types(inferred.graph)

    def _nodes(self, graph: onnx.GraphProto, types: dict[str, onnx.TypeProto.Tensor]) -> None:
        node, index = None, -1
        try:
            for index, node in enumerate(graph.node):  # noqa: B007 - the refusal names the node at hand
                self._node(node, types)
        except _Refused as refused:
            if refused.node is None:
                refused.node, refused.index = node, index
            raise

    def _add_input(self, value: onnx.ValueInfoProto) -> None:
        kind = value.type.tensor_type
        tensor = _tensor(value.name, kind, "importInput")
        tensor._input = True
        tensor._dimension_names = tuple(dim.dim_param for dim in kind.shape.dim)
        if tensor.dtype == DataType.INT64:
            self.log.warning(f"Make sure input {value.name} has Int64 binding.")
        self.tensors[value.name] = tensor
        self.network._inputs.append(tensor)

    def _add_output(self, name: str) -> None:
        tensor = self._tensor_of(name)
        tensor._output = True
        if tensor.dtype == DataType.INT64:
            self.log.warning(f"Make sure output {name} has Int64 binding.")
        self.network._outputs.append(tensor)

    def _tensor_of(self, name: str) -> Any:
        """Return a tensor that was made before; an initializer becomes a constant layer when it is first used."""
        if name in self.unused:
            value = self.unused.pop(name)
            constant = _tensor(f"{name}_output", _constant_type(value), "importInitializer")
            constant._constant = value.data_type in (TensorProto.INT64, TensorProto.INT32)
            self.network._add("CONSTANT", name, [], [constant])
            self.tensors[name] = constant
        return self.tensors.get(name)

    def _node(self, node: onnx.NodeProto, types: dict[str, onnx.TypeProto.Tensor]) -> None:
        if node.domain not in ("", "ai.onnx"):
            reason = 'creator && "Plugin not found, are the plugin name, version, and namespace correct?"'
            raise _Refused(ErrorCode.INVALID_NODE, reason, "checkFallbackPluginImporter")
        if node.op_type not in _LAYERS:
            raise _Refused(ErrorCode.UNSUPPORTED_NODE, "false", f"check{node.op_type}")
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            self._check_zero_point(node)
        kind, name = _LAYERS[node.op_type], node.name or f"node_of_{node.output[0]}"
        inputs = [self._tensor_of(each) if each else None for each in node.input]
        if kind in _NOT_ELEMENTARY:
            inputs = self._broadcast(inputs)
        outputs = [_tensor(each, types[each], "parseNode") for each in node.output if each and each in types]
        if len(outputs) != len([each for each in node.output if each]):
            raise _Refused(ErrorCode.UNSUPPORTED_NODE_SHAPE, "Assertion failed: the rank of an output is not known")
        self.tensors.update({tensor.name: tensor for tensor in outputs})
        if node.op_type == "If":
            self._branches(node, name, inputs[0], outputs)
        elif node.op_type == "Gemm" and len(inputs) == 3:
            product = ITensor._make(_name=f"{name}_output", _dtype=outputs[0].dtype, _shape=outputs[0].shape)
            self.network._add(kind, name, inputs[:2], [product])
            self.network._add("ELEMENTWISE", f"{name}_0", [product, inputs[2]], outputs)
        elif kind == "SOFTMAX":
            softmax = ITensor._make(_name=f"{name}_output", _dtype=outputs[0].dtype, _shape=outputs[0].shape)
            self.network._add(kind, name, inputs, [softmax])
            self.network._add("SHUFFLE", f"ONNXTRT_ShapeShuffle_{name}", [softmax], outputs)
        elif kind == "SHAPE":
            self.network._add(kind, name, inputs, outputs)
            outputs[0]._constant = True
        elif kind == "GATHER":
            layer = self.network._add(kind, name, inputs, outputs, node.op_type)
            axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 0)
            layer._axis = axis % len(inputs[0].shape)
            layer._mode = GatherMode[_GATHER_MODES[node.op_type]]
        else:
            self.network._add(kind, name, inputs, outputs, node.op_type)

    def _broadcast(self, inputs: list[Any]) -> list[Any]:
        """Give all inputs the same rank, each with a layer of its own, as the operations of TensorRT need it."""
        rank = max(len(tensor.shape) for tensor in inputs)
        found = []
        for tensor in inputs:
            if len(tensor.shape) < rank:
                suffix = f"_{self.broadcasts}" if self.broadcasts else ""
                self.broadcasts += 1
                shape = Dims((*[1] * (rank - len(tensor.shape)), *tensor.shape))
                name = f"ONNXTRT_Broadcast{suffix}"
                wider = ITensor._make(_name=f"{name}_output", _dtype=tensor.dtype, _shape=shape)
                self.network._add("SHUFFLE", name, [tensor], [wider])
                tensor = wider
            found.append(tensor)
        return found

    def _check_zero_point(self, node: onnx.NodeProto) -> None:
        if len(node.input) < 3 or not node.input[2]:
            return
        zero_point = self.constants.get(node.input[2])
        if zero_point is None:
            raise _Refused(ErrorCode.UNSUPPORTED_NODE, "false", f"check{node.op_type}")
        if zero_point.data_type == TensorProto.UINT8:
            self.log.warning(
                "TensorRT supports QuantizeLinear/DequantizeLinear with UINT8 zero_point only on DLA. "
                "Defaulting to INT8 instead."
            )
        if np.any(numpy_helper.to_array(zero_point)):
            reason = "Assertion failed: shiftIsAllZeros(zeroPoint): Non-zero zero point is not supported."
            raise _Refused(ErrorCode.INVALID_NODE, reason, "buildZeroPointTensor")

    def _branches(self, node: onnx.NodeProto, name: str, condition: Any, outputs: list[Any]) -> None:
        self.network._add("CONDITION", f"{name}_condition", [condition], [])
        ends = []
        for attribute in node.attribute:
            graph = attribute.g
            self.unused |= {tensor.name: tensor for tensor in graph.initializer}
            self.constants |= {tensor.name: tensor for tensor in graph.initializer}
            self._nodes(graph, _graph_types(graph))
            ends.append([self._tensor_of(value.name) for value in graph.output])
        for first, second in zip(*ends, strict=True):
            fits = len(first.shape) == len(second.shape)
            if VERSION < (10, 10):
                fits = tuple(first.shape) == tuple(second.shape)
            if not fits:
                reason = (
                    f"{name}_OutputLayer: IIfConditionalOutputLayer inputs must have the same shape. "
                    f"Shapes are {list(first.shape)} and {list(second.shape)}."
                )
                raise _Refused(ErrorCode.INVALID_NODE, reason, "importIf")
        for first, second, output in zip(*ends, outputs, strict=True):
            self.network._add("CONDITIONAL_OUTPUT", f"{name}_OutputLayer", [first, second], [output])


def _graph_types(graph: onnx.GraphProto) -> dict[str, onnx.TypeProto.Tensor]:
    return {value.name: value.type.tensor_type for value in _values(graph) if value.type.HasField("tensor_type")}


def _values(graph: onnx.GraphProto) -> Iterator[onnx.ValueInfoProto]:
    yield from graph.input
    yield from graph.value_info
    yield from graph.output
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from _values(attribute.g)


def _constant_type(value: TensorProto) -> onnx.TypeProto.Tensor:
    kind = onnx.TypeProto.Tensor(elem_type=value.data_type)
    kind.shape.SetInParent()
    for size in value.dims:
        kind.shape.dim.add().dim_value = size
    return kind


def _tensor(name: str, kind: onnx.TypeProto.Tensor, function: str) -> Any:
    if kind.elem_type not in _DATA_TYPES:
        reason = (
            'Assertion failed: convertDtype(onnxDtype.elem_type(), &trtDtype) && "Failed to convert ONNX date type to '
            'TensorRT data type."'
        )
        raise _Refused(ErrorCode.UNSUPPORTED_NODE, reason, function)
    if not kind.HasField("shape"):
        raise _Refused(ErrorCode.UNSUPPORTED_NODE_SHAPE, f"Assertion failed: the rank of {name} is not known", function)
    shape = Dims(dim.dim_value if dim.HasField("dim_value") else -1 for dim in kind.shape.dim)
    return ITensor._make(_name=name, _dtype=_DATA_TYPES[kind.elem_type], _shape=shape)
