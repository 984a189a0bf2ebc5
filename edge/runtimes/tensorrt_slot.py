"""Buffers of one pending run in TensorRT, whose tensors lie one behind the other, so that one copy takes all inputs."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from typing import NamedTuple

from edge.datatypes import NUMPY_TYPES, Array, TensorSpec, byte_size
from edge.runtimes.cuda import Device
from edge.runtimes.tensorrt.engine import Enqueued, Shape, TensorRtError, aligned
from edge.runtimes.tensorrt.model import TensorRtModel

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

    def __init__(self, model: TensorRtModel, device: Device, sizes: Mapping[str, int], mapped_bytes: int) -> None:
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

        Args:
            elsewhere: the tensors that are in other memory of the device.
        """
        if len(self.layouts) >= _LAYOUTS:
            self.layouts.clear()
        ends = {True: 0, False: 0}  # of the mapped memory and of the other
        addresses: list[int] = []

        def place(tensors: Mapping[TensorSpec, Shape]) -> tuple[tuple[tuple[str, Array], ...], Copy | None]:
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

        (fed, upload), (fetched, download) = place(inputs), place(outputs)
        shapes = tuple(inputs.values())
        run = Enqueued(profile, shapes, tuple(addresses))
        return Layout(run, fed, fetched, {spec.name: shape for spec, shape in outputs.items()}, upload, download)
