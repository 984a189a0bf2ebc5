"""The ONNX model of an engine: its shapes and sizes, and ONNX Runtime, which computes what its kernels would."""

import math
from functools import lru_cache

import numpy as np
import onnx

_ALIGNMENT = 512
_NUMPY = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(bool)": np.bool_}
_NUMPY |= {f"tensor({name})": np.dtype(name) for name in ("int8", "uint8", "int32", "int64")}
_KEPT = 16  # a test loads the same engine many times


def tensor_shapes(model, inputs):
    """Return the shapes of all tensors that shape inference finds when the inputs have these shapes."""
    return {name: shape for name, (shape, _) in _inferred(model, inputs).items()}


def activation_bytes(model, inputs):
    """Return how much memory a run takes between inputs and outputs: its two largest tensors, which is a guess."""
    ends = {value.name for value in (*model.graph.input, *model.graph.output)}
    sizes = sorted(size for name, (_, size) in _inferred(model, inputs).items() if name not in ends)
    return -(-sum(sizes[-2:]) // _ALIGNMENT) * _ALIGNMENT


def weights_bytes(model):
    return sum(_size(tensor.data_type, tuple(tensor.dims)) for tensor in model.graph.initializer)


def _inferred(model, inputs):
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


def _size(elem_type, shape):
    return math.prod(shape, start=onnx.helper.tensor_dtype_to_np_dtype(elem_type).itemsize)


class Model:
    """A model that ONNX Runtime can compute, on the CPU and in one thread: many engines share few cores in tests."""

    def __init__(self, content):
        import onnxruntime  # late: the real TensorRT does not import it

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self.session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        self.outputs = [tensor.name for tensor in self.session.get_outputs()]
        self.weights_bytes = weights_bytes(onnx.load_model_from_string(content))
        self.output_shapes = lru_cache(self._output_shapes)

    def _output_shapes(self, inputs):
        # ONNX's inference cannot follow every computation of a shape. Zeros do, as no shape here depends on values.
        dtypes = {tensor.name: _NUMPY[tensor.type] for tensor in self.session.get_inputs()}
        values = self.session.run(None, {name: np.zeros(shape, dtypes[name]) for name, shape in inputs})
        return dict(zip(self.outputs, (value.shape for value in values), strict=True))


@lru_cache(maxsize=_KEPT)
def model(content):
    return Model(content)
