"""ONNX Runtime as every peer uses it: one thread for each run, on the CPU. Runs in the peers' own environments."""

import onnxruntime


def session(path):
    """Open a model."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
