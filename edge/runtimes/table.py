"""The table of runtimes, and the choice of one for a target."""

from __future__ import annotations

from edge.errors import BackendError, Literally, UsageError
from edge.runtimes.onnxruntime_cpu import OnnxRuntimeCpu
from edge.runtimes.onnxruntime_cuda import OnnxRuntimeCuda
from edge.runtimes.runtime import Runtime
from edge.runtimes.simulated import Simulated
from edge.runtimes.tensorrt import TensorRt
from edge.runtimes.tensorrt_rtx import TensorRtRtx

#: Every runtime by its target's name. ``auto`` takes the first that is suitable.
RUNTIMES: dict[str, type[Runtime]] = {
    runtime.name: runtime for runtime in (TensorRt, OnnxRuntimeCuda, OnnxRuntimeCpu, TensorRtRtx, Simulated)
}


def targets() -> str:
    """Return all targets, as the help of ``--target`` and its errors list them."""
    *first, last = ["auto", *(runtime.target() for runtime in RUNTIMES.values())]
    return f"{', '.join(first)} or {last}"


def choose(target: str = "auto") -> Runtime:
    """Return the runtime for a target.

    Args:
        target: a runtime's name, with a colon and a parameter where it has one, or ``auto``.

    Raises:
        UsageError: there is no such target, or its parameter is wrong.
        BackendError: the package that the target needs is missing, or this release refuses it.
    """
    if target == "auto":
        return _automatic()
    name, colon, parameter = target.partition(":")
    runtime = RUNTIMES.get(name)
    if runtime is None or (colon and not runtime.parameter):
        raise UsageError("--target", given=target, expected=targets(), fix="Take auto if in doubt.")
    chosen = runtime(parameter)
    chosen.version()  # a missing package is an error of the target, not of each model
    return chosen


def _automatic() -> Runtime:
    reasons = []
    for runtime in RUNTIMES.values():
        found = runtime.suitability()
        if found is None:
            continue
        reasons.append(found.reason)
        if found.suitable:
            return runtime(reason=" ".join(reasons))
    fix = "Install the extra 'cpu', or name a runtime with --target."
    raise BackendError("--target auto", given=Literally(" ".join(reasons)), expected="a suitable runtime", fix=fix)
