"""Simulated accelerator: the outputs of the CPU, in the time and on the schedule of a GPU."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Collection, Mapping
from functools import partial

from edge.datatypes import Array
from edge.errors import Raw, UsageError
from edge.runner import DecoderTensors, DeviceLoop, Handle, LoopTensors, Runner, Tensor
from edge.runtimes.host import HostDecoder, infer_into
from edge.runtimes.host import HostLoop as HandleLoop
from edge.runtimes.onnxruntime import OnnxRuntimeCpu
from edge.runtimes.runtime import Product, Source, Suitability

_MAX_RUN_MS = 60_000.0

#: For each thread that owns a device: the end of its last run, by ``time.perf_counter()``.
_device = threading.local()


class SimulatedRun:
    """A run of the simulated accelerator that ends at a time of ``time.perf_counter()``."""

    def __init__(self, outputs: dict[str, Array], end: float) -> None:
        self._outputs = outputs
        self._end = end

    def result(self) -> dict[str, Array]:
        """Sleep until the run ends; see :meth:`edge.runner.Pending.result`."""
        _sleep_until(self._end)
        return self._outputs


class SimulatedRunner:
    """A runner whose runs take at least ``run_seconds``; it sleeps for the time that its model does not compute."""

    platform = "simulated_onnx"
    device = "GPU"

    def __init__(self, model: Runner, run_seconds: float) -> None:
        self._model = model
        self._run_seconds = run_seconds
        self.inputs = model.inputs
        self.outputs = model.outputs

    def infer(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Compute all outputs; see :meth:`edge.runner.Runner.infer`."""
        return self.start(feeds).result()

    def start(self, feeds: Mapping[str, Array]) -> SimulatedRun:
        """Start a run behind the previous ones; see :meth:`edge.runner.OverlappingRunner.start`."""
        begun = time.perf_counter()
        return SimulatedRun(self._model.infer(feeds), self._end(begun))

    def upload(self, array: Array) -> Handle:
        """Copy an array; see :meth:`edge.runner.Runner.upload`."""
        return self._model.upload(array)

    def run(self, feeds: Mapping[str, Tensor], keep: Collection[str] = ()) -> dict[str, Tensor]:
        """Compute all outputs; see :meth:`edge.runner.Runner.run`."""
        begun = time.perf_counter()
        outputs = self._model.run(feeds, keep)
        _sleep_until(self._end(begun))
        return outputs

    def loop(self, tensors: LoopTensors, steps: int = 1) -> DeviceLoop:
        """Return a loop without rows; see :meth:`edge.runner.Runner.loop`."""
        return HandleLoop(self, tensors, steps)

    def decoder(self, tensors: DecoderTensors) -> HostDecoder:
        """Return a decoder without rows; see :meth:`edge.runner.Runner.decoder`."""
        return HostDecoder(self.infer, partial(infer_into, self), (*self.inputs, *self.outputs), tensors)

    def close(self) -> None:
        """Close the model."""
        self._model.close()

    def _end(self, begun: float) -> float:
        """Return when a run ends: the device computes one after the other."""
        end: float = max(begun, getattr(_device, "free_at", 0.0)) + self._run_seconds
        _device.free_at = end
        return end


class Simulated(OnnxRuntimeCpu):
    """ONNX Runtime on the CPU under the rules of a GPU: one thread, and runs of a fixed duration.

    It rehearses the schedule of a GPU on a machine without one, and leaves the processor to the server.
    """

    name = "simulated"
    parameter = "MILLISECONDS"
    device = "GPU"
    thread_bound = True

    def __init__(self, parameter: str = "", reason: str = "The target names it.") -> None:
        super().__init__(parameter, reason)
        try:
            self._run_ms = float(parameter)
        except ValueError:
            self._run_ms = math.nan
        if not 0 < self._run_ms <= _MAX_RUN_MS:
            given = parameter or Raw("no duration")
            expected = f"the milliseconds of a run, above 0 and at most {_MAX_RUN_MS:.0f}"
            fix = f"Write {self.name}:1 for runs of one millisecond."
            raise UsageError(f"--target {self.name}", given=given, expected=expected, fix=fix)

    @classmethod
    def suitability(cls) -> Suitability | None:
        """Return None: only ``--target`` chooses it."""
        return None

    def load(self, source: Source, built: Product | None) -> Runner:
        """Load the model for the CPU; see :meth:`edge.runtimes.runtime.Runtime.load`."""
        return SimulatedRunner(super().load(source, built), self._run_ms / 1e3)


def _sleep_until(end: float) -> None:
    time.sleep(max(end - time.perf_counter(), 0))
