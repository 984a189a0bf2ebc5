"""A simulated accelerator: the real outputs from the CPU, in the time and on the schedule of a GPU."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping

from edge.datatypes import Array, TensorSpec
from edge.errors import Literally, UsageError
from edge.runner import Handle, Runner, Tensor
from edge.runtimes.onnxruntime_cpu import OnnxRuntimeCpu
from edge.runtimes.runtime import Source, Suitability

_MAX_RUN_MS = 60_000.0


class SimulatedRunner:
    """A runner whose every run lasts at least a fixed time, of which it sleeps what its model does not compute.

    Args:
        model: computes the outputs.
        run_ms: the duration of a run, in milliseconds.
    """

    platform = "simulated_onnx"
    device = "GPU"

    def __init__(self, model: Runner, run_ms: float) -> None:
        self._model = model
        self._run_seconds = run_ms / 1e3

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The inputs of the model."""
        return self._model.inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The outputs of the model."""
        return self._model.outputs

    def infer(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Compute all outputs; see :meth:`edge.runner.Runner.infer`."""
        started = time.perf_counter()
        outputs = self._model.infer(feeds)
        self._sleep(started)
        return outputs

    def upload(self, array: Array) -> Handle:
        """Copy an array; see :meth:`edge.runner.Runner.upload`."""
        return self._model.upload(array)

    def run(self, feeds: Mapping[str, Tensor], keep: Collection[str] = ()) -> dict[str, Tensor]:
        """Compute all outputs; see :meth:`edge.runner.Runner.run`."""
        started = time.perf_counter()
        outputs = self._model.run(feeds, keep)
        self._sleep(started)
        return outputs

    def close(self) -> None:
        """Close the model."""
        self._model.close()

    def _sleep(self, started: float) -> None:
        time.sleep(max(started + self._run_seconds - time.perf_counter(), 0))


class Simulated(OnnxRuntimeCpu):
    """ONNX Runtime on the CPU under the rules of a GPU: one thread, and runs of a fixed duration.

    It rehearses and measures the schedule of a GPU on a machine without one, and leaves the processor to the server.

    Raises:
        UsageError: the parameter is no number of milliseconds above 0.
    """

    name = "simulated"
    parameter = "MILLISECONDS"
    device = "GPU"
    thread_bound = True

    def __init__(self, parameter: str = "", reason: str = "The target names it.") -> None:
        super().__init__(parameter, reason)
        self._run_ms = _milliseconds(parameter)

    @classmethod
    def suitability(cls) -> Suitability | None:
        """Return None: only ``--target`` chooses it."""
        return None

    def load(self, source: Source, built: bytes | None) -> Runner:
        """Load the model for the CPU; see :meth:`edge.runtimes.runtime.Runtime.load`."""
        return SimulatedRunner(super().load(source, built), self._run_ms)


def _milliseconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= _MAX_RUN_MS:
        raise UsageError(
            f"--target {Simulated.name}",
            given=text or Literally("no duration"),
            expected=f"the milliseconds of a run, above 0 and at most {_MAX_RUN_MS:.0f}",
            fix=f"Write {Simulated.name}:1 for runs of one millisecond.",
        )
    return value
