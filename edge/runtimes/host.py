"""Loops and decoders for runners that read the host's memory: rows in arrays, which grow and shrink with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from edge.datatypes import NUMPY_TYPES, Array, TensorSpec
from edge.runner import DecoderTensors, LoopTensors, Runner, Tensor

#: Computes one run in place, again and again, on arrays that it was made for; raises as
#: :meth:`edge.runner.Runner.infer`.
BoundRun = Callable[[], None]
#: Returns a run on the given input and output arrays.
Bind = Callable[[Mapping[str, Array]], BoundRun]

#: Tokens of a row that a cache has room for at first; it doubles as rows grow.
FEWEST_PLACES = 32
#: A cache that shrinks has this part of its longest row as room, or it would soon grow again.
_ROOM = 1 / 8


def copying(runner: Runner) -> Bind:
    """Return runs of any runner that copy outputs into their arrays, and a GPU's runner all arrays to the device."""

    def bind(arrays: Mapping[str, Array]) -> BoundRun:
        feeds = {spec.name: arrays[spec.name] for spec in runner.inputs}

        def run() -> None:
            for name, array in runner.infer(feeds).items():
                arrays[name][:] = array

        return run

    return bind


class HostLoop:
    """The rows of a loop; see :class:`edge.runner.DeviceLoop`.

    Each step reads the state from one array and writes the next one into another, in turn. All prompts are as long as
    the longest one at present. The runs for each number of rows are bound to the arrays once.
    """

    def __init__(self, runner: Runner, tensors: LoopTensors, steps: int, bind: Bind) -> None:
        self._bind, self._tensors, self._steps = bind, tensors, steps
        spec = next(spec for spec in runner.inputs if spec.name == tensors.state)
        self._lengths: list[int] = []  # tokens of each row
        self._current = 0
        self._states = [np.zeros((0, 0, spec.shape[-1]), NUMPY_TYPES[spec.datatype])] * 2
        self._prompt = self._states[0]
        self._last: Array = np.zeros((0, 1), np.int64)
        self._results: Array = np.zeros((2, steps, 0, 1), np.float32)
        self._runs: dict[tuple[int, int], list[BoundRun]] = {}  # by the number of rows and the array of the state

    def add(self, state: Tensor, prompt: Tensor) -> None:
        begin, (count, tokens, _) = len(self._lengths), state.shape
        rows = begin + count
        longest = max([tokens, *self._lengths])
        if rows > len(self._prompt) or longest != self._prompt.shape[1]:
            capacity = len(self._prompt)
            self._resize(capacity if rows <= capacity else max(rows, 2 * capacity), longest)
        for array, tensor in ((self._states[self._current], state), (self._prompt, prompt)):
            array[begin:rows, :tokens] = tensor if isinstance(tensor, np.ndarray) else tensor.numpy()
            array[begin:rows, tokens:] = 0
        self._last[begin:rows] = tokens - 1
        self._lengths += [tokens] * count

    def keep(self, rows: int, moves: Sequence[tuple[int, int]]) -> None:
        lengths = self._lengths
        for source, target in moves:
            for array in (self._states[self._current], self._prompt, self._last):
                array[target] = array[source]
            lengths[target] = lengths[source]
        del lengths[rows:]
        if lengths and max(lengths) < self._prompt.shape[1]:
            self._resize(len(self._prompt), max(lengths))

    def step(self) -> tuple[Array, Array]:
        rows = len(self._lengths)
        key = rows, self._current
        if key not in self._runs:
            self._runs[key] = [self._bound(step, rows) for step in range(self._steps)]
        for run in self._runs[key]:
            run()
        self._current = (self._current + self._steps) % 2
        predictions, residuals = self._results[:, :, :rows, 0]
        return predictions, residuals

    def _bound(self, step: int, rows: int) -> BoundRun:
        names, source = self._tensors, (self._current + step) % 2
        arrays = {
            names.state: self._states[source],
            names.prompt: self._prompt,
            names.last: self._last,
            names.next_state: self._states[1 - source],
            names.prediction: self._results[0, step],
            names.residual: self._results[1, step],
        }
        return self._bind({name: array[:rows] for name, array in arrays.items()})

    def _resize(self, capacity: int, tokens: int) -> None:
        """Replace the arrays, with the present rows of the old ones."""
        rows, copied = len(self._lengths), min(tokens, self._prompt.shape[1])

        def resized(array: Array) -> Array:
            new: Array = np.zeros((capacity, tokens, array.shape[2]), array.dtype)
            new[:rows, :copied] = array[:rows, :copied]
            return new

        state = resized(self._states[self._current])
        self._states, self._current = [state, np.zeros_like(state)], 0
        self._prompt = resized(self._prompt)
        last, self._last = self._last, np.zeros((capacity, 1), np.int64)
        self._last[:rows] = last[:rows]
        self._results = np.zeros((2, self._steps, capacity, 1), np.float32)
        self._runs.clear()


class Group(NamedTuple):
    """The tensors of a cache that differ in nothing but their rows and places."""

    names: tuple[str, ...]
    heads: int
    width: int
    dtype: np.dtype

    @property
    def entry_bytes(self) -> int:
        """Bytes of one head at one place."""
        return self.width * self.dtype.itemsize


def groups_of(specs: Iterable[TensorSpec]) -> tuple[Group, ...]:
    """Return the groups of tensors [rows, heads, places, width]."""
    names: dict[tuple[int, int, np.dtype], list[str]] = {}
    for spec in specs:
        _, heads, _, width = spec.shape
        names.setdefault((heads, width, np.dtype(NUMPY_TYPES[spec.datatype])), []).append(spec.name)
    return tuple(Group(tuple(of), *alike) for alike, of in names.items())


