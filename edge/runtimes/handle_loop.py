"""Loops for every runner: the state is a handle from step to step, and crosses to the host when rows join or leave."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edge.datatypes import Array
from edge.runner import LoopTensors, Runner, Tensor


class HandleLoop:
    """The rows of a loop; see :class:`edge.runner.DeviceLoop`. All prompts are as long as the longest one."""

    def __init__(self, runner: Runner, tensors: LoopTensors, steps: int) -> None:
        self._runner, self._tensors, self._steps = runner, tensors, steps
        self._feeds: dict[str, Tensor] = {}  # on the host since the last change of rows, and on the device after a step

    def add(self, state: Tensor, prompt: Tensor) -> None:
        """Add rows behind the others; see :meth:`edge.runner.DeviceLoop.add`."""
        names = self._tensors
        last: Array = np.full((state.shape[0], 1), state.shape[1] - 1, np.int64)
        new = {names.state: on_host(state), names.prompt: on_host(prompt), names.last: last}
        self._feeds = {
            name: _stacked(on_host(self._feeds[name]), rows) if self._feeds else rows for name, rows in new.items()
        }

    def keep(self, rows: int, moves: Sequence[tuple[int, int]]) -> None:
        """Keep some rows; see :meth:`edge.runner.DeviceLoop.keep`."""
        order = list(range(rows))
        for source, target in moves:
            order[target] = source
        if not rows:
            self._feeds = {}
            return
        longest = int(on_host(self._feeds[self._tensors.last])[order].max()) + 1
        self._feeds = {
            name: np.ascontiguousarray(on_host(tensor)[order, :longest]) for name, tensor in self._feeds.items()
        }

    def step(self) -> tuple[Array, Array]:
        """Run the steps; see :meth:`edge.runner.DeviceLoop.step`."""
        names, results = self._tensors, []
        for name, tensor in self._feeds.items():
            if isinstance(tensor, np.ndarray):
                self._feeds[name] = self._runner.upload(tensor)
        for _ in range(self._steps):
            outputs = self._runner.run(self._feeds, [names.next_state])
            self._feeds[names.state] = outputs[names.next_state]
            results.append([on_host(outputs[name])[:, 0] for name in (names.prediction, names.residual)])
        predictions, residuals = np.array(results).swapaxes(0, 1)
        return predictions, residuals


def on_host(tensor: Tensor) -> Array:
    """Return a tensor as an array."""
    return tensor if isinstance(tensor, np.ndarray) else tensor.numpy()


def _stacked(old: Array, new: Array) -> Array:
    """Return rows below others, shorter ones with zeros at the end."""
    longest = max(old.shape[1], new.shape[1])
    old, new = (
        np.pad(rows, [(0, 0), (0, longest - rows.shape[1]), *[(0, 0)] * (rows.ndim - 2)]) for rows in (old, new)
    )
    return np.concatenate([old, new])
