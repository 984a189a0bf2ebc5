"""Loops that stop when the state settles, with and without Anderson acceleration, against fixed numbers of loops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from edge.datatypes import Array
from export.papers.looped.parts import MEMORIES, STOPPED_LOOPS, Key
from export.papers.looped.paths import Arrays
from export.papers.looped.results import Fewest, Stopping
from export.papers.looped.runs import Task, Trained
from export.papers.looped.solvers import Trajectory, stopped

#: Of the report's table.
TOLERANCES = (0.3, 0.2, 0.15, 0.1, 0.07, 0.05, 0.03, 0.02, 0.015, 0.01, 0.007, 0.005)
#: Further ones between them, to find the fewest loops: forty for each decade.
_FINE = tuple(float(f"{0.3 * 10 ** (-step / 40):.3g}") for step in range(80))
PLAIN = "plain"
#: A path is settled where its error is within 5 % of its last.
SETTLED = 1.05


def stopping_of(task: Task, runs: Sequence[Trained], parts: Mapping[Key, Arrays], *, within: float) -> dict[str, Any]:
    """Return the fields ``stopping`` and ``fewest`` of a task's results; empty without looped runs.

    Args:
        within: of the plain error after all loops, which a way to stop has to reach.
    """
    if not runs:
        return {}
    methods = {PLAIN: [parts["path", run.name] for run in runs]}
    for memory in MEMORIES:
        methods[f"Anderson, memory {memory}"] = [parts["anderson", str(memory), run.name] for run in runs]
    points: list[Stopping] = []
    for method, paths in methods.items():
        # The prompts of all seeds side by side, [t, S N].
        errors, residuals = (
            np.concatenate([path[name][:STOPPED_LOOPS] for path in paths], axis=1) for name in ("loops", "residuals")
        )
        errors = errors / task.normaliser
        points += [
            Stopping(method, None, loops, loops, float(error)) for loops, error in enumerate(errors.mean(axis=1), 1)
        ]
        points += [_stopped(method, tolerance, errors, residuals) for tolerance in sorted({*TOLERANCES, *_FINE})[::-1]]
    wanted = within * max((point for point in points if _is(point, PLAIN, False)), key=lambda p: p.mean_loops).error
    fewest = tuple(_fewest(points, method, is_stopped, wanted) for method in methods for is_stopped in (False, True))
    return {"stopping": tuple(points), "fewest": fewest}


def _stopped(method: str, tolerance: float, errors: Array, residuals: Array) -> Stopping:
    found = stopped(Trajectory(errors, residuals), tolerance)
    most = float(np.percentile(found.loops, 90))
    return Stopping(method, tolerance, float(found.loops.mean()), most, float(found.predictions.mean()))


def _fewest(points: Sequence[Stopping], method: str, is_stopped: bool, wanted: float) -> Fewest:
    enough = [point for point in points if _is(point, method, is_stopped) and point.error <= wanted]
    if not enough:
        return Fewest(method, is_stopped, None, None)
    best = min(enough, key=lambda point: point.mean_loops)
    return Fewest(method, is_stopped, best.mean_loops, best.error)


def _is(point: Stopping, method: str, is_stopped: bool) -> bool:
    return point.method == method and (point.tolerance is not None) is is_stopped
