"""Decoders for runners that read the host's memory: keys and values in arrays that grow and shrink with the rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from edge.datatypes import Array, TensorSpec
from edge.runner import DecoderTensors, Runner
from edge.runtimes.host import Group, groups_of, places_for, places_left

#: Computes one step in place, again and again, on arrays that it was made for; raises as
#: :meth:`edge.runner.Runner.infer`.
StepRun = Callable[[], None]


class HostDecoder:
    """The rows of a decoder; see :class:`edge.runner.DeviceDecoder`.

    The caches of all layers with equal shapes are one array, so that a step writes its new entries with one assignment
    for each shape. A step uses the same arrays until rows or places change, so that ``bind`` can prepare it.

    Args:
        infer: computes a prompt.
        bind: returns a function that computes a step on the given input and output arrays.
        specs: of the graph's inputs and outputs.
    """

    def __init__(
        self,
        infer: Callable[[Mapping[str, Array]], Mapping[str, Array]],
        bind: Callable[[dict[str, Array]], StepRun],
        specs: Sequence[TensorSpec],
        tensors: DecoderTensors,
    ) -> None:
        self._infer, self._bind, self._tensors = infer, bind, tensors
        shapes = {spec.name: spec for spec in specs}
        new = dict(tensors.cache)
        groups = groups_of(shapes[past] for past in new)
        self._groups = [_Arrays(group, [(past, new[past]) for past in group.names]) for group in groups]
        self._vocabulary = shapes[tensors.logits].shape[1]
        self._rows = 0
        self._runs: dict[int, tuple[StepRun, Array]] = {}  # by rows: a step, and its logits
        self._lengths: Array = np.zeros((0, 1), np.int64)
        self._resize(1, 0)

    @property
    def cache_bytes(self) -> int:
        """Memory of the cache."""
        return sum(group.past.nbytes for group in self._groups)

    def add(self, tokens: Array, lengths: Array) -> Array:
        """Add rows; see :meth:`edge.runner.DeviceDecoder.add`."""
        names, (count, longest) = self._tensors, tokens.shape
        feeds: dict[str, Array] = {
            names.tokens: tokens,
            names.lengths: np.zeros((count, 1), np.int64),
            names.last: lengths[:, None] - 1,
        }
        for group in self._groups:
            # One place, which no row uses: a dimension of 0 is not possible everywhere.
            feeds |= dict.fromkeys((past for past, _ in group.names), group.empty(count))
        outputs = self._infer(feeds)
        begin, end = self._rows, self._rows + count
        capacity = len(self._lengths)
        if end > capacity or longest >= self._places:
            places = max(longest + 1, self._places)  # present rows may be longer
            self._resize(capacity if end <= capacity else max(end, 2 * capacity), places)
        for group in self._groups:
            for past, (_, new) in zip(group.past, group.names, strict=True):
                past[begin:end, :, :longest] = outputs[new]
                past[begin:end, :, longest:] = 0  # a NaN that an earlier row left would spoil the products
        self._lengths[begin:end, 0] = lengths
        self._rows = end
        return outputs[names.logits]

    def keep(self, rows: int, moves: Sequence[tuple[int, int]]) -> None:
        """Copy rows from the end into gaps; see :meth:`edge.runner.DeviceDecoder.keep`."""
        for source, target in moves:
            length = self._lengths[target, 0] = self._lengths[source, 0]
            for group in self._groups:
                group.past[:, target, :, :length] = group.past[:, source, :, :length]
                group.past[:, target, :, length:] = 0
        self._rows = rows
        places = places_left(int(self._lengths[:rows].max(initial=0)))
        if 2 * places <= self._places:  # each step reads all of them
            self._resize(max(min(2 * rows, len(self._lengths)), 1), places)

    def step(self, tokens: Array) -> Array:
        """Append a token to each row; see :meth:`edge.runner.DeviceDecoder.step`."""
        rows = self._rows
        lengths = self._lengths[:rows, 0]
        if int(lengths.max()) >= self._places:
            self._resize(len(self._lengths), self._places + 1)
            lengths = self._lengths[:rows, 0]
        self._tokens[:rows, 0] = tokens
        if rows not in self._runs:
            self._runs[rows] = self._bound(rows)
        run, logits = self._runs[rows]
        run()
        index = np.arange(rows)
        for group in self._groups:
            # [rows, layers, heads, width] on both sides: the dimension of the two index arrays comes first.
            group.past[:, index, :, lengths] = group.new[:, :rows, :, 0].swapaxes(0, 1)
        lengths += 1
        return logits

    def _bound(self, rows: int) -> tuple[StepRun, Array]:
        names = self._tensors
        logits = self._logits[:rows]
        # Views of arrays that stay: a binding keeps none of them alive.
        arrays = {names.tokens: self._tokens[:rows], names.lengths: self._lengths[:rows], names.logits: logits}
        arrays[names.last] = self._last[:rows]
        for group in self._groups:
            for number, (past, new) in enumerate(group.names):
                arrays[past], arrays[new] = group.past[number, :rows], group.new[number, :rows]
        return self._bind(arrays), logits

    def _resize(self, capacity: int, places: int) -> None:
        """Replace the arrays by ones for so many rows, and at least so many places, with the present rows."""
        self._places = places_for(places)
        old, self._lengths = self._lengths, np.zeros((capacity, 1), np.int64)
        self._lengths[: self._rows] = old[: self._rows]
        self._tokens, self._last = (np.zeros((capacity, 1), np.int64) for _ in range(2))  # a step has one token
        self._logits = np.zeros((capacity, self._vocabulary), np.float32)
        for group in self._groups:
            group.resize(capacity, self._places, self._rows)
        self._runs.clear()


class _Arrays:
    """The caches with equal shapes: ``past`` [caches, rows, heads, places, width] and ``new``, with one place."""

    def __init__(self, group: Group, names: list[tuple[str, str]]) -> None:
        self.names, self._group = names, group
        self.past = self.new = self._zeros(len(names), 0)

    def empty(self, rows: int) -> Array:
        """Return a cache with one place for so many rows."""
        return self._zeros(rows, places=1)

    def resize(self, capacity: int, places: int, rows: int) -> None:
        """Replace the arrays, with the first ``rows`` of the old ones."""
        old, kept = self.past, min(places, self.past.shape[3])
        self.past = self._zeros(len(self.names), capacity, places=places)
        self.past[:, :rows, :, :kept] = old[:, :rows, :, :kept]
        self.new = self._zeros(len(self.names), capacity, places=1)

    def _zeros(self, *before: int, places: int = 0) -> Array:
        return np.zeros((*before, self._group.heads, places, self._group.width), self._group.dtype)


def infer_into(runner: Runner, arrays: Mapping[str, Array]) -> StepRun:
    """Return a step of any runner: it copies outputs into their arrays, and a GPU's runner all arrays to the device."""
    names = [spec.name for spec in runner.inputs]
    feeds = {name: arrays[name] for name in names}

    def run() -> None:
        for name, array in runner.infer(feeds).items():
            arrays[name][:] = array

    return run
