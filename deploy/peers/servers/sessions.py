"""ONNX Runtime as every peer uses it: on the CPU, one thread for each run. Runs in the peers' own environments."""

import time

import onnxruntime


class Accelerator:
    """A session whose runs all last at least ``run_ms``, most of which they sleep, as one that waits for a GPU."""

    def __init__(self, session, run_ms):
        self.session = session
        self.run_seconds = run_ms / 1e3
        self.get_outputs = session.get_outputs

    def run(self, names, feeds):
        started = time.perf_counter()
        values = self.session.run(names, feeds)
        time.sleep(max(started + self.run_seconds - time.perf_counter(), 0))
        return values


def session(path, run_ms=0.0):
    """Open a model on the CPU, or, where ``run_ms`` is above 0, on a simulated accelerator."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    on_cpu = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return Accelerator(on_cpu, run_ms) if run_ms else on_cpu