def places_for(tokens: int) -> int:
    """Return the places of a cache that grows to rows of so many tokens: a power of two."""
    return max(FEWEST_PLACES, 1 << max(tokens - 1, 0).bit_length())


def places_left(longest: int) -> int:
    """Return the places of a cache that shrinks to rows of so many tokens, if at least half of its own are more."""
    return places_for(longest + int(_ROOM * longest) + 1)


class HostDecoder:
    """The rows of a decoder; see :class:`edge.runner.DeviceDecoder`.

    The caches of all layers with equal shapes are one array, so that a step writes its new entries with one assignment
    for each shape. A step uses the same arrays until rows or places change, so that it can be bound to them.

    Args:
        blocks: of each, in their order, the runner, which computes prompts, and what binds its steps.
    """

    def __init__(self, blocks: Sequence[tuple[Runner, Bind]], tensors: DecoderTensors) -> None:
        self._blocks, self._tensors = blocks, tensors
        shapes = {spec.name: spec for runner, _ in blocks for spec in (*runner.inputs, *runner.outputs)}
        new = dict(tensors.cache)
        groups = groups_of(shapes[past] for past in new)
        self._groups = [_Arrays(group, [(past, new[past]) for past in group.names]) for group in groups]
        self._vocabulary = shapes[tensors.logits].shape[1]
        self._widths = {name: shapes[name].shape[2] for name in tensors.hidden}
        self._rows = 0
        self._runs: dict[int, tuple[list[BoundRun], Array]] = {}  # by rows: a step, and its logits
        self._lengths: Array = np.zeros((0, 1), np.int64)
        self._resize(1, 0)

    @property
    def cache_bytes(self) -> int:
        """Memory of the cache."""
        return sum(group.past.nbytes for group in self._groups)

    def add(self, tokens: Array, lengths: Array) -> Array:
        names, (count, longest) = self._tensors, tokens.shape
        values: dict[str, Array] = {
            names.tokens: tokens,
            names.lengths: np.zeros((count, 1), np.int64),
            names.last: lengths[:, None] - 1,
        }
        for group in self._groups:
            # One place, which no row uses: a dimension of 0 is not possible everywhere.
            values |= dict.fromkeys((past for past, _ in group.names), group.empty(count))
        for runner, _ in self._blocks:
            # Only the lengths have several readers: states, which may take much memory, are dropped with their block.
            feeds = {spec.name: values[spec.name] for spec in runner.inputs}
            values = {name: of for name, of in values.items() if name not in feeds or name == names.lengths}
            values |= runner.infer(feeds)
        begin, end = self._rows, self._rows + count
        capacity = len(self._lengths)
        if end > capacity or longest >= self._places:
            places = max(longest + 1, self._places)  # present rows may be longer
            self._resize(capacity if end <= capacity else max(end, 2 * capacity), places)
        for group in self._groups:
            for past, (_, new) in zip(group.past, group.names, strict=True):
                past[begin:end, :, :longest] = values[new]
                past[begin:end, :, longest:] = 0  # a NaN that an earlier row left would spoil the products
        self._lengths[begin:end, 0] = lengths
        self._rows = end
        return values[names.logits]

    def keep(self, rows: int, moves: Sequence[tuple[int, int]]) -> None:
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
        rows = self._rows
        lengths = self._lengths[:rows, 0]
        if int(lengths.max()) >= self._places:
            self._resize(len(self._lengths), self._places + 1)
            lengths = self._lengths[:rows, 0]
        self._tokens[:rows, 0] = tokens
        if rows not in self._runs:
            self._runs[rows] = self._bound(rows)
        runs, logits = self._runs[rows]
        for run in runs:
            run()
        index = np.arange(rows)
        for group in self._groups:
            # [rows, layers, heads, width] on both sides: the dimension of the two index arrays comes first.
            group.past[:, index, :, lengths] = group.new[:, :rows, :, 0].swapaxes(0, 1)
        lengths += 1
        return logits

    def _bound(self, rows: int) -> tuple[list[BoundRun], Array]:
        names, logits = self._tensors, self._logits[:rows]
        # Views of arrays that stay: a binding keeps none of them alive.
        arrays = {names.tokens: self._tokens[:rows], names.lengths: self._lengths[:rows], names.last: self._last[:rows]}
        arrays |= {name: array[:rows] for name, array in self._hidden.items()}
        arrays[names.logits] = logits
        for group in self._groups:
            for number, (past, new) in enumerate(group.names):
                arrays[past], arrays[new] = group.past[number, :rows], group.new[number, :rows]
        runs = [
            bind({spec.name: arrays[spec.name] for spec in (*runner.inputs, *runner.outputs)})
            for runner, bind in self._blocks
        ]
        return runs, logits

    def _resize(self, capacity: int, places: int) -> None:
        """Replace the arrays by ones for so many rows, and at least so many places, with the present rows."""
        self._places = places_for(places)
        old, self._lengths = self._lengths, np.zeros((capacity, 1), np.int64)
        self._lengths[: self._rows] = old[: self._rows]
        self._tokens, self._last = (np.zeros((capacity, 1), np.int64) for _ in range(2))  # a step has one token
        self._logits = np.zeros((capacity, self._vocabulary), np.float32)
        self._hidden = {name: np.zeros((capacity, 1, width), np.float32) for name, width in self._widths.items()}
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
