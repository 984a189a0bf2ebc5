"""ONNX Runtime, which computes what an engine's kernels would."""

from __future__ import annotations

from typing import Any


def session(model: bytes) -> Any:
    """Return a session on the CPU, of one thread: many engines share few cores in tests.

    Raises:
        Exception: ONNX Runtime cannot run the model.
    """
    import onnxruntime  # late: the real TensorRT does not import it

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
