"""Loop: a step is repeated on its own output until the state of each row settles.

Rows of several requests are computed together and end independently: :class:`LoopSession` drops a row that has settled,
and takes new ones between two steps. The state crosses to the host after each step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from edge.bundles.manifest import LoopProgram
from edge.datatypes import Array
from edge.programs.program import Computed, LoopLimits, Options
from edge.programs.session import STOPPED, Finished, IterativeProgram, Session
from edge.runner import Runner

#: Facts of each row, beside why it stopped: the loops that it took, and its last residual.
LOOPS, RESIDUAL = "loops", "residual"
BY_TOLERANCE, BY_BUDGET = "tolerance", "budget"


class LoopRunners(NamedTuple):
    """The files of one tier."""

    embed: Runner
    step: Runner


class Loop(IterativeProgram):
    """Runs the loop of a tier for a request's rows alone, or a session for the rows of many requests."""

    def __init__(self, config: LoopProgram, runners: Mapping[str, LoopRunners]) -> None:
        self.config = config
        self.limits = LoopLimits(config.max_loops, config.tolerance)
        self._runners = runners

    def session(self, options: Options) -> LoopSession:
        """Return a session of a tier without rows."""
        return LoopSession(self.config, self._runners[options.tier])

    def compute(self, inputs: Mapping[str, Array], options: Options) -> Computed:
        """Run the loop for the rows of one request until the last of them has ended."""
        session = self.session(options)
        session.add(None, inputs, options)
        while True:
            for finished in session.step():
                return finished.computed


class LoopSession(Session):
    """Rows in progress. One thread uses it."""

    def __init__(self, config: LoopProgram, runners: LoopRunners) -> None:
        self._config = config
        self._runners = runners
        self._requests: dict[object, _Request] = {}
        self._owners: list[tuple[_Request, int]] = []  # of each row: its request, and its place there
        self._state: Array = np.zeros((0, 0, 0), np.float32)
        self._prompt = self._state
        self._last: Array = np.zeros((0, 1), np.int64)
        self._loops: Array = np.zeros(0, np.int32)
        self._max_loops: Array = np.zeros(0, np.int32)
        self._tolerance: Array = np.zeros(0, np.float32)
        self._predictions: Array = np.zeros((0, 1), np.float32)
        self._residuals: Array = np.zeros((0, 1), np.float32)

    @property
    def rows(self) -> int:
        """The number of rows in progress."""
        return len(self._owners)

    def add(self, key: object, inputs: Mapping[str, Array], options: Options) -> None:
        """Add the rows of a request; see :meth:`Session.add`."""
        embedded = self._runners.embed.infer(inputs)
        state, prompt = embedded[self._config.state], embedded[self._config.prompt]
        rows, tokens = state.shape[:2]
        limits = options.limits or LoopLimits(self._config.max_loops, self._config.tolerance)
        request = self._requests[key] = _Request(key, rows)
        self._owners += [(request, place) for place in range(rows)]
        self._state, self._prompt = (_stacked(old, new) for old, new in ((self._state, state), (self._prompt, prompt)))
        self._last = np.concatenate([self._last, np.full((rows, 1), tokens - 1, np.int64)])
        self._loops = np.concatenate([self._loops, np.zeros(rows, np.int32)])
        self._max_loops = np.concatenate([self._max_loops, np.full(rows, limits.max_loops, np.int32)])
        self._tolerance = np.concatenate([self._tolerance, np.full(rows, limits.tolerance, np.float32)])
        none = np.full((rows, 1), np.nan, np.float32)
        self._predictions = np.concatenate([self._predictions, none])
        self._residuals = np.concatenate([self._residuals, none])

    def step(self) -> list[Finished]:
        """Run one loop of all rows; see :meth:`Session.step`."""
        config = self._config
        feeds = {config.state: self._state, config.prompt: self._prompt, config.last: self._last}
        outputs = self._runners.step.infer(feeds)
        self._state = outputs[config.next_state]
        self._predictions, self._residuals = outputs[config.prediction], outputs[config.residual]
        self._loops += 1
        settled = self._residuals[:, 0] <= self._tolerance  # False for NaN: a loop that diverges uses up its budget
        ended = settled | (self._loops >= self._max_loops)
        if not ended.any():
            return []
        for row in np.flatnonzero(ended).tolist():
            request, place = self._record(row), self._owners[row][1]
            request.stop(place, BY_TOLERANCE if settled[row] else BY_BUDGET)
            request.left -= 1
        self._keep(~ended)
        done = [request for request in self._requests.values() if not request.left]
        for request in done:
            del self._requests[request.key]
        return [Finished(request.key, request.computed(config)) for request in done]

    def partial(self, key: object, stopped: str = "") -> Computed:
        """Return the outputs of a request in progress; see :meth:`Session.partial`."""
        request = self._requests[key]
        for row, (owner, place) in enumerate(self._owners):
            if owner is request:
                self._record(row)
                request.stop(place, stopped)
        return request.computed(self._config)

    def drop(self, key: object) -> None:
        """Drop the rows of a request; see :meth:`Session.drop`."""
        request = self._requests.pop(key, None)
        if request:
            self._keep(np.array([owner is not request for owner, _ in self._owners], bool))

    def _record(self, row: int) -> _Request:
        request, place = self._owners[row]
        request.record(place, self._predictions[row], self._loops[row], self._residuals[row])
        return request

    def _keep(self, kept: Array) -> None:
        self._owners = [owner for owner, keep in zip(self._owners, kept.tolist(), strict=True) if keep]
        self._state, self._prompt, self._last = self._state[kept], self._prompt[kept], self._last[kept]
        self._loops, self._max_loops = self._loops[kept], self._max_loops[kept]
        self._tolerance = self._tolerance[kept]
        self._predictions, self._residuals = self._predictions[kept], self._residuals[kept]


class _Request:
    """The results of a request's rows."""

    def __init__(self, key: object, rows: int) -> None:
        self.key = key
        self.left = rows
        self._predictions = np.zeros((rows, 1), np.float32)
        self._loops = np.zeros((rows, 1), np.int32)
        self._residuals = np.zeros((rows, 1), np.float32)
        self._stopped = np.full(rows, "", f"U{len(BY_TOLERANCE)}")

    def record(self, place: int, prediction: Array, loops: int, residual: Array) -> None:
        self._predictions[place], self._loops[place], self._residuals[place] = prediction, loops, residual

    def stop(self, place: int, reason: str) -> None:
        self._stopped[place] = reason

    def computed(self, config: LoopProgram) -> Computed:
        outputs = {
            config.prediction: self._predictions.copy(),
            config.loops: self._loops.copy(),
            config.residual: self._residuals.copy(),
        }
        loops, residual = outputs[config.loops][:, 0], outputs[config.residual][:, 0]
        facts = {LOOPS: loops, RESIDUAL: residual, STOPPED: self._stopped.copy()}
        return Computed(outputs, facts, float(loops.max()))


def _stacked(old: Array, new: Array) -> Array:
    """Return rows below others, shorter ones with zeros at the end."""
    if not len(old):
        return new
    tokens = max(old.shape[1], new.shape[1])
    stacked = np.zeros((len(old) + len(new), tokens, new.shape[2]), new.dtype)
    stacked[: len(old), : old.shape[1]] = old
    stacked[len(old) :, : new.shape[1]] = new
    return stacked
