"""Simulated accelerator: the outputs of the CPU, in the time and on the schedule of a GPU."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Collection, Mapping

from edge.datatypes import Array
from edge.errors import Raw, UsageError
from edge.runner import Runner, Tensor
from edge.runtimes.onnxruntime import OnnxRuntimeCpu
from edge.runtimes.onnxruntime_runner import OnnxRuntimeRunner
from edge.runtimes.runtime import Product, Source, Suitability

_MAX_RUN_MS = 60_000.0

#: For each thread that owns a device: the end of its last run, by ``time.perf_counter()``.
_device = threading.local()


class SimulatedRun:
    """A run of the simulated accelerator that ends at a time of ``time.perf_counter()``."""

    def __init__(self, outputs: dict[str, Array], end: float) -> None:
        self._outputs, self._end = outputs, end

    def result(self) -> dict[str, Array]:
        _sleep_until(self._end)
        return self._outputs


class SimulatedRunner(OnnxRuntimeRunner):
    """A runner whose runs take at least ``run_seconds``; it sleeps for the time that its model does not compute."""

    platform = "simulated_onnx"

    def __init__(self, model: bytes, *, subject: str, run_seconds: float) -> None:
        super().__init__(model, subject=subject)
        self.device = "GPU"
        self._run_seconds = run_seconds

    def infer(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        return self.start(feeds).result()

    def start(self, feeds: Mapping[str, Array]) -> SimulatedRun:
        begun = time.perf_counter()
        return SimulatedRun(super().infer(feeds), self._end(begun))

    def run(self, feeds: Mapping[str, Tensor], keep: Collection[str] = ()) -> dict[str, Tensor]:
        begun = time.perf_counter()
        outputs = super().run(feeds, keep)
        _sleep_until(self._end(begun))
        return outputs

    def _end(self, begun: float) -> float:
        # The device computes one run after the other.
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
        return None  # only --target chooses it

    def load(self, source: Source, built: Product | None) -> Runner:
        model = built.data if built else source.read()
        return SimulatedRunner(model, subject=source.subject, run_seconds=self._run_ms / 1e3)


def _sleep_until(end: float) -> None:
    time.sleep(max(end - time.perf_counter(), 0))
