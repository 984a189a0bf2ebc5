"""Networks, and the parser that fills them: models that TensorRT rejects are beyond this double, and raise an error."""

import onnx
from onnx import TensorProto
from onnx.inliner import inline_local_functions

from .native import (
    VERSION,
    DataType,
    Dims,
    GatherMode,
    LayerType,
    Log,
    Native,
    NetworkDefinitionCreationFlag,
    checked,
    instance,
    integer,
    setting,
)


class ITensor(Native):
    """A tensor of a network; -1 stands for a dimension that is known at run time only."""

    name = setting("")
    dtype = setting(DataType.FLOAT) if VERSION < (11,) else property(lambda self: self._dtype)
    shape = setting(Dims())
    is_network_input = property(lambda self: self._input)
    _input = _output = _constant = False
    _dimension_names: tuple[str, ...] = ()

    def get_dimension_name(self, index):
        return self._dimension_names[integer(index)] or None if index < len(self._dimension_names) else None


class ILayer(Native):
    name = setting("")
    type = property(lambda self: self._type)
    num_inputs = property(lambda self: len(self._inputs))
    num_outputs = property(lambda self: len(self._outputs))

    def get_input(self, index):
        return self._inputs[index]

    def get_output(self, index):
        return self._outputs[index]


class IGatherLayer(ILayer):
    """A layer that reads a table. A network returns it as :class:`ILayer`, until its class is set to this one."""

    axis = setting(0)
    mode = setting(GatherMode.DEFAULT)


class INetworkDefinition(Native):
    name = setting("Unnamed Network 0")
    num_layers = property(lambda self: len(self._layers))
    num_inputs = property(lambda self: len(self._inputs))
    num_outputs = property(lambda self: len(self._outputs))

    def get_flag(self, flag):
        return bool(self._flags >> int(flag) & 1)

    def get_layer(self, index):
        return self._layers[index]

    def get_input(self, index):
        return self._inputs[index]

    def get_output(self, index):
        return self._outputs[index]

    @property
    def _strongly_typed(self):
        # The only typing of TensorRT 11, whose network has no weakly typed kind.
        return not hasattr(NetworkDefinitionCreationFlag, "EXPLICIT_BATCH") or self.get_flag(
            NetworkDefinitionCreationFlag.STRONGLY_TYPED
        )

    def _add(self, kind, name, inputs, outputs, operator=""):
        # TensorRT 10.3 reshapes where later versions have layers of their own.
        found = getattr(LayerType, kind, LayerType.SHUFFLE)
        layer = ILayer._make(_name=name, _type=found, _inputs=inputs, _outputs=outputs, _operator=operator)
        self._layers.append(layer)
        return layer


def new_network(log, flags):
    return INetworkDefinition._make(_log=log, _flags=flags, _layers=[], _inputs=[], _outputs=[], _model=None)


_DATA_TYPES = {
    getattr(TensorProto, name): DataType[name] for name in ("FLOAT", "INT8", "UINT8", "INT32", "INT64", "BOOL")
}
_DATA_TYPES |= {TensorProto.FLOAT16: DataType.HALF, TensorProto.BFLOAT16: DataType.BF16}
#: Layers, each with the operators of ONNX that it computes.
_TABLE = """ACTIVATION Relu; CAST Cast; DEQUANTIZE DequantizeLinear; FILL Range; IDENTITY Identity; SHAPE Shape;
    ELEMENTWISE Add Sub Mul Div Less Mod LessOrEqual; GATHER Gather GatherElements GatherND; SOFTMAX Softmax;
    MATRIX_MULTIPLY MatMul Gemm; QUANTIZE QuantizeLinear; REDUCE ReduceMean ReduceSum; SELECT Where;
    SHUFFLE Reshape Transpose; SLICE Slice Expand Pad; SQUEEZE Squeeze; UNARY Abs Neg Not; UNSQUEEZE Unsqueeze"""
_LAYERS = {operator: layer for layer, *each in map(str.split, _TABLE.split(";")) for operator in each}
_GATHER_MODES = {"Gather": "DEFAULT", "GatherElements": "ELEMENT", "GatherND": "ND"}
_NOT_ELEMENTARY = {"MATRIX_MULTIPLY", "ELEMENTWISE", "SELECT"}


class OnnxParser(Native):
    num_errors = property(lambda self: 0)

    def __init__(self, network, logger):
        self._network = instance(network, INetworkDefinition)
        self._log = Log(checked(logger))

    def parse(self, model, path=None):
        content = bytes(memoryview(model))
        _Import(self._network, onnx.load_model_from_string(content), self._log).run()
        self._network._model = content
        return True


class _Import:
    def __init__(self, network, model, log):
        self.network, self.log = network, log
        self.model = inline_local_functions(model)
        self.tensors = {}
        self.unused = {tensor.name: tensor for tensor in self.model.graph.initializer}
        self.constants = dict(self.unused)
        self.broadcasts = 0

    def run(self):
        graph = onnx.shape_inference.infer_shapes(self.model, data_prop=True).graph
        types = {value.name: value.type.tensor_type for value in (*graph.input, *graph.value_info, *graph.output)}
        for value in graph.input:
            if value.name not in self.constants:
                self._add_input(value)
        for node in graph.node:
            self._node(node, types)
        for value in graph.output:
            self._add_output(value.name)

    def _add_input(self, value):
        kind = value.type.tensor_type
        tensor = _tensor(value.name, kind)
        tensor._input = True
        tensor._dimension_names = tuple(dim.dim_param for dim in kind.shape.dim)
        if tensor.dtype == DataType.INT64:
            self.log.warning(f"Make sure input {value.name} has Int64 binding.")
        self.tensors[value.name] = tensor
        self.network._inputs.append(tensor)

    def _add_output(self, name):
        tensor = self._tensor_of(name)
        tensor._output = True
        if tensor.dtype == DataType.INT64:
            self.log.warning(f"Make sure output {name} has Int64 binding.")
        self.network._outputs.append(tensor)

    def _tensor_of(self, name):
        """Return a tensor that was made before; an initializer becomes a constant layer when it is first used."""
        if name in self.unused:
            value = self.unused.pop(name)
            constant = _tensor(f"{name}_output", _constant_type(value))
            constant._constant = value.data_type in (TensorProto.INT64, TensorProto.INT32)
            self.network._add("CONSTANT", name, [], [constant])
            self.tensors[name] = constant
        return self.tensors.get(name)

    def _node(self, node, types):
        kind, name = _LAYERS[node.op_type], node.name or f"node_of_{node.output[0]}"
        inputs = [self._tensor_of(each) if each else None for each in node.input]
        if kind in _NOT_ELEMENTARY:
            inputs = self._broadcast(inputs)
        outputs = [_tensor(each, types[each]) for each in node.output if each]
        self.tensors.update({tensor.name: tensor for tensor in outputs})
        if node.op_type == "Gemm" and len(inputs) == 3:
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

    def _broadcast(self, inputs):
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


def _constant_type(value):
    kind = onnx.TypeProto.Tensor(elem_type=value.data_type)
    kind.shape.SetInParent()
    for size in value.dims:
        kind.shape.dim.add().dim_value = size
    return kind


def _tensor(name, kind):
    shape = Dims(dim.dim_value if dim.HasField("dim_value") else -1 for dim in kind.shape.dim)
    return ITensor._make(_name=name, _dtype=_DATA_TYPES[kind.elem_type], _shape=shape)
