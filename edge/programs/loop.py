"""Loop: a step is repeated on its own output until the state of each row settles; rows join and end independently.

The state stays on the device; predictions and residuals come to the host.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from edge.bundles.programs import LoopProgram
from edge.datatypes import Array
from edge.errors import InvalidRequest, Raw, RunnerError
from edge.programs.program import (
    Computed,
    Finished,
    IterativeProgram,
    Joining,
    LoopLimits,
    Options,
    Session,
    close_gaps,
)
from edge.protocol import BY_BUDGET, BY_TOLERANCE, LOOPS, STOPPED
from edge.runner import DeviceLoop, LoopTensors, Runner

#: The fact of each row with its last residual.
RESIDUAL = "residual"
#: The largest finite residual.
_MOST_TOLERANCE = float(np.finfo(np.float32).max)


def limits_of(
    config: LoopProgram, model: str = "", *, max_loops: int | None = None, tolerance: float | None = None
) -> LoopLimits:
    """Return when the rows of a request stop: at the limits given, where they are not None, or the manifest's.

    Raise an InvalidRequest, which names the model, for a limit out of range.
    """
    limits = LoopLimits(
        config.max_loops if max_loops is None else max_loops, config.tolerance if tolerance is None else tolerance
    )
    if not 1 <= limits.max_loops <= config.most_loops:
        subject, expected = f"parameter 'max_loops' of {model!r}", f"1 to {config.most_loops}"
        fix = "Ask for fewer loops, or leave it out."
        raise InvalidRequest(subject, given=limits.max_loops, expected=expected, fix=fix)
    if not 0 < limits.tolerance < math.inf:
        subject, expected = f"parameter 'tolerance' of {model!r}", "a finite number above 0"
        fix = f"{config.tolerance:g} is the default; a smaller number runs more loops."
        raise InvalidRequest(subject, given=limits.tolerance, expected=expected, fix=fix)
    return limits


class LoopRunners(NamedTuple):
    """The files of one tier."""

    embed: Runner
    step: Runner


class Loop(IterativeProgram):
    """Runs the loop of a tier for a request's rows alone, or a session for the rows of many requests."""

    def __init__(self, config: LoopProgram, runners: Mapping[str, LoopRunners]) -> None:
        self.config = config
        self.limits = limits_of(config)
        self.loops_per_step = config.check_every
        self._runners = runners
        self._idle: dict[str, deque[DeviceLoop]] = {tier: deque() for tier in runners}

    def session(self, options: Options) -> LoopSession:
        return LoopSession(self.config, self.limits, self._runners[options.tier], self._idle[options.tier])

    def close(self) -> None:
        """Drop the loops without rows, which refer to their runner's memory; see :meth:`Program.close`."""
        for idle in self._idle.values():
            idle.clear()


