"""Decoders in TensorRT: keys and values in device memory, which the engine reads where they are.

The engine writes new entries one behind the other, and copies within the device take them to their places. Only tokens
and lengths come from the host, in memory that the device reads itself, and only logits go there. A decoder in blocks
has an engine for each, in one stream, and what one computes for the next stays on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from math import gcd
from typing import Any

import numpy as np

from edge.datatypes import Array
from edge.errors import InvalidRequest
from edge.runner import DecoderTensors
from edge.runtimes.cuda import CudaDevice, Memory, Slices, is_out_of_memory
from edge.runtimes.host import Group, groups_of, places_for, places_left
from edge.runtimes.tensorrt.device import SharedDevice
from edge.runtimes.tensorrt.engine import ALIGNMENT, Engine, Enqueued, Shape, aligned
from edge.runtimes.tensorrt.model import TensorRtModel

_INDEX = np.dtype(np.int64)
_NUMBER = np.dtype(np.float32)


class Entries:
    """Tensors [rows, heads, places, width] in one memory, those of a group one behind the other.

    A line has the places of one head, and a slice is one tensor. Entries without an address tell their size.
    """

    def __init__(self, groups: tuple[Group, ...], rows: int, places: int, address: int = 0) -> None:
        self._groups, self.rows, self.places = groups, rows, places
        self._starts: list[Slices] = []  # of the groups
        end = address
        for group in groups:
            pitch = places * group.entry_bytes
            step = ALIGNMENT // gcd(ALIGNMENT, pitch)
            lines = -(-rows * group.heads // step) * step
            self._starts.append(Slices(end, pitch, lines))
            end += len(group.names) * lines * pitch
        self.size_bytes = end - address

    def at(self, address: int) -> Entries:
        """Return the same entries in a memory."""
        return Entries(self._groups, self.rows, self.places, address)

    def addresses(self) -> Mapping[str, int]:
        return dict(self._tensors())

    def shapes(self, rows: int) -> Mapping[str, Shape]:
        """Return the shape of each tensor, of its first rows."""
        return {name: (rows, group.heads, self.places, group.width) for group in self._groups for name in group.names}

    def clear(self, device: CudaDevice, row: int, rows: int, stream: Any) -> None:
        """Enqueue a fill of some rows with zeros."""
        for group, start in zip(self._groups, self._starts, strict=True):
            row_bytes = group.heads * start.pitch
            for number in range(len(group.names)):
                address = start.address + number * start.lines * start.pitch + row * row_bytes
                device.clear(address, rows * row_bytes, stream)

    def copy(
        self,
        source: Entries,
        moved: tuple[int, int],
        device: CudaDevice,
        stream: Any,
        *,
        rows: int,
        position: int,
        places: int,
    ) -> None:
        """Enqueue copies from the first places of rows of ``source``, or of these entries, one for each group.

        ``moved`` is the first row there, and the first one here; ``position`` is the first place here.
        """
        for group, start, other in zip(self._groups, self._starts, source._starts, strict=True):
            there, here = (row * group.heads for row in moved)
            target = start.address + here * start.pitch + position * group.entry_bytes
            device.copy_slices(
                start._replace(address=target),
                other._replace(address=other.address + there * other.pitch),
                (places * group.entry_bytes, rows * group.heads, len(group.names)),
                stream,
            )

    def _tensors(self) -> Iterator[tuple[str, int]]:
        for group, start in zip(self._groups, self._starts, strict=True):
            for number, name in enumerate(group.names):
                yield name, start.address + number * start.lines * start.pitch


class DecoderBuffers:
    """The memory of one decoder on the device and on the host, for the most rows of any profile.

    Args:
        model: of the first block; it owns the memory.
        engines: of the blocks, in their order.

    Raises:
        pycuda.driver.MemoryError: the device has too little memory. Nothing stays allocated.
    """

    def __init__(
        self, model: TensorRtModel, shared: SharedDevice, engines: Sequence[Engine], tensors: DecoderTensors
    ) -> None:
        self._model, self._shared, self._engines, self.tensors = model, shared, engines, tensors
        self.free = True
        specs = {spec.name: spec for engine in engines for spec in (*engine.inputs, *engine.outputs)}
        # One profile may be for prompts and one for single tokens: what is least fits all of them, and all blocks.
        prompts, caches = engines[0].ranges(tensors.tokens), engines[0].ranges(tensors.cache[0][0])
        self.least_rows, self.most_rows = max(r.least[0] for r in prompts), max(r.most[0] for r in prompts)
        self.least_tokens, self.most_tokens = min(r.least[1] for r in prompts), max(r.most[1] for r in prompts)
        self.least_places, self.most_places = max(r.least[2] for r in caches), max(r.most[2] for r in caches)
        self._past = groups_of(specs[past] for past, _ in tensors.cache)
        self._new = groups_of(specs[new] for _, new in tensors.cache)
        self._widths = {name: specs[name].shape[2] for name in tensors.hidden}
        rows, vocabulary = self.most_rows, specs[tensors.logits].shape[1]
        step = Entries(self._new, rows, 1)
        indices = [aligned(count * _INDEX.itemsize) for count in (rows * self.most_tokens, rows, rows, rows, rows)]
        logits_bytes = rows * vocabulary * _NUMBER.itemsize
        memory, mapped, host = model.own_all(
            lambda: shared.device.allocate(aligned(logits_bytes) + step.size_bytes + self._hidden_bytes(rows)),
            lambda: shared.device.allocate_host(sum(indices), mapped=True),
            lambda: shared.device.allocate_host(logits_bytes),
        )
        self._logits, self.new = memory.address, step.at(memory.address + aligned(logits_bytes))
        self._hidden = memory.address + aligned(logits_bytes) + step.size_bytes
        ends = np.cumsum(indices).tolist()
        starts = [0, *ends[:-1]]
        self._addresses = [mapped.address + start for start in starts]
        #: Prompts, their last places, zeros, tokens of a step, and tokens of each row in the cache.
        self.prompts, self.last, zeros, self.step_tokens, self.lengths = (
            mapped.bytes[start:end].view(_INDEX) for start, end in zip(starts, ends, strict=True)
        )
        zeros[:] = 0
        self.logits: Array = host.bytes.view(_NUMBER).reshape(rows, vocabulary)
        self.cache = Entries(self._past, rows, 0)
        self._memory: Memory | None = None  # of the cache
        self._prompt_memory: Memory | None = None  # of new entries
        self._steps: dict[int, list[Enqueued]] = {}  # of the blocks, by the number of rows
        self.done = shared.device.event()

    @property
    def cache_bytes(self) -> int:
        """Device memory of the cache."""
        return self._memory.size_bytes if self._memory and self._memory.address else 0

    def reserve(self, places: int, rows: int) -> None:
        """Make room for so many places; the present ``rows`` stay. After an error the cache is as before."""
        if places > self.cache.places:
            self._resize(self._within(places_for(places)), rows)

    def shrink(self, longest: int, rows: int) -> None:
        """Free the cache of no rows, and make that of ``rows`` of at most ``longest`` tokens smaller if half is unused.

        Without memory for both, it stays as it is. The smallest one always does.
        """
        places = self._within(places_left(longest))
        if not rows and places < self.cache.places:
            self._shared.compute.synchronize()
            self._replace(Entries(self._past, self.most_rows, 0), None)
        elif rows and 2 * places <= self.cache.places:  # each step reads all of them
            try:
                self._resize(places, rows)
            except self._shared.device.errors as error:
                if not is_out_of_memory(str(error)):
                    raise

    def _within(self, places: int) -> int:
        return min(max(places, self.least_places), self.most_places)

    def _resize(self, places: int, rows: int) -> None:
        model, shared, old = self._model, self._shared, self.cache
        cache = Entries(self._past, self.most_rows, places)
        memory = model.own(shared.device.allocate(cache.size_bytes))
        try:
            cache = cache.at(memory.address)
            shared.device.clear(memory.address, memory.size_bytes, shared.compute)
            if rows:
                kept = min(places, old.places)
                cache.copy(old, (0, 0), shared.device, shared.compute, rows=rows, position=0, places=kept)
            shared.compute.synchronize()
        except BaseException:
            if not shared.synchronize():
                model.disown(memory)
            raise
        self._replace(cache, memory)

    def _replace(self, cache: Entries, memory: Memory | None) -> None:
        old, self.cache, self._memory = self._memory, cache, memory
        self._steps.clear()
        if old:
            for engine in self._engines:
                engine.forget(old)
            self._model.disown(old)

    def run_prompts(self, count: int, longest: int) -> Entries:
        """Enqueue a run of ``count`` prompts, and the copy of their logits; return the new entries.

        They are valid until :meth:`free_prompts`.
        """
        shared, names = self._shared, self.tensors
        self.free_prompts()  # of a call that failed
        new, past = Entries(self._new, count, longest), Entries(self._past, count, self.least_places)
        size = new.size_bytes + past.size_bytes
        memory = self._prompt_memory = self._model.own(
            shared.device.allocate(size + self._hidden_bytes(count * longest))
        )
        new, past = new.at(memory.address), past.at(memory.address + new.size_bytes)
        shared.device.clear(memory.address + new.size_bytes, past.size_bytes, shared.compute)
        prompts, last, zeros, _, _ = self._addresses
        addresses = {names.tokens: prompts, names.lengths: zeros, names.last: last}
        runs = self._runs(addresses, past, new, memory.address + size, count, longest)
        self._enqueue(runs, count, recurs=False)
        return new

    def free_prompts(self) -> None:
        """Free the new entries of prompts, which no work uses."""
        memory, self._prompt_memory = self._prompt_memory, None
        if memory:
            self._model.disown(memory)

    def run_step(self, rows: int) -> None:
        """Enqueue a step of some rows, and the copy of their logits."""
        runs = self._steps.get(rows)
        if runs is None:
            names = self.tensors
            _, _, zeros, tokens, lengths = self._addresses
            addresses = {names.tokens: tokens, names.lengths: lengths, names.last: zeros}
            runs = self._steps[rows] = self._runs(addresses, self.cache, self.new, self._hidden, rows, 1)
        self._enqueue(runs, rows, recurs=True)

    def _runs(
        self, addresses: Mapping[str, int], past: Entries, new: Entries, hidden: int, rows: int, tokens: int
    ) -> list[Enqueued]:
        """Return the run of each block; ``hidden`` is the address of what passes between them."""
        names, column = self.tensors, (rows, 1)
        shapes: dict[str, Shape] = {names.tokens: (rows, tokens), names.lengths: column, names.last: column}
        shapes |= past.shapes(rows)
        shapes |= {name: (rows, tokens, width) for name, width in self._widths.items()}
        addresses = {**addresses, **past.addresses(), **new.addresses(), names.logits: self._logits}
        # A block reads one half of this memory, and writes the other one.
        half = self._hidden_bytes(rows * tokens) // 2
        addresses |= {name: hidden + number % 2 * half for number, name in enumerate(names.hidden)}
        return [engine.run_of(shapes, addresses) for engine in self._engines]

    def _hidden_bytes(self, tokens: int) -> int:
        return 2 * aligned(tokens * max(self._widths.values(), default=0) * _NUMBER.itemsize)

    def _enqueue(self, runs: Sequence[Enqueued], rows: int, *, recurs: bool) -> None:
        shared = self._shared
        target = self.logits[:rows].reshape(-1).view(np.uint8)

        def fetch(_: int) -> None:
            shared.device.copy_out(target, self._logits, shared.compute)

        for engine, run in zip(self._engines, runs, strict=True):
            engine.enqueue(run, after=fetch if engine is self._engines[-1] else None, recurs=recurs)


class TensorRtDecoder:
    """The rows of a decoder; see :class:`edge.runner.DeviceDecoder`.

    A step computes a number of rows that is a power of two, so that few graphs are enough. The cache is 0 behind the
    end of each row: the engine multiplies these places by 0, and a NaN of an earlier row would stay one.
    ``checks``, one of each block, raise an InvalidRequest for indices outside their tables, by the inputs' names.
    """

    def __init__(
        self, model: TensorRtModel, buffers: DecoderBuffers, checks: Sequence[Callable[[Mapping[str, Array]], None]]
    ) -> None:
        self._model, self._buffers, self._checks = model, buffers, checks
        self._rows = 0
        with model.working():
            buffers.shrink(0, 0)
        buffers.lengths[:] = 0
        buffers.free = False

    def __del__(self) -> None:
        self._buffers.free = True

    @property
    def cache_bytes(self) -> int:
        return self._buffers.cache_bytes

    def add(self, tokens: Array, lengths: Array) -> Array:
        buffers, names, begin = self._buffers, self._buffers.tensors, self._rows
        count, longest = len(tokens), int(lengths.max())
        room = buffers.most_rows - begin
        most = min(buffers.most_tokens, buffers.most_places)
        if count > room or longest > most:
            fix = "Send fewer or shorter prompts, or build the engine with a larger profile."
            raise self._rejected([count, longest], f"at most {[room, most]}, rows and tokens", fix)
        tokens, last = tokens[:, :longest], lengths[:, None] - 1
        self._check({names.tokens: tokens, names.lengths: np.zeros_like(last), names.last: last})
        padded = max(count, buffers.least_rows), max(longest, buffers.least_tokens)
        prompts = buffers.prompts[: padded[0] * padded[1]].reshape(padded)
        with self._model.working() as (shared, _):
            buffers.reserve(longest, begin)
            prompts[:], buffers.last[: padded[0]] = 0, 0
            prompts[:count, :longest], buffers.last[:count] = tokens, last[:, 0]
            new = buffers.run_prompts(*padded)
            buffers.cache.clear(shared.device, begin, count, shared.compute)
            for row, rows, length in _neighbours(lengths):
                self._copy(shared, new, (row, begin + row), rows=rows, position=0, places=length)
            buffers.done.record(shared.compute)
            buffers.done.synchronize()
            buffers.free_prompts()
        buffers.lengths[begin : begin + count] = lengths
        self._rows += count
        return buffers.logits[:count]

    def keep(self, rows: int, moves: Sequence[tuple[int, int]]) -> None:
        buffers = self._buffers
        with self._model.working() as (shared, _):
            for move in moves:
                self._copy(shared, buffers.cache, move, position=0, places=buffers.cache.places)
                buffers.lengths[move[1]] = buffers.lengths[move[0]]
            buffers.lengths[rows:] = 0
            self._rows = rows
            buffers.shrink(int(buffers.lengths.max()), rows)

    def step(self, tokens: Array) -> Array:
        buffers, names, rows = self._buffers, self._buffers.tensors, self._rows
        lengths = buffers.lengths[:rows]
        longest = int(lengths.max())
        if longest >= buffers.most_places:
            fix = "End the text earlier, or build the engine with a larger profile."
            raise self._rejected([rows, longest + 1], f"at most {buffers.most_places} tokens", fix)
        column = lengths[:, None]
        self._check({names.tokens: tokens[:, None], names.lengths: column, names.last: np.zeros_like(column)})
        padded = min(max(1 << (rows - 1).bit_length(), buffers.least_rows), buffers.most_rows)
        with self._model.working() as (shared, _):
            buffers.reserve(longest + 1, rows)
            buffers.step_tokens[:rows], buffers.step_tokens[rows:] = tokens, 0
            buffers.run_step(padded)
            buffers.done.record(shared.compute)
            # The host samples meanwhile. What comes next waits for these copies, as it is in the same stream.
            for row, count, length in _neighbours(lengths):
                self._copy(shared, buffers.new, (row, row), rows=count, position=length, places=1)
            buffers.done.synchronize()
        lengths += 1
        return buffers.logits[:rows]

    def _check(self, feeds: Mapping[str, Array]) -> None:
        for check in self._checks:
            check(feeds)

    def _copy(
        self, shared: SharedDevice, source: Entries, move: tuple[int, int], *, rows: int = 1, position: int, places: int
    ) -> None:
        cache = self._buffers.cache
        cache.copy(source, move, shared.device, shared.compute, rows=rows, position=position, places=places)

    def _rejected(self, given: list[int], expected: str, fix: str) -> InvalidRequest:
        return InvalidRequest(f"rows of {self._model.subject}", given=given, expected=expected, fix=fix)


def _neighbours(lengths: Array) -> Iterator[tuple[int, int, int]]:
    """Yield the first row, the number of rows and the length of neighbours of one length, which share a copy."""
    row = 0
    for length, equal in groupby(lengths.tolist()):
        count = len(list(equal))
        yield row, count, length
        row += count
