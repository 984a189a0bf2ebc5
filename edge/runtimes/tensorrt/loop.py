"""Loops in TensorRT: states and prompts in device memory, and several steps in one CUDA graph.

Each step reads the state from one buffer and writes the next one into another, in turn. Only predictions and residuals
are copied to the host, by the graph itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from edge.datatypes import NUMPY_TYPES, Array
from edge.errors import InvalidRequest
from edge.runner import LoopTensors, Tensor
from edge.runtimes.cuda import CudaDevice
from edge.runtimes.tensorrt.engine import Engine, Shape, Work, aligned
from edge.runtimes.tensorrt.model import TensorRtModel

_INDEX = np.dtype(np.int64)
_NUMBER = np.dtype(np.float32)


class LoopBuffers:
    """The memory of one loop on the device and on the host, for the most rows and tokens of any profile.

    Raises:
        pycuda.driver.MemoryError: the device has too little memory. Nothing stays allocated.
    """

    def __init__(
        self, model: TensorRtModel, device: CudaDevice, engine: Engine, tensors: LoopTensors, steps: int
    ) -> None:
        self.tensors, self.steps = tensors, steps
        self.free = True
        largest = max(engine.ranges(tensors.state), key=lambda allowed: prod(allowed.most))
        self.least_rows = largest.least[0]
        self.rows, self.tokens, self.width = largest.most
        (state,) = (spec for spec in engine.inputs if spec.name == tensors.state)
        self.token_bytes = self.width * np.dtype(NUMPY_TYPES[state.datatype]).itemsize
        self.row_bytes = self.tokens * self.token_bytes
        self.column_bytes = aligned(self.rows * _NUMBER.itemsize)
        sizes = [aligned(self.rows * self.row_bytes)] * 3 + [aligned(self.rows * _INDEX.itemsize)]
        memory, pinned = model.own_all(
            lambda: device.allocate(sum(sizes) + 2 * self.column_bytes),
            lambda: device.allocate_host(sizes[-1] + steps * 2 * self.column_bytes),
        )
        starts = [memory.address + sum(sizes[:count]) for count in range(len(sizes) + 1)]
        self.states, self.prompt, self.last, self.results = starts[:2], *starts[2:]
        self.cleared_bytes = sum(sizes)
        host = pinned.bytes
        self.host_last: Array = host[: sizes[-1]].view(_INDEX)[: self.rows]
        self.host_results: Array = host[sizes[-1] :].reshape(steps, 2 * self.column_bytes)
        self.done = device.event()
        self.works: dict[tuple[int, int], Work] = {}  # by the number of rows and the buffer of the state

    def work(self, engine: Engine, rows: int, current: int) -> Work:
        """Return the runs of one call of :meth:`TensorRtLoop.step`, which begin in the buffer ``current``."""
        if (rows, current) not in self.works:
            names, state = self.tensors, (rows, self.tokens, self.width)
            shapes: dict[str, Shape] = {names.state: state, names.prompt: state, names.last: (rows, 1)}
            runs = []
            for step in range(current, current + self.steps):
                addresses = {
                    names.state: self.states[step % 2],
                    names.next_state: self.states[1 - step % 2],
                    names.prompt: self.prompt,
                    names.last: self.last,
                    names.prediction: self.results,
                    names.residual: self.results + self.column_bytes,
                }
                runs.append(engine.run_of(shapes, addresses))
            self.works[rows, current] = tuple(runs)
        return self.works[rows, current]


class TensorRtLoop:
    """The rows of a loop; see :class:`edge.runner.DeviceLoop`.

    All prompts are as long as the longest one of the engine, and the number of rows is rounded up to a power of two,
    so that few graphs are enough.
    """

    def __init__(self, model: TensorRtModel, buffers: LoopBuffers) -> None:
        self._model, self._buffers = model, buffers
        self._rows = 0
        self._current = 0
        self._last_changed = False
        self._fed: list[Tensor] = []  # handles whose copies may be in progress
        with model.working() as (shared, _):
            # Memory of an earlier loop may hold anything, and surplus rows are computed, too.
            shared.device.clear(buffers.states[0], buffers.cleared_bytes, shared.compute)
        buffers.host_last[:] = 0
        buffers.free = False

    def __del__(self) -> None:
        self._buffers.free = True

    def add(self, state: Tensor, prompt: Tensor) -> None:
        buffers, (rows, tokens, width) = self._buffers, state.shape
        room = buffers.rows - self._rows
        if rows > room or tokens > buffers.tokens or width != buffers.width or prompt.shape != state.shape:
            given, expected = [list(state.shape), list(prompt.shape)], [room, buffers.tokens, buffers.width]
            fix = "Send fewer rows or shorter prompts, or build the engine with a larger profile."
            subject = f"states and prompts of {self._model.subject}"
            raise InvalidRequest(subject, given=given, expected=f"two equal shapes up to {expected}", fix=fix)
        names = self._buffers.tensors
        with self._model.working() as (shared, _):
            fed = ((names.state, state, buffers.states[self._current]), (names.prompt, prompt, buffers.prompt))
            for name, tensor, target in fed:
                handle = self._model.upload(tensor) if isinstance(tensor, np.ndarray) else tensor
                self._fed.append(handle)
                source, size = self._model.address_of(name, handle), tokens * buffers.token_bytes
                target += self._rows * buffers.row_bytes
                if size == buffers.row_bytes:
                    shared.device.copy(target, source, rows * size, shared.compute)
                    continue
                shared.device.clear(target, rows * buffers.row_bytes, shared.compute)
                for row in range(rows):
                    shared.device.copy(target + row * buffers.row_bytes, source + row * size, size, shared.compute)
        buffers.host_last[self._rows : self._rows + rows] = tokens - 1
        self._last_changed = True
        self._rows += rows

    def keep(self, rows: int, moves: Sequence[tuple[int, int]]) -> None:
        buffers, size = self._buffers, self._buffers.row_bytes
        with self._model.working() as (shared, _):
            for source, target in moves:
                for start in (buffers.states[self._current], buffers.prompt):
                    shared.device.copy(start + target * size, start + source * size, size, shared.compute)
                buffers.host_last[target] = buffers.host_last[source]
                self._last_changed = True
        self._rows = rows

    def step(self) -> tuple[Array, Array]:
        buffers, rows = self._buffers, self._rows
        padded = min(max(1 << (rows - 1).bit_length(), buffers.least_rows), buffers.rows)
        with self._model.working() as (shared, engine):
            if self._last_changed:
                host = buffers.host_last.view(np.uint8)
                shared.device.copy_in(buffers.last, host[: padded * _INDEX.itemsize], shared.compute)
            work = buffers.work(engine, padded, self._current)
            size = buffers.column_bytes + padded * _NUMBER.itemsize

            def fetch(step: int) -> None:
                shared.device.copy_out(buffers.host_results[step, :size], buffers.results, shared.compute)

            engine.enqueue(*work, after=fetch)
            buffers.done.record(shared.compute)
            buffers.done.synchronize()
        self._fed.clear()
        self._last_changed = False
        self._current = (self._current + buffers.steps) % 2
        results = buffers.host_results.view(_NUMBER).reshape(buffers.steps, 2, -1)[:, :, :rows].copy()
        return results[:, 0], results[:, 1]
