"""Loops in ONNX Runtime on the CPU: states and prompts in arrays that are bound to the session once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from edge.datatypes import NUMPY_TYPES, Array, TensorSpec
from edge.errors import RequestError
from edge.runner import LoopTensors, Tensor


class OnnxRuntimeLoop:
    """The rows of a loop; see :class:`edge.runner.DeviceLoop`.

    Each step reads the state from one array and writes the next one into another, in turn. All prompts are as long as
    the longest one at present. A binding for each number of rows refers to the arrays, so a step copies nothing and
    allocates nothing.

    Args:
        session: of ONNX Runtime.
        bind: returns a new binding of the session to arrays, by the tensors' names.
        failed: logs an error of ONNX Runtime, and returns the one to raise.
        spec: of the state.
    """

    def __init__(
        self,
        session: Any,
        bind: Callable[[dict[str, Array]], Any],
        failed: Callable[[Exception], RequestError],
        spec: TensorSpec,
        tensors: LoopTensors,
        steps: int,
    ) -> None:
        self._session, self._bind, self._failed = session, bind, failed
        self._tensors, self._steps = tensors, steps
        self._lengths: list[int] = []  # tokens of each row
        self._current = 0
        self._states = [np.zeros((0, 0, spec.shape[-1]), NUMPY_TYPES[spec.datatype])] * 2
        self._prompt = self._states[0]
        self._last: Array = np.zeros((0, 1), np.int64)
        self._results: Array = np.zeros((2, steps, 0, 1), np.float32)
        # The bindings of the steps, and their results, by the number of rows and the array of the state.
        self._bound: dict[tuple[int, int], tuple[list[Any], tuple[Array, Array]]] = {}

    def add(self, state: Tensor, prompt: Tensor) -> None:
        """Copy rows behind the others; see :meth:`edge.runner.DeviceLoop.add`."""
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
        """Copy rows from the end into gaps; see :meth:`edge.runner.DeviceLoop.keep`."""
        state, lengths = self._states[self._current], self._lengths
        for source, target in moves:
            state[target], self._prompt[target] = state[source], self._prompt[source]
            self._last[target], lengths[target] = self._last[source], lengths[source]
        del lengths[rows:]
        if lengths and max(lengths) < self._prompt.shape[1]:
            self._resize(len(self._prompt), max(lengths))

    def step(self) -> tuple[Array, Array]:
        """Compute the steps; see :meth:`edge.runner.DeviceLoop.step`."""
        rows = len(self._lengths)
        key = rows, self._current
        try:
            if key not in self._bound:
                bindings = [self._binding(place) for place in range(self._steps)]
                predictions, residuals = self._results[:, :, :rows, 0]
                self._bound[key] = bindings, (predictions, residuals)
            bindings, results = self._bound[key]
            for binding in bindings:
                self._session.run_with_iobinding(binding)
        except Exception as error:
            raise self._failed(error) from error
        self._current = (self._current + self._steps) % 2
        return results

    def _binding(self, place: int) -> Any:
        """Return the binding of the step at a place among those of one call."""
        names, rows, source = self._tensors, len(self._lengths), (self._current + place) % 2
        arrays = {
            names.state: self._states[source],
            names.prompt: self._prompt,
            names.last: self._last,
            names.next_state: self._states[1 - source],
            names.prediction: self._results[0, place],
            names.residual: self._results[1, place],
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
        self._states = [state, np.zeros_like(state)]
        self._current = 0
        self._prompt = resized(self._prompt)
        last, self._last = self._last, np.zeros((capacity, 1), np.int64)
        self._last[:rows] = last[:rows]
        self._results = np.zeros((2, self._steps, capacity, 1), np.float32)
        self._bound.clear()
