"""Runner for TensorRT: copies inputs to the GPU, runs the engine, and copies outputs back or keeps them there."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from contextlib import ExitStack
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from edge.datatypes import NUMPY_TYPES, Array, TensorSpec, byte_size
from edge.errors import InvalidRequest
from edge.runner import DecoderTensors, LoopTensors, Tensor, check_feeds
from edge.runtimes.cuda import CudaDevice
from edge.runtimes.tensorrt.decoder import DecoderBuffers, TensorRtDecoder
from edge.runtimes.tensorrt.device import SharedDevice
from edge.runtimes.tensorrt.engine import Copies, Engine, Enqueued, Shape, TensorRtError, aligned
from edge.runtimes.tensorrt.loop import LoopBuffers, TensorRtLoop
from edge.runtimes.tensorrt.model import TensorRtHandle, TensorRtModel
from edge.runtimes.tensorrt.package import Flavor

#: Runs that may be pending at once: the device computes one while the host prepares the other.
SLOTS = 2
#: The largest tensor that an integrated GPU reads and writes in the host's memory, which it does not cache. For so
#: little data that is faster than a copy (CUDA for Tegra, application note, 3.2).
MAPPED_BYTES = 16 * 1024
#: Larger inputs are copied while the run before is computed. A copy of so much takes an Orin's memory about as long as
#: the host takes for the three calls of the driver that this needs (calculated); smaller ones are part of the graph.
CAPTURED_BYTES = 1024 * 1024

#: The most layouts that a slot remembers.
_LAYOUTS = 256


class Copy(NamedTuple):
    """A copy between page-locked memory and the device."""

    address: int
    raw: Array


class Layout(NamedTuple):
    """Where the tensors of runs with equal input shapes are."""

    run: Enqueued  # the address of a tensor that is not in the slot is 0
    inputs: tuple[tuple[str, Array], ...]  # those in the slot, in the host's memory
    outputs: tuple[tuple[str, Array], ...]
    shapes: Mapping[str, Shape]  # of all outputs
    upload: Copy | None  # of the inputs, unless the device reads them in the host's memory
    download: Copy | None


class Slot:
    """The buffers of one pending run.

    Args:
        sizes: bytes of the largest tensor of each name.
        mapped_bytes: the largest tensor that the device uses in the host's memory. The others are copied.

    Raises:
        pycuda.driver.MemoryError: the device has too little memory. Nothing stays allocated.
    """

    def __init__(self, model: TensorRtModel, device: CudaDevice, sizes: Mapping[str, int], mapped_bytes: int) -> None:
        self.uploaded = device.event()  # after a copy that is not part of the run
        self.done = device.event()  # after the run
        self.busy = False
        self.sizes = sizes
        self._is_mapped = {name: size <= mapped_bytes for name, size in sizes.items()}
        mapped_bytes, copied_bytes = (
            sum(aligned(size) for name, size in sizes.items() if self._is_mapped[name] == mapped)
            for mapped in (True, False)
        )
        self.memory = self._mapped, self._host, self._device = model.own_all(
            lambda: device.allocate_host(mapped_bytes, mapped=True),
            lambda: device.allocate_host(copied_bytes),
            lambda: device.allocate(copied_bytes),
        )
        #: By whatever tells runs apart; at most :data:`_LAYOUTS`.
        self.layouts: dict[Hashable, Layout] = {}

    def lay_out(
        self,
        profile: int,
        inputs: Mapping[TensorSpec, Shape],
        outputs: Mapping[TensorSpec, Shape],
        elsewhere: Collection[str],
    ) -> Layout:
        """Return where the tensors of some shapes are; raise a TensorRtError if one exceeds its buffer.

        Those ``elsewhere`` are in other memory of the device.
        """
        if len(self.layouts) >= _LAYOUTS:
            self.layouts.clear()
        ends = {True: 0, False: 0}  # of the mapped memory and of the other
        addresses: list[int] = []

        def arrange(tensors: Mapping[TensorSpec, Shape]) -> tuple[tuple[tuple[str, Array], ...], Copy | None]:
            arrays, start = [], ends[False]
            for spec, shape in tensors.items():
                if spec.name in elsewhere:
                    addresses.append(0)
                    continue
                size, room = byte_size(spec.datatype, shape), self.sizes[spec.name]
                if size > room:
                    raise TensorRtError(f"{spec.name!r}: got {list(shape)}, {size} bytes, expected at most {room}")
                is_mapped = self._is_mapped[spec.name]
                host, device = (self._mapped, self._mapped) if is_mapped else (self._host, self._device)
                begin, ends[is_mapped] = ends[is_mapped], ends[is_mapped] + aligned(size)
                raw = host.bytes[begin : begin + size]
                arrays.append((spec.name, raw.view(NUMPY_TYPES[spec.datatype]).reshape(shape)))
                addresses.append(device.address + begin)
            end = ends[False]
            copy = Copy(self._device.address + start, self._host.bytes[start:end]) if end > start else None
            return tuple(arrays), copy

        (fed, upload), (fetched, download) = arrange(inputs), arrange(outputs)
        shapes = tuple(inputs.values())
        run = Enqueued(profile, shapes, tuple(addresses))
        return Layout(run, fed, fetched, {spec.name: shape for spec, shape in outputs.items()}, upload, download)


#: A free slot, and of a run the key of its layout, and that if it is known.
Located = tuple[Slot | None, Hashable, Layout | None]


class PendingRun:
    """A started run; see :class:`edge.runner.Pending`."""

    def __init__(self, runner: TensorRtRunner, slot: Slot, layout: Layout, kept: dict[str, Tensor]) -> None:
        self._runner = runner
        self.slot: Slot | None = slot
        self.layout, self.kept = layout, kept

    def result(self) -> dict[str, Array]:
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
        return self.run(feeds)  # type: ignore[return-value] # as in result()

    def start(self, feeds: Mapping[str, Array]) -> PendingRun:
        """Start a run; see :class:`edge.runner.OverlappingRunner`. It raises the errors of :meth:`infer`."""
        located = self._located(feeds, ())
        with self.working() as (shared, engine):
            return self._started(shared, engine, located, feeds, ())

    def run(self, feeds: Mapping[str, Tensor], keep: Collection[str] = ()) -> dict[str, Tensor]:
        """Compute all outputs and keep some on the device; see :class:`edge.runner.Runner`.

        It raises the errors of :meth:`infer`, and an InvalidRequest if ``keep`` is not among the outputs.
        """
        located = self._located(feeds, keep)
        with self.working() as (shared, engine):
            return self._finished(self._started(shared, engine, located, feeds, keep))

    def finish(self, pending: PendingRun) -> dict[str, Tensor]:
        if pending.slot is None:
            raise RuntimeError(f"{self.subject}: the result of this run has been taken")
        with self.working():
            return self._finished(pending)

    def loop(self, tensors: LoopTensors, steps: int = 1) -> TensorRtLoop:
        """Return a loop without rows; see :meth:`edge.runner.Runner.loop`. It reuses the buffers of a dropped one."""
        with self.working() as (shared, engine):
            free = (each for each in self._loops if each.free and (each.tensors, each.steps) == (tensors, steps))
            buffers = next(free, None)
            if not buffers:
                buffers = LoopBuffers(self, shared.device, engine, tensors, steps)
                self._loops.append(buffers)
            return TensorRtLoop(self, buffers)

    def decoder(self, tensors: DecoderTensors, *further: TensorRtRunner) -> TensorRtDecoder:
        """Return a decoder without rows; see :meth:`edge.runner.Runner.decoder`. It reuses a dropped one's buffers."""
        blocks = (self, *further)
        with ExitStack() as stack:
            opened = [stack.enter_context(block.working()) for block in blocks]
            buffers = next((each for each in self._decoders if each.free and each.tensors == tensors), None)
            if not buffers:
                buffers = DecoderBuffers(self, opened[0][0], [engine for _, engine in opened], tensors)
                self._decoders.append(buffers)
            return TensorRtDecoder(self, buffers, [block._check_indices for block in blocks])

    def _allocate(self, shared: SharedDevice, engine: Engine) -> None:
        sizes, mapped_bytes = engine.largest(), self._mapped_bytes
        if mapped_bytes is None:
            mapped_bytes = MAPPED_BYTES if shared.device.facts.integrated else 0
        self._mapped = mapped_bytes
        if not self._preallocates:
            sizes = dict.fromkeys(sizes, 0)
        self._slots = [Slot(self, shared.device, sizes, mapped_bytes) for _ in range(SLOTS)]
        self._loops: list[LoopBuffers] = []
        self._decoders: list[DecoderBuffers] = []
        self._held = (self._slots, self._loops, self._decoders)

    def _located(self, feeds: Mapping[str, Tensor], keep: Collection[str]) -> Located:
        """Check the arguments of a run, and return where its tensors are; no slot if the runner is closed."""
        slot = next((slot for slot in self._slots if not slot.busy), None)
        if slot is None and self._slots:
            raise RuntimeError(f"{self.subject}: {SLOTS} runs are pending; take the result of one first")
        key = tuple([(name, tensor.shape, _kind(tensor)) for name, tensor in feeds.items()]), tuple(keep)
        layout = slot.layouts.get(key) if slot else None
        if layout is None:  # otherwise the same names, shapes and datatypes have been checked
            check_feeds(self, feeds, keep, self.subject)
        self._check_indices(feeds)
        return slot, key, layout

    def _started(
        self, shared: SharedDevice, engine: Engine, located: Located, feeds: Mapping[str, Tensor], keep: Collection[str]
    ) -> PendingRun:
        self._logger.messages.clear()
        slot, key, layout = located
        assert slot, "the runner is open"
        if layout is None:
            slot, layout = self._laid_out(shared, engine, slot, key, feeds, keep)
        for name, array in layout.inputs:
            array[...] = feeds[name]
        kept: dict[str, Tensor] = {}
        run = layout.run
        if 0 in run.addresses:
            addresses = dict(zip((spec.name for spec in (*self.inputs, *self.outputs)), run.addresses, strict=True))
            for spec in self.inputs:
                addresses[spec.name] = addresses[spec.name] or self.address_of(spec.name, feeds[spec.name])
            for spec in self.outputs:
                if spec.name in keep:
                    shape = layout.shapes[spec.name]
                    memory = self.buffer(shared, byte_size(spec.datatype, shape))
                    kept[spec.name] = TensorRtHandle(self, memory, spec.datatype, shape)
                    addresses[spec.name] = memory.address
            run = run._replace(addresses=tuple(addresses.values()))
        engine.enqueue(run, before=self._upload(shared, slot, layout), after=self._download(shared, layout))
        slot.done.record(shared.compute)
        slot.busy = True
        return PendingRun(self, slot, layout, kept)

    def _finished(self, pending: PendingRun) -> dict[str, Tensor]:
        slot, pending.slot = pending.slot, None
        assert slot
        try:
            slot.done.synchronize()
            outputs: dict[str, Tensor] = {name: array.copy() for name, array in pending.layout.outputs}
            return outputs | pending.kept
        finally:
            slot.busy = False

    def _check_indices(self, feeds: Mapping[str, Tensor]) -> None:
        """Check the values that index tables of the model, except those in handles, which were never on the host."""
        for name, limit in self._index_limits.items():
            values = feeds[name]
            if not isinstance(values, np.ndarray) or not values.size:
                continue
            # As an unsigned integer, a negative one is larger than any table: one pass instead of two.
            if values.dtype == np.int64 and np.maximum.reduce(values.view(np.uint64), axis=None) < limit:
                continue
            least, most = values.min(), values.max()
            if not (least >= 0 and most < limit):  # false for NaN
                given, subject = (most if least >= 0 else least).item(), f"input {name!r} of {self.subject}"
                expected = f"values from 0 to {limit - 1}, the rows of a table of the model"
                fix = "Send the token ids of this model's own tokenizer."
                raise InvalidRequest(subject, given=given, expected=expected, fix=fix)

    def _laid_out(
        self,
        shared: SharedDevice,
        engine: Engine,
        slot: Slot,
        key: Hashable,
        feeds: Mapping[str, Tensor],
        keep: Collection[str],
    ) -> tuple[Slot, Layout]:
        """Return a new layout, and its slot, which may be a larger one."""
        shapes = tuple(feeds[spec.name].shape for spec in self.inputs)
        profile = engine.profile_of(shapes)
        inputs = dict(zip(self.inputs, shapes, strict=True))
        outputs = dict(zip(self.outputs, engine.output_shapes(profile, shapes), strict=True))
        if not self._preallocates:
            slot = self._grown(shared, engine, slot, inputs | outputs)
        elsewhere = {*keep, *(name for name, tensor in feeds.items() if not isinstance(tensor, np.ndarray))}
        layout = slot.layouts[key] = slot.lay_out(profile, inputs, outputs, elsewhere)
        return slot, layout

    def _grown(self, shared: SharedDevice, engine: Engine, slot: Slot, shapes: Mapping[TensorSpec, Shape]) -> Slot:
        """Return a slot with room for tensors of these shapes: the given one, or a larger one in its place."""
        sizes = {spec.name: byte_size(spec.datatype, shape) for spec, shape in shapes.items()}
        if all(size <= slot.sizes[name] for name, size in sizes.items()):
            return slot
        larger = Slot(self, shared.device, sizes, self._mapped)
        shared.compute.synchronize()
        self._slots[self._slots.index(slot)] = larger
        for memory in slot.memory:
            engine.forget(memory)
            self.disown(memory)
        return larger

    def _upload(self, shared: SharedDevice, slot: Slot, layout: Layout) -> Copies | None:
        """Return what copies the inputs to the device before the run; None if nothing has to, or it is on the way."""
        if not layout.upload:
            return None
        address, raw = layout.upload
        if raw.size <= CAPTURED_BYTES:
            return lambda _: shared.device.copy_in(address, raw, shared.compute)
        shared.device.copy_in(address, raw, shared.uploads)
        slot.uploaded.record(shared.uploads)
        shared.compute.wait_for_event(slot.uploaded)
        return None

    def _download(self, shared: SharedDevice, layout: Layout) -> Copies | None:
        """Return what copies the outputs to the host after the run; None if nothing has to."""
        if not layout.download:
            return None
        address, raw = layout.download
        return lambda _: shared.device.copy_out(raw, address, shared.compute)


def _kind(tensor: Tensor) -> Hashable:
    """Return what tells apart datatypes, and tensors on the host from those on the device."""
    return tensor.dtype if isinstance(tensor, np.ndarray) else tensor.datatype
