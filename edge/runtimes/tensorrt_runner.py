"""Runner for TensorRT: copies inputs to the GPU, runs the engine, and copies outputs back or keeps them there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from edge.datatypes import NUMPY_TYPES, Array, TensorSpec, byte_size
from edge.errors import InvalidRequest
from edge.runner import DecoderTensors, LoopTensors, Tensor, check_feeds
from edge.runtimes.cuda import Device, Memory
from edge.runtimes.tensorrt_decoder import DecoderBuffers, TensorRtDecoder
from edge.runtimes.tensorrt_device import SharedDevice
from edge.runtimes.tensorrt_engine import Engine, Enqueued, Shape, TensorRtError
from edge.runtimes.tensorrt_loop import LoopBuffers, TensorRtLoop
from edge.runtimes.tensorrt_model import TensorRtHandle, TensorRtModel
from edge.runtimes.tensorrt_package import Flavor

#: Runs that may be pending at once: the device computes one while the host prepares the other.
SLOTS = 2
#: The largest tensor that an integrated GPU reads and writes in the host's memory, which it does not cache. For so
#: little data that is faster than a copy (CUDA for Tegra, application note, 3.2).
MAPPED_BYTES = 16 * 1024


class _Slot:
    """The buffers of one pending run."""

    def __init__(
        self, device: Device, sizes: Mapping[str, int], mapped_bytes: int, own: Callable[[Memory], Memory]
    ) -> None:
        # The device uses these tensors in the host's memory; the others are copied.
        self.mapped = {name for name, size in sizes.items() if size <= mapped_bytes}
        self.host = {name: own(device.allocate_host(size, mapped=name in self.mapped)) for name, size in sizes.items()}
        on_device = {name: own(device.allocate(size)) for name, size in sizes.items() if name not in self.mapped}
        self.addresses = {name: memory.address for name, memory in (self.host | on_device).items()}
        self.memory = (*self.host.values(), *on_device.values())
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


class TensorRtRunner(TensorRtModel):
    """A model in TensorRT on this machine's GPU. Only the thread that created the runner may call it.

    The constructor allocates the buffers of two runs. Later, only handles, loops, decoders and graphs allocate memory.

    Args:
        flavor: the package that has built the engine.
        rebuild: the remedy in errors: how to build the engine again.
        mapped_bytes: the largest tensor that the GPU uses in the host's memory; None is :data:`MAPPED_BYTES` for an
            integrated GPU, and 0 for others.
        index_limits: the rows of the smallest table that each input indexes.
        preallocates: False if the buffers of a run grow with its tensors instead: those of a decoder's largest profile
            would take the memory of several caches, and decoders have buffers of their own.

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
        preallocates: bool = True,
    ) -> None:
        self._index_limits, self._preallocates = index_limits, preallocates
        self._mapped_bytes = mapped_bytes
        super().__init__(engine, flavor, subject=subject, rebuild=rebuild, graphs=graphs)

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
            raise RuntimeError(f"{self.subject}: the result of this run has been taken")
        with self.working():
            pending.slot = None
            try:
                slot.done.synchronize()
                return {
                    spec.name: kept if isinstance(kept, TensorRtHandle) else slot.array(spec, kept).copy()
                    for spec, kept in zip(self.outputs, pending.outputs.values(), strict=True)
                }
            finally:
                slot.busy = False

    def loop(self, tensors: LoopTensors, steps: int = 1) -> TensorRtLoop:
        """Return a loop without rows; see :meth:`edge.runner.Runner.loop`. It reuses the buffers of a dropped one."""
        with self.working() as (shared, engine):
            free = (one for one in self._loops if one.free and (one.tensors, one.steps) == (tensors, steps))
            buffers = next(free, None)
            if not buffers:
                buffers = LoopBuffers(self, shared.device, engine, tensors, steps)
                self._loops.append(buffers)
            return TensorRtLoop(self, buffers)

    def decoder(self, tensors: DecoderTensors) -> TensorRtDecoder:
        """Return a decoder without rows; see :meth:`edge.runner.Runner.decoder`. It reuses a dropped one's buffers."""
        with self.working() as (shared, engine):
            buffers = next((one for one in self._decoders if one.free and one.tensors == tensors), None)
            if not buffers:
                buffers = DecoderBuffers(self, shared, engine, tensors)
                self._decoders.append(buffers)
            return TensorRtDecoder(self, buffers, self._check_indices)

    def _allocate(self, shared: SharedDevice, engine: Engine) -> None:
        sizes, mapped_bytes = engine.largest(), self._mapped_bytes
        if mapped_bytes is None:
            mapped_bytes = MAPPED_BYTES if shared.device.facts.integrated else 0
        self._mapped = mapped_bytes
        if not self._preallocates:
            sizes = dict.fromkeys(sizes, 0)
        self._slots = [_Slot(shared.device, sizes, mapped_bytes, self.own) for _ in range(SLOTS)]
        self._loops: list[LoopBuffers] = []
        self._decoders: list[DecoderBuffers] = []
        self._held = (self._slots, self._loops, self._decoders)

    def _start(self, feeds: Mapping[str, Tensor], keep: Collection[str]) -> PendingRun:
        check_feeds(self, feeds, keep, self.subject)
        self._check_indices(feeds)
        slot = next((slot for slot in self._slots if not slot.busy), None)
        if slot is None and self._slots:
            raise RuntimeError(f"{self.subject}: {SLOTS} runs are pending; take the result of one first")
        with self.working() as (shared, engine):
            assert slot
            self._logger.messages.clear()
            shapes = tuple(feeds[spec.name].shape for spec in self.inputs)
            profile = engine.profile_of(shapes)
            output_shapes = engine.output_shapes(profile, shapes)
            if not self._preallocates:
                slot = self._grown(shared, engine, slot, (*shapes, *output_shapes))
            addresses = self._feed(shared, slot, feeds)
            outputs: dict[str, Shape | TensorRtHandle] = {}
            copies: list[tuple[Array, int]] = []
            for spec, shape in zip(self.outputs, output_shapes, strict=True):
                if spec.name in keep:
                    memory = self.buffer(shared, byte_size(spec.datatype, shape))
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

    def _grown(self, shared: SharedDevice, engine: Engine, slot: _Slot, shapes: Sequence[Shape]) -> _Slot:
        """Return a slot with room for tensors of these shapes: the given one, or a larger one in its place."""
        specs = (*self.inputs, *self.outputs)
        sizes = {spec.name: byte_size(spec.datatype, shape) for spec, shape in zip(specs, shapes, strict=True)}
        if all(size <= slot.host[name].size_bytes for name, size in sizes.items()):
            return slot
        larger = _Slot(shared.device, sizes, self._mapped, self.own)
        shared.compute.synchronize()
        self._slots[self._slots.index(slot)] = larger
        for memory in slot.memory:
            engine.forget(memory)
            self.disown(memory)
        return larger

    def _check_indices(self, feeds: Mapping[str, Tensor]) -> None:
        """Check the values that index tables of the model, except those in handles, which were never on the host."""
        for name, limit in self._index_limits.items():
            values = feeds[name]
            if not isinstance(values, np.ndarray) or not values.size:
                continue
            least, most = values.min(), values.max()
            if not (least >= 0 and most < limit):  # false for NaN
                given, subject = (most if least >= 0 else least).item(), f"input {name!r} of {self.subject}"
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
            else:
                addresses.append(self.address_of(spec.name, tensor))
        if copied:
            slot.uploaded.record(shared.uploads)
            shared.compute.wait_for_event(slot.uploaded)
        return addresses
