"""Runner for TensorRT: copies inputs to the GPU, runs the engine, and copies outputs back or keeps them there."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from traceback import clear_frames
from types import MappingProxyType

import numpy as np

from edge.datatypes import NUMPY_TYPES, Array, TensorSpec, byte_size
from edge.errors import BackendError, FewheadsError, InvalidRequest, Literally, RunnerError
from edge.runner import Tensor, check_feeds
from edge.runtimes.cuda import Device, Memory, abandon, facts
from edge.runtimes.device_errors import fatal_name, is_out_of_memory
from edge.runtimes.tensorrt_device import SharedDevice, shared_device
from edge.runtimes.tensorrt_engine import DATATYPES, Engine, EngineRefused, Enqueued, Shape, TensorRtError
from edge.runtimes.tensorrt_package import Flavor, import_tensorrt, logger_of, version

log = logging.getLogger(__name__)

#: Runs that may be pending at once: the device computes one while the host prepares the other.
SLOTS = 2
#: The largest tensor that an integrated GPU reads and writes in the host's memory, which it does not cache. For so
#: little data that is faster than a copy (CUDA for Tegra, application note, 3.2).
MAPPED_BYTES = 16 * 1024
#: Buffers of dropped handles that are kept for new handles. A loop over a state needs two of each size.
_SPARE_BUFFERS = 8


class TensorRtHandle:
    """A tensor in device memory; see :class:`edge.runner.Handle`."""

    def __init__(self, runner: TensorRtRunner, memory: Memory, datatype: str, shape: Shape) -> None:
        self._runner = runner
        self.memory = memory
        self.datatype = datatype
        self.shape = shape

    def numpy(self) -> Array:
        """Return a copy on the host. Only the thread that owns the GPU may call this."""
        return self._runner.download(self)

    def __del__(self) -> None:
        # This may be any thread, and only the GPU's may free the memory or give it to another handle.
        self._runner.dropped.append(self.memory)


class _Slot:
    """The buffers of one pending run, each as large as the largest profile needs."""

    def __init__(
        self, device: Device, sizes: Mapping[str, int], mapped_bytes: int, own: Callable[[Memory], Memory]
    ) -> None:
        # The device uses these tensors in the host's memory; the others are copied.
        self.mapped = {name for name, size in sizes.items() if size <= mapped_bytes}
        self.host = {name: own(device.allocate_host(size, mapped=name in self.mapped)) for name, size in sizes.items()}
        self.addresses = {
            name: (self.host[name] if name in self.mapped else own(device.allocate(size))).address
            for name, size in sizes.items()
        }
        self.uploaded = device.event()  # after the copies of the inputs
        self.done = device.event()  # after the run
        self.busy = False

    def raw(self, spec: TensorSpec, shape: Shape) -> Array:
        """Return the bytes of a tensor in the host's memory; raise a TensorRtError if it exceeds its buffer."""
        size, room = byte_size(spec.datatype, shape), self.host[spec.name].size_bytes
        if size > room:
            raise TensorRtError(f"{spec.name!r}: got {list(shape)}, {size} bytes, expected at most {room}")
        return self.host[spec.name].bytes[:size]

    def array(self, spec: TensorSpec, shape: Shape) -> Array:
        """Return a tensor in the host's memory."""
        array: Array = self.raw(spec, shape).view(NUMPY_TYPES[spec.datatype]).reshape(shape)
        return array


class PendingRun:
    """A started run; see :class:`edge.runner.Pending`."""

    def __init__(self, runner: TensorRtRunner, slot: _Slot, outputs: dict[str, Shape | TensorRtHandle]) -> None:
        self._runner = runner
        self.slot: _Slot | None = slot
        self.outputs = outputs

    def result(self) -> dict[str, Array]:
        """Wait for the run; see :meth:`edge.runner.Pending.result`."""
        return self._runner.finish(self)  # type: ignore[return-value] # start() keeps nothing on the device


