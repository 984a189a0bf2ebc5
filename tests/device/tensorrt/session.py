"""The ONNX model of an engine, and ONNX Runtime, which computes what the engine's kernels would."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import onnx

from .shapes import weights_bytes

_NUMPY = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int8)": np.int8,
    "tensor(uint8)": np.uint8,
    "tensor(int32)": np.int32,
    "tensor(int64)": np.int64,
    "tensor(bool)": np.bool_,
}
_KEPT = 16  # a test loads the same engine many times


class Model:
    """A model that ONNX Runtime can compute, on the CPU and in one thread: many engines share few cores in tests."""

    def __init__(self, content: bytes) -> None:
        import onnxruntime  # late: the real TensorRT does not import it

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self.session: Any = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        self.outputs = [tensor.name for tensor in self.session.get_outputs()]
        self.weights_bytes = weights_bytes(onnx.load_model_from_string(content))
        self.output_shapes = lru_cache(self._output_shapes)

    def _output_shapes(self, inputs: tuple[tuple[str, tuple[int, ...]], ...]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the outputs for those of the inputs."""
        # ONNX's inference cannot follow every computation of a shape. Zeros do, as no shape here depends on values.
        dtypes = {tensor.name: _NUMPY[tensor.type] for tensor in self.session.get_inputs()}
        values = self.session.run(None, {name: np.zeros(shape, dtypes[name]) for name, shape in inputs})
        return dict(zip(self.outputs, (value.shape for value in values), strict=True))


@lru_cache(maxsize=_KEPT)
def model(content: bytes) -> Model:
    """Return a model from its bytes."""
    return Model(content)
