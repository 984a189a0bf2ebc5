"""Loaded TensorRT engine with its memory on the device: handles, buffers that are reused, and errors of the device."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from traceback import clear_frames
from typing import Any

import numpy as np

from edge.datatypes import NUMPY_TYPES, Array
from edge.errors import BackendError, FewheadsError, InvalidRequest, Raw, RunnerError
from edge.runner import Tensor
from edge.runtimes.cuda import Memory, abandon, facts, fatal_name, is_out_of_memory
from edge.runtimes.tensorrt.device import SharedDevice, shared_device
from edge.runtimes.tensorrt.engine import DATATYPES, Engine, EngineRefused, Shape
from edge.runtimes.tensorrt.package import Flavor, import_tensorrt, logger_of, version

log = logging.getLogger(__name__)

#: Buffers of dropped handles that are kept for new handles. A loop over a state needs two of each size.
_SPARE_BUFFERS = 8


class TensorRtHandle:
    """A tensor in device memory; see :class:`edge.runner.Handle`."""

    def __init__(self, model: TensorRtModel, memory: Memory, datatype: str, shape: Shape) -> None:
        self._model, self.memory, self.datatype, self.shape = model, memory, datatype, shape

    def numpy(self) -> Array:
        """Return a copy on the host. Only the thread that owns the GPU may call this."""
        return self._model.download(self)

    def __del__(self) -> None:
        # This may be any thread, and only the GPU's may free the memory or give it to another handle.
        self._model.dropped.append(self.memory)


class TensorRtModel:
    """An engine on this machine's GPU, and the memory that belongs to it. Only the thread that created it may use it.

    Args:
        flavor: the package that has built the engine.
        rebuild: the remedy in errors: how to build the engine again.

    Raises:
        BackendError: the engine cannot be loaded here. Nothing stays allocated.
    """

    def __init__(self, engine: bytes, flavor: Flavor, *, subject: str, rebuild: str, graphs: bool = True) -> None:
        self.subject, self._flavor = subject, flavor
        self._logger = logger_of(flavor)
        self.dropped: deque[Memory] = deque()
        self._memory: set[Memory] = set()
        self._spare: deque[Memory] = deque()
        self._held: tuple[list[Any], ...] = ()  # the buffers and events of runs, which close() drops
        self._shared: SharedDevice | None = None
        self._engine: Engine | None = None
        try:
            self._shared = shared = shared_device()
            with shared.device:
                try:
                    self._engine = Engine(
                        engine, shared, import_tensorrt(flavor), self._logger, subject=subject, graphs=graphs
                    )
                    self._allocate(shared, self._engine)
                    # Last, because the arena would stay grown if a later step failed.
                    shared.join(self._engine.arena_moves, self._engine.activation_bytes)
                except Exception as error:
                    clear_frames(error.__traceback__)  # they refer to objects that must be freed here
                    if lost := shared.synchronize():
                        raise lost from error
                    raise
            self.inputs, self.outputs = self._engine.inputs, self._engine.outputs
        except BaseException as error:
            self.close()
            if isinstance(error, FewheadsError) or not isinstance(error, Exception):
                raise
            raise self._not_loaded(error, rebuild) from error

    def _allocate(self, shared: SharedDevice, engine: Engine) -> None:
        """Allocate what runs need; called once, before the engine is ready."""

    def upload(self, array: Array) -> TensorRtHandle:
        """Copy an array to the device; see :class:`edge.runner.Runner`.

        Raise an InvalidRequest if TensorRT does not support the datatype.
        """
        datatypes = {NUMPY_TYPES[name]: name for name in DATATYPES.values()}
        if array.dtype not in datatypes:
            subject, expected = f"upload to {self.subject}", f"one of {', '.join(map(str, datatypes))}"
            raise InvalidRequest(subject, given=str(array.dtype), expected=expected, fix="Convert the array.")
        with self.working() as (shared, _):
            handle = TensorRtHandle(self, self.buffer(shared, array.nbytes), datatypes[array.dtype], array.shape)
            shared.device.upload(handle.memory.address, np.ascontiguousarray(array))
            return handle

    def download(self, handle: TensorRtHandle) -> Array:
        """Return a copy of a handle on the host; see :meth:`TensorRtHandle.numpy`."""
        array: Array = np.empty(handle.shape, NUMPY_TYPES[handle.datatype])
        with self.working() as (shared, _):
            shared.device.download(array, handle.memory.address)
            return array

    def close(self) -> None:
        shared, self._shared = self._shared, None
        engine, self._engine = self._engine, None
        if shared is None:
            return
        lost = shared.is_lost()
        if lost:
            abandon(*chain(*self._held), *self._memory)
        with suppress(*shared.device.errors), shared.device:
            for held in self._held:
                held.clear()
            if engine:
                engine.close()
            for memory in self._memory if not lost else ():
                memory.free()
            self._memory.clear()
            self._spare.clear()
            self.dropped.clear()
        shared.leave(engine.arena_moves if engine else None)

    @contextmanager
    def working(self) -> Iterator[tuple[SharedDevice, Engine]]:
        """Make the device current for the block. After an error, wait for all work that the block has enqueued."""
        shared, engine = self._shared, self._engine
        if shared is None or engine is None:
            raise RuntimeError(f"{self.subject} is closed")
        try:
            with shared.device:
                try:
                    yield shared, engine
                except Exception as error:
                    lost = shared.synchronize()
                    if isinstance(error, FewheadsError) and not lost:
                        raise
                    clear_frames(error.__traceback__)  # they may refer to a context of TensorRT
                    raise self._failed(error, lost) from lost or error
        except shared.device.errors as error:  # the context could not be made current
            raise self._failed(error) from error

    def address_of(self, name: str, tensor: Tensor) -> int:
        """Return the address of a handle that is fed to the tensor ``name``; raise an InvalidRequest if it has none."""
        if isinstance(tensor, TensorRtHandle) and tensor.memory.address:
            return tensor.memory.address
        raise InvalidRequest(
            f"input {name!r} of {self.subject}",
            given=Raw(f"a handle of {type(tensor).__name__}"),
            expected="an array, or a handle of TensorRT whose runner is open",
            fix="Feed handles to the runtime that made them, before its runner is closed.",
        )

    def own(self, memory: Memory) -> Memory:
        """Register memory that :meth:`close` frees."""
        self._memory.add(memory)
        return memory

    def own_all(self, *allocate: Callable[[], Memory]) -> list[Memory]:
        """Allocate memory that :meth:`close` frees. After an error nothing stays allocated."""
        allocated: list[Memory] = []
        try:
            for allocation in allocate:
                allocated.append(allocation())  # noqa: PERF401 # what was allocated before an error is needed
        except BaseException:
            for memory in allocated:
                memory.free()
            raise
        return [self.own(memory) for memory in allocated]

    def disown(self, memory: Memory) -> None:
        """Free memory that :meth:`close` would free, which no work uses."""
        self._memory.discard(memory)
        memory.free()

    def buffer(self, shared: SharedDevice, size_bytes: int) -> Memory:
        """Return memory for a handle, reusing that of a dropped one if possible."""
        size_bytes = 1 << (size_bytes - 1).bit_length()  # few sizes, whatever the numbers of rows
        while self.dropped:
            self._spare.append(self.dropped.popleft())
        while len(self._spare) > _SPARE_BUFFERS:
            self.disown(self._spare.popleft())
        for memory in self._spare:
            if memory.size_bytes == size_bytes:
                self._spare.remove(memory)
                return memory
        return self.own(shared.device.allocate(size_bytes))

    def _failed(self, error: Exception, lost: Exception | None = None) -> RunnerError:
        log.error("%s failed in TensorRT", self.subject, exc_info=error)
        given, fix = fatal_name(str(lost or error)) or type(error).__name__, "See the server's log."
        if not lost and is_out_of_memory(str(error)):
            given, fix = "a device out of memory", "Send fewer rows at once, or unload other models."
        return RunnerError(self.subject, given=Raw(given), expected="an answer", fix=fix)

    def _not_loaded(self, error: Exception, rebuild: str) -> BackendError:
        expected, fix = "a GPU that loads it", "See the server's log, and look at `fewheads doctor`."
        lacks_memory = is_out_of_memory(str(error))
        if lacks_memory:
            expected, fix = "memory of the device for it", "Unload other models, or build smaller profiles."
        elif isinstance(error, EngineRefused):
            expected, fix = f"one that TensorRT {version(self._flavor)} has built on this {facts().name}", rebuild
        failure = BackendError(f"engine of {self.subject}", given=Raw(error), expected=expected, fix=fix)
        failure.lacks_memory = lacks_memory
        return failure