class TensorRtRunner:
    """A model in TensorRT on this machine's GPU. Only the thread that created the runner may call it.

    The constructor allocates the buffers of two runs. Later, only handles and graphs allocate memory.

    Args:
        flavor: the package that has built the engine.
        rebuild: the remedy in errors: how to build the engine again.
        mapped_bytes: the largest tensor that the GPU uses in the host's memory; None is :data:`MAPPED_BYTES` for an
            integrated GPU, and 0 for others.
        index_limits: the rows of the smallest table that each input indexes.

    Raises:
        BackendError: the engine cannot be loaded here. Nothing stays allocated.
    """

    platform = "tensorrt_plan"
    device = "GPU"

    def __init__(
        self,
        engine: bytes,
        flavor: Flavor,
        *,
        subject: str,
        rebuild: str,
        mapped_bytes: int | None = None,
        graphs: bool = True,
        index_limits: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self._subject = subject
        self._index_limits = index_limits
        self._flavor = flavor
        self._logger = logger_of(flavor)
        self.dropped: deque[Memory] = deque()
        self._memory: set[Memory] = set()
        self._spare: deque[Memory] = deque()
        self._slots: list[_Slot] = []
        self._shared: SharedDevice | None = None
        self._engine: Engine | None = None
        try:
            self._shared = shared = shared_device()
            with shared.device:
                try:
                    self._engine = Engine(
                        engine, shared, import_tensorrt(flavor), self._logger, subject=subject, graphs=graphs
                    )
                    sizes = self._engine.largest()
                    if mapped_bytes is None:
                        mapped_bytes = MAPPED_BYTES if shared.device.facts.integrated else 0
                    self._slots += [_Slot(shared.device, sizes, mapped_bytes, self._own) for _ in range(SLOTS)]
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

    def infer(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Compute all outputs; see :class:`edge.runner.Runner`.

        Raises:
            InvalidRequest: an input is missing or unknown, has the wrong datatype, a shape outside every profile or
                one that contradicts another input's, or an index outside its table.
            RunnerError: the device or TensorRT failed; the log has its message.
        """
        return self.start(feeds).result()

    def start(self, feeds: Mapping[str, Array]) -> PendingRun:
        """Start a run; see :class:`edge.runner.OverlappingRunner`. It raises the errors of :meth:`infer`."""
        return self._start(feeds, ())

    def run(self, feeds: Mapping[str, Tensor], keep: Collection[str] = ()) -> dict[str, Tensor]:
        """Compute all outputs and keep some on the device; see :class:`edge.runner.Runner`.

        It raises the errors of :meth:`infer`, and an InvalidRequest if ``keep`` is not among the outputs.
        """
        return self.finish(self._start(feeds, keep))

    def finish(self, pending: PendingRun) -> dict[str, Tensor]:
        """Wait for a run and return its outputs; see :meth:`edge.runner.Pending.result`."""
        slot = pending.slot
        if slot is None:
            raise RuntimeError(f"{self._subject}: the result of this run has been taken")
        with self._working():
            pending.slot = None
            try:
                slot.done.synchronize()
                return {
                    spec.name: kept if isinstance(kept, TensorRtHandle) else slot.array(spec, kept).copy()
                    for spec, kept in zip(self.outputs, pending.outputs.values(), strict=True)
                }
            finally:
                slot.busy = False

    def upload(self, array: Array) -> TensorRtHandle:
        """Copy an array to the device; see :class:`edge.runner.Runner`.

        Raises:
            InvalidRequest: TensorRT does not support the datatype.
        """
        datatypes = {NUMPY_TYPES[name]: name for name in DATATYPES.values()}
        if array.dtype not in datatypes:
            subject, expected = f"upload to {self._subject}", f"one of {', '.join(map(str, datatypes))}"
            raise InvalidRequest(subject, given=str(array.dtype), expected=expected, fix="Convert the array.")
        with self._working() as (shared, _):
            handle = TensorRtHandle(self, self._buffer(shared, array.nbytes), datatypes[array.dtype], array.shape)
            shared.device.upload(handle.memory.address, np.ascontiguousarray(array))
            return handle

    def download(self, handle: TensorRtHandle) -> Array:
        """Return a copy of a handle on the host; see :meth:`TensorRtHandle.numpy`."""
        array: Array = np.empty(handle.shape, NUMPY_TYPES[handle.datatype])
        with self._working() as (shared, _):
            shared.device.download(array, handle.memory.address)
            return array

    def close(self) -> None:
        """Free everything, including pending runs and handles; see :class:`edge.runner.Runner`."""
        shared, self._shared = self._shared, None
        engine, self._engine = self._engine, None
        if shared is None:
            return
        lost = shared.is_lost()
        if lost:
            abandon(*self._slots, *self._memory)
        with suppress(*shared.device.errors), shared.device:
            self._slots.clear()
            if engine:
                engine.close()
            for memory in self._memory if not lost else ():
                memory.free()
            self._memory.clear()
            self._spare.clear()
            self.dropped.clear()
        shared.leave(engine.arena_moves if engine else None)

    @contextmanager
    def _working(self) -> Iterator[tuple[SharedDevice, Engine]]:
        """Make the device current for the block. After an error, wait for all work that the block has enqueued."""
        shared, engine = self._shared, self._engine
        if shared is None or engine is None:
            raise RuntimeError(f"{self._subject} is closed")
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

    def _start(self, feeds: Mapping[str, Tensor], keep: Collection[str]) -> PendingRun:
        check_feeds(self, feeds, keep, self._subject)
        self._check_indices(feeds)
        slot = next((slot for slot in self._slots if not slot.busy), None)
        if slot is None and self._slots:
            raise RuntimeError(f"{self._subject}: {SLOTS} runs are pending; take the result of one first")
        with self._working() as (shared, engine):
            assert slot
            self._logger.messages.clear()
            shapes = tuple(feeds[spec.name].shape for spec in self.inputs)
            profile = engine.profile_of(shapes)
            output_shapes = engine.output_shapes(profile, shapes)
            addresses = self._feed(shared, slot, feeds)
            outputs: dict[str, Shape | TensorRtHandle] = {}
            copies: list[tuple[Array, int]] = []
            for spec, shape in zip(self.outputs, output_shapes, strict=True):
                if spec.name in keep:
                    memory = self._buffer(shared, byte_size(spec.datatype, shape))
                    outputs[spec.name] = TensorRtHandle(self, memory, spec.datatype, shape)
                    addresses.append(memory.address)
                    continue
                raw = slot.raw(spec, shape)  # raises if the buffer is too small
                outputs[spec.name] = shape
                addresses.append(slot.addresses[spec.name])
                if spec.name not in slot.mapped:
                    copies.append((raw, addresses[-1]))
            engine.enqueue(Enqueued(profile, shapes, tuple(addresses)))
            for raw, address in copies:
                shared.device.copy_out(raw, address, shared.compute)
            slot.done.record(shared.compute)
            slot.busy = True
            return PendingRun(self, slot, outputs)

    def _check_indices(self, feeds: Mapping[str, Tensor]) -> None:
        """Check the values that index tables of the model, except those in handles, which were never on the host."""
        for name, limit in self._index_limits.items():
            values = feeds[name]
            if not isinstance(values, np.ndarray) or not values.size:
                continue
            least, most = values.min(), values.max()
            if not (least >= 0 and most < limit):  # false for NaN
                given, subject = (most if least >= 0 else least).item(), f"input {name!r} of {self._subject}"
                expected = f"values from 0 to {limit - 1}, the rows of a table of the model"
                fix = "Send the token ids of this model's own tokenizer."
                raise InvalidRequest(subject, given=given, expected=expected, fix=fix)

    def _feed(self, shared: SharedDevice, slot: _Slot, feeds: Mapping[str, Tensor]) -> list[int]:
        """Copy the inputs to the device, and return their addresses there."""
        addresses = []
        copied = False
        for spec in self.inputs:
            tensor = feeds[spec.name]
            if isinstance(tensor, np.ndarray):
                slot.array(spec, tensor.shape)[...] = tensor
                addresses.append(slot.addresses[spec.name])
                if spec.name not in slot.mapped:
                    shared.device.copy_in(addresses[-1], slot.raw(spec, tensor.shape), shared.uploads)
                    copied = True
            elif isinstance(tensor, TensorRtHandle) and tensor.memory.address:
                addresses.append(tensor.memory.address)
            else:
                raise InvalidRequest(
                    f"input {spec.name!r} of {self._subject}",
                    given=Literally(f"a handle of {type(tensor).__name__}"),
                    expected="an array, or a handle of TensorRT whose runner is open",
                    fix="Feed handles to the runtime that made them, before its runner is closed.",
                )
        if copied:
            slot.uploaded.record(shared.uploads)
            shared.compute.wait_for_event(slot.uploaded)
        return addresses

    def _own(self, memory: Memory) -> Memory:
        """Register memory that :meth:`close` frees."""
        self._memory.add(memory)
        return memory

    def _buffer(self, shared: SharedDevice, size_bytes: int) -> Memory:
        """Return memory for a handle, reusing that of a dropped one if possible."""
        while self.dropped:
            self._spare.append(self.dropped.popleft())
        while len(self._spare) > _SPARE_BUFFERS:
            memory = self._spare.popleft()
            self._memory.discard(memory)
            memory.free()
        for memory in self._spare:
            if memory.size_bytes == size_bytes:
                self._spare.remove(memory)
                return memory
        return self._own(shared.device.allocate(size_bytes))

    def _failed(self, error: Exception, lost: Exception | None = None) -> RunnerError:
        log.error("%s failed in TensorRT", self._subject, exc_info=error)
        given, fix = fatal_name(str(lost or error)) or type(error).__name__, "See the server's log."
        if not lost and is_out_of_memory(str(error)):
            given, fix = "a device out of memory", "Send fewer rows at once, or unload other models."
        return RunnerError(self._subject, given=Literally(given), expected="an answer", fix=fix)

    def _not_loaded(self, error: Exception, rebuild: str) -> BackendError:
        expected, fix = "a GPU that loads it", "See the server's log, and look at `fewheads doctor`."
        if is_out_of_memory(str(error)):
            expected, fix = "memory of the device for it", "Unload other models, or build smaller profiles."
        elif isinstance(error, EngineRefused):
            expected, fix = f"one that TensorRT {version(self._flavor)} has built on this {facts().name}", rebuild
        return BackendError(f"engine of {self._subject}", given=Literally(error), expected=expected, fix=fix)
