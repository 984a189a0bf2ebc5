"""Python with a server that computes loops without continuous batching, for :mod:`deploy.peers.loops` to compare with.

A batch takes all requests that wait, up to the model's limit. It is computed, all of its rows in every step, until the
slowest row has ended. Then it is answered, and the next batch begins. The rest of the server is the same.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence

import numpy as np

from edge.datatypes import Array
from edge.programs.loop import RESIDUAL, Loop, LoopRunners
from edge.programs.program import Computed, Finished, Joining, LoopLimits, Session
from edge.protocol import BY_BUDGET, BY_TOLERANCE, LOOPS, STOPPED
from edge.scheduling import scheduler
from edge.scheduling.continuous import ContinuousRun


class WholeBatch(Session):
    """Requests of prompts of one length, which end together."""

    def __init__(self, loop: Loop, runners: LoopRunners) -> None:
        self._config, self._limits, self._runners = loop.config, loop.limits, runners
        self._requests: list[tuple[object, int, LoopLimits]] = []
        self._states: list[Array] = []
        self._prompts: list[Array] = []
        self._loops = 0

    @property
    def rows(self) -> int:
        """The rows of the batch."""
        return sum(rows for _, rows, _ in self._requests)

    def add(self, requests: Sequence[Joining]) -> list[Finished]:
        """Add requests to a batch that has not begun; none of them has ended."""
        inputs = {name: np.concatenate([one.inputs[name] for one in requests]) for name in requests[0].inputs}
        embedded = self._runners.embed.infer(inputs)
        self._states.append(embedded[self._config.state])
        self._prompts.append(embedded[self._config.prompt])
        for key, arrays, options, _ in requests:
            self._requests.append((key, len(next(iter(arrays.values()))), options.limits or self._limits))
        return []

    def step(self) -> list[Finished]:
        """Compute all rows; return all requests once the last row has ended."""
        config = self._config
        if not self._loops:
            self._begin()
        feeds = {config.state: self._state, config.prompt: self._prompt, config.last: self._last}
        outputs = self._runners.step.infer(feeds)
        self._state = outputs[config.next_state]
        self._loops += 1
        prediction, residual = outputs[config.prediction][:, 0], outputs[config.residual][:, 0]
        settled = residual <= self._tolerance
        ending = ~self._ended & (settled | (self._loops >= self._max_loops))
        self._prediction[ending], self._residual[ending] = prediction[ending], residual[ending]
        self._taken[ending], self._settled[ending] = self._loops, settled[ending]
        self._ended |= ending
        return self._finished() if self._ended.all() else []

    def _begin(self) -> None:
        self._state, self._prompt = np.concatenate(self._states), np.concatenate(self._prompts)
        rows, tokens = self._state.shape[:2]
        each = [rows for _, rows, _ in self._requests]
        self._last = np.full((rows, 1), tokens - 1, np.int64)
        self._max_loops = np.repeat([limits.max_loops for _, _, limits in self._requests], each)
        self._tolerance = np.repeat([limits.tolerance for _, _, limits in self._requests], each)
        self._ended, self._settled = np.zeros(rows, bool), np.zeros(rows, bool)
        self._prediction, self._residual = np.zeros(rows, np.float32), np.zeros(rows, np.float32)
        self._taken = np.zeros(rows, np.int32)

    def _finished(self) -> list[Finished]:
        config, finished, row = self._config, [], 0
        for key, rows, _ in self._requests:
            part = slice(row, row + rows)
            row += rows
            names = (config.prediction, config.residual, config.loops)
            arrays = [array[part, None] for array in (self._prediction, self._residual, self._taken)]
            stopped = np.where(self._settled[part], BY_TOLERANCE, BY_BUDGET)
            facts = {LOOPS: self._taken[part], RESIDUAL: self._residual[part], STOPPED: stopped}
            computed = Computed(dict(zip(names, arrays, strict=True)), facts, float(self._taken[part].max()))
            finished.append(Finished(key, computed))
        self.__dict__.update(_requests=[], _states=[], _prompts=[], _loops=0)
        return finished

    def partial(self, key: object, stopped: str = "") -> Computed:
        """Refuse."""
        raise NotImplementedError("this server answers whole batches")

    def drop(self, key: object) -> None:
        """Refuse."""
        raise NotImplementedError("this server answers whole batches")


class Closed(ContinuousRun):
    """A run that takes no further request until it has ended."""

    @property
    def room(self) -> int:
        """There is none."""
        return 0


if __name__ == "__main__":
    Loop.session = lambda self, options: WholeBatch(self, self._runners[options.tier])  # type: ignore[method-assign,assignment,return-value]
    scheduler.ContinuousRun = Closed  # type: ignore[misc]
    sys.argv = sys.argv[2:]  # without -m
    runpy.run_module("edge", run_name="__main__", alter_sys=True)