class LoopSession(Session):
    """Rows in progress. One thread uses it; ``idle`` are the loops without rows of the sessions of all threads."""

    def __init__(self, config: LoopProgram, limits: LoopLimits, runners: LoopRunners, idle: deque[DeviceLoop]) -> None:
        self._config, self._limits, self._runners, self._idle = config, limits, runners, idle
        self._device: DeviceLoop | None = None  # while there are rows
        self._since: Array = np.arange(1 - config.check_every, 1)[:, None]  # loops of each step before the last one
        self._requests: dict[object, _Rows] = {}
        self._owners: list[tuple[_Rows, int]] = []  # of each row: its request, and its place there
        self._count = 0  # loops of the session
        self._begins: Array = np.zeros(0, np.int64)  # the session's loops before each row's first one
        self._ends: Array = np.zeros(0, np.int64)  # and after the last one that its budget allows
        self._next_end = 0  # the smallest of them
        self._tolerance: Array = np.zeros(0, np.float32)
        self._predictions: Array = np.zeros((1, 0), np.float32)
        self._residuals = self._predictions

    @property
    def rows(self) -> int:
        return len(self._owners)

    def add(self, requests: Sequence[Joining]) -> list[Finished]:
        """Add the rows of requests, which are embedded in one run; see :meth:`Session.add`."""
        config, embed = self._config, self._runners.embed
        inputs = requests[0].inputs
        if len(requests) > 1:
            inputs = {name: np.concatenate([request.inputs[name] for request in requests]) for name in inputs}
        if embed.device == "GPU":
            embedded = embed.run(inputs, keep=(config.state, config.prompt))
        else:
            embedded = dict(embed.infer(inputs))
        state = embedded[config.state]
        counts = [len(next(iter(request.inputs.values()))) for request in requests]
        if state.shape[0] != sum(counts):
            given, fix = Raw(f"{state.shape[0]} rows for {sum(counts)}"), "Export the model again."
            raise RunnerError(
                f"output {config.state!r}", given=given, expected="a row for each row of the inputs", fix=fix
            )
        device = self._device or self._new_loop()
        device.add(state, embedded[config.prompt])
        self._device = device
        ends, tolerances = [self._ends], [self._tolerance]
        for (key, _, options, _), rows in zip(requests, counts, strict=True):
            limits = options.limits or self._limits
            request = self._requests[key] = _Rows(key, rows)
            self._owners += [(request, index) for index in range(rows)]
            ends.append(np.full(rows, self._count + limits.max_loops))
            tolerances.append(np.full(rows, min(limits.tolerance, _MOST_TOLERANCE), np.float32))
        self._ends, self._tolerance = np.concatenate(ends), np.concatenate(tolerances)
        self._next_end = int(self._ends.min())
        joined = self.rows - len(self._begins)
        self._begins = np.concatenate([self._begins, np.full(joined, self._count)])
        none = np.full((1, joined), np.nan, np.float32)
        self._predictions = np.concatenate([self._predictions[-1:], none], axis=1)
        self._residuals = np.concatenate([self._residuals[-1:], none], axis=1)
        return []

    def step(self) -> list[Finished]:
        """Run ``check_every`` loops of all rows; see :meth:`Session.step`.

        A row ends with the first of these loops that settles it or uses up its budget; its later ones are discarded.
        """
        if not self._device:
            return []
        self._predictions, self._residuals = self._device.step()
        self._count += len(self._since)
        settled = self._residuals <= self._tolerance  # False for NaN: a loop that diverges uses up its budget
        if self._count < self._next_end and not np.count_nonzero(settled):
            return []
        counts = self._count + self._since
        ended: Array = settled | (counts >= self._ends)  # [check_every, rows]
        leaving: list[int] = np.flatnonzero(np.any(ended, axis=0)).tolist()
        for row in leaving:
            step = int(ended[:, row].argmax())
            self._record(row, step)
            request, index = self._owners[row]
            request.stop(index, BY_TOLERANCE if settled[step, row] else BY_BUDGET)
            request.left -= 1
        self._leave(leaving)
        done = [request for request in self._requests.values() if not request.left]
        for request in done:
            del self._requests[request.key]
        return [Finished(request.key, request.computed(self._config)) for request in done]

    def partial(self, key: object, stopped: str = "") -> Computed | None:
        request = self._requests[key]
        for row, (owner, index) in enumerate(self._owners):
            if owner is request:
                if self._begins[row] == self._count:  # it has just joined
                    return None
                self._record(row, -1)
                request.stop(index, stopped)
        return request.computed(self._config)

    def drop(self, key: object) -> None:
        request = self._requests.pop(key, None)
        if request:
            self._leave([row for row, (owner, _) in enumerate(self._owners) if owner is request])

    def _new_loop(self) -> DeviceLoop:
        with suppress(IndexError):  # other threads take them, too
            return self._idle.pop()
        tensors = LoopTensors(*(getattr(self._config, field) for field in LoopTensors._fields))
        return self._runners.step.loop(tensors, self._config.check_every)

    def _record(self, row: int, step: int) -> None:
        """Record the results of a row at one of the steps that were computed last."""
        request, index = self._owners[row]
        loops = self._count + int(self._since[step, 0]) - self._begins[row]
        request.record(index, self._predictions[step, row], loops, self._residuals[step, row])

    def _leave(self, leaving: list[int]) -> None:
        moves = close_gaps(self._owners, leaving)
        rows = len(self._owners)
        columns = [self._begins, self._ends, self._tolerance]
        columns += [self._predictions[-1].copy(), self._residuals[-1].copy()]  # not in the device's arrays
        for source, target in moves:
            for column in columns:
                column[target] = column[source]
        self._begins, self._ends, self._tolerance, predictions, residuals = (column[:rows] for column in columns)
        self._predictions, self._residuals = predictions[None], residuals[None]
        assert self._device
        self._device.keep(rows, moves)
        if rows:
            self._next_end = int(self._ends.min())
        else:
            self._idle.append(self._device)
            self._device = None


class _Rows:
    """The results of a request's rows."""

    def __init__(self, key: object, rows: int) -> None:
        self.key, self.left = key, rows
        self._predictions = np.zeros((rows, 1), np.float32)
        self._loops = np.zeros((rows, 1), np.int32)
        self._residuals = np.zeros((rows, 1), np.float32)
        self._stopped = np.full(rows, "", f"U{len(BY_TOLERANCE)}")

    def record(self, index: int, prediction: float, loops: int, residual: float) -> None:
        self._predictions[index], self._loops[index], self._residuals[index] = prediction, loops, residual

    def stop(self, index: int, reason: str) -> None:
        self._stopped[index] = reason

    def computed(self, config: LoopProgram) -> Computed:
        outputs = {
            config.prediction: self._predictions.copy(),
            config.loops: self._loops.copy(),
            config.residual: self._residuals.copy(),
        }
        loops, residual = outputs[config.loops][:, 0], outputs[config.residual][:, 0]
        facts = {LOOPS: loops, RESIDUAL: residual, STOPPED: self._stopped.copy()}
        return Computed(outputs, facts, float(loops.max()))
