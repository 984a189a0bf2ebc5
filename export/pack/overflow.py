"""Values of an FP16 graph that exceed the range of FP16.

ONNX Runtime on a CPU computes chains of operators in FP32 where it has no FP16 kernels, and drops the casts between
them, so that the outputs alone do not show what a GPU would compute.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx

from edge.datatypes import Array
from edge.runtimes.onnxruntime_runner import OnnxRuntimeRunner


def overflowing_tensor(model: bytes, inputs: Mapping[str, Array], subject: str) -> str | None:
    """Return the first FP16 tensor that is NaN or +Inf for some inputs; None if there is none.

    A value of -Inf is a usual mask, and so no sign of an overflow.
    """
    shown = onnx.shape_inference.infer_shapes(onnx.load_model_from_string(model))
    graph = shown.graph
    halves = [one for one in graph.value_info if one.type.tensor_type.elem_type == onnx.TensorProto.FLOAT16]
    graph.output.extend(halves)
    order = {name: place for place, node in enumerate(graph.node) for name in node.output}
    runner = OnnxRuntimeRunner(shown.SerializeToString(), subject=subject)
    try:
        outputs = runner.infer(inputs)
    finally:
        runner.close()
    bad = [one.name for one in halves if (np.isnan(outputs[one.name]) | np.isposinf(outputs[one.name])).any()]
    return min(bad, key=lambda name: order.get(name, -1), default=None)
