"""Measurement of the runs of one function class and size, and of the baselines, on the same prompts.

Errors are squared, and divided by the variance of the values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from edge.datatypes import Array
from export.papers.looped.baselines import BASELINES, predict_after
from export.papers.looped.model import PromptTransformer, Trajectory, trajectory
from export.papers.looped.prompts import EVALUATION, FUNCTION_CLASSES, Prompts, draw_prompts, generator_of
from export.papers.looped.solvers import anderson
from export.training.intervals import Mean, Sample
from export.training.provenance import Processor, processor

#: The most loops that a stopped solver takes.
_STOPPED_LOOPS = 32
TOLERANCES = (0.3, 0.2, 0.15, 0.1, 0.07, 0.05, 0.03, 0.02, 0.015, 0.01, 0.007, 0.005)
#: Errors below this share of the variance are rounding; no ratio to them is a number of interest.
_ROUNDING = 1e-6
#: Prompts that run together: their states stay in the processor's cache.
_CHUNK = 128


class TrainedRun(NamedTuple):
    """A trained run: the most loops in its training, how it was trained, and a digest of weights and arguments."""

    name: str
    function: str
    model: PromptTransformer
    loops: int
    training: str
    digest: str

    @property
    def looped(self) -> bool:
        """Whether the model is looped."""
        return self.model.config.injection is not None


class FunctionTask(NamedTuple):
    """A function class and size, and its runs by the name of their group; runs of a group differ in their seed."""

    function: str
    dims: int
    points: int
    groups: dict[str, list[TrainedRun]]

    def main(self, *, looped: bool) -> str | None:
        """Return the group that stands for the looped or unlooped models: of most seeds, else the first, or None."""
        names = [name for name, runs in self.groups.items() if runs[0].looped is looped]
        return max(names, key=lambda name: len(self.groups[name])) if names else None


class GroupResult(msgspec.Struct, frozen=True):
    """Errors of a group after all pairs.

    Attributes:
        parameters: without positions.
        loops: after which it is compared, the most that its training ended with.
        by_seed: the error of each run.
        error: the mean; the interval is over prompts, and over seeds where there are several.
        longest: the error after the most loops; None if unlooped.
    """

    name: str
    parameters: int
    loops: int
    by_seed: dict[str, float]
    error: Mean
    longest: float | None


class Ratio(msgspec.Struct, frozen=True):
    """The error of the main looped group over that of another method, on the same prompts.

    Attributes:
        seeds: of both; a baseline has none.
        after_all: after all pairs; None where the other has practically no error.
        known: of the means from as many pairs as dimensions on: with fewer, no method can know a linear function. None
            as ``after_all``, for a method that was not measured after every number, and in earlier records.
    """

    other: str
    seeds: tuple[int, int]
    after_all: Mean | None
    known: Mean | None = None


class Stopping(msgspec.Struct, frozen=True):
    """Loops that stop where the residual is at most a tolerance; 90 % of the prompts take no more than ``most``."""

    tolerance: float
    mean_loops: float
    most: float
    error: float


class TaskResult(msgspec.Struct, frozen=True):
    """All results of a function class and size.

    Attributes:
        by_pairs: mean errors after so many pairs, by main group or baseline.
        by_loops: mean errors after 1, 2, … loops, by looped group or run.
        accelerated: as ``stopping``, by :func:`export.papers.looped.solvers.anderson`; empty in earlier records.
    """

    function: str
    dims: int
    points: int
    looped: str | None
    unlooped: str | None
    groups: tuple[GroupResult, ...]
    by_pairs: dict[str, dict[int, float]]
    by_loops: dict[str, tuple[float, ...]]
    ratios: tuple[Ratio, ...]
    stopping: tuple[Stopping, ...]
    processor: Processor
    accelerated: tuple[Stopping, ...] = ()

    def known_ratio(self, ratio: Ratio) -> Mean | float | None:
        """Return the ratio's ``known``; of an earlier record, that of its mean errors, without an interval."""
        here, there = self.by_pairs[str(self.looped)], self.by_pairs[ratio.other]
        if ratio.known or ratio.after_all is None or len(there) < self.points:
            return ratio.known
        pairs = range(self.dims, self.points)
        return sum(here[at] for at in pairs) / sum(there[at] for at in pairs)


def measure(task: FunctionTask, number: int, loops: int) -> TaskResult:
    """Measure the runs of a task and the baselines on so many prompts, and looped models after 1 to ``loops`` loops."""
    prompts = draw_prompts(task.function, number, task.points, task.dims, generator_of(EVALUATION))
    values, normaliser = prompts.ys.numpy(), FUNCTION_CLASSES[task.function].normaliser(task.dims)
    looped, unlooped = (task.main(looped=kind) for kind in (True, False))
    groups, by_loops, paths = [], dict[str, tuple[float, ...]](), list[Trajectory]()
    errors: dict[str, Array] = {}  # by group or baseline, [S, N, n]: after each number of pairs
    for name, runs in task.groups.items():
        errors[name] = np.stack([pair_errors(run.model, prompts, run.loops) for run in runs]) / normaliser
        if runs[0].looped:
            trajectories = [error_path(run.model, prompts, loops) for run in runs]
            curves = [_floats(path.predictions.mean(axis=1) / normaliser) for path in trajectories]
            by_loops[name] = _floats(np.mean(curves, axis=0))
            if name == looped:
                paths = trajectories
                by_loops |= {run.name: curve for run, curve in zip(runs, curves, strict=True) if len(runs) > 1}
        last = errors[name][:, :, -1]
        groups.append(
            GroupResult(
                name,
                runs[0].model.parameter_count,
                runs[0].loops,
                dict(zip((run.name for run in runs), _floats(last.mean(axis=1)), strict=True)),
                _sample(last).mean(),
                by_loops[name][-1] if runs[0].looped else None,
            )
        )
    by_pairs = {name: dict(enumerate(_floats(errors[name].mean(axis=(0, 1))))) for name in (looped, unlooped) if name}
    for name, baseline in BASELINES[task.function].items():
        most = task.points - 1
        pairs = sorted({max(1, most * quarter // 4) for quarter in (1, 2, 3, 4)}) if baseline.slow else range(most + 1)
        predicted = predict_after(baseline.predict, *prompts, pairs)
        errors[name] = (predicted - values[:, list(pairs)])[None] ** 2 / normaliser
        by_pairs[name] = dict(zip(pairs, _floats(errors[name][0].mean(axis=0)), strict=True))
    return TaskResult(
        *(task.function, task.dims, task.points, looped, unlooped, tuple(groups), by_pairs, by_loops),
        ratios=tuple(
            _ratio(errors, looped, name, task.dims, name == unlooped) for name in by_pairs if name != looped and looped
        ),
        stopping=stopping_of(paths, normaliser),
        processor=processor(),
        accelerated=stopping_of(
            [error_path(run.model, prompts, _STOPPED_LOOPS, anderson) for run in task.groups.get(str(looped), [])],
            normaliser,
        ),
    )


def _ratio(errors: Mapping[str, Array], looped: str, other: str, dims: int, has_seeds: bool) -> Ratio:
    here, there = errors[looped], errors[other]
    after_all = known = None
    if there[:, :, -1].mean() > _ROUNDING:
        after_all = _sample(here[:, :, -1]).over(_sample(there[:, :, -1]))
        if there.shape[2] == here.shape[2]:
            known = _sample(here[:, :, dims:].mean(axis=2)).over(_sample(there[:, :, dims:].mean(axis=2)))
    return Ratio(other, (len(here), len(there) * has_seeds), after_all, known)


def stopping_of(paths: Sequence[Trajectory], normaliser: float) -> tuple[Stopping, ...]:
    """Return how loops stop at each tolerance, from squared errors and residuals [t, N] of seeds, if there are any."""
    if not paths:
        return ()
    # The prompts of all seeds side by side, [t, S N].
    errors, residuals = (np.concatenate(arrays, axis=1)[:_STOPPED_LOOPS] for arrays in zip(*paths, strict=True))
    points = []
    for tolerance in TOLERANCES:
        stopped, loops = Trajectory(errors / normaliser, residuals).stopped(tolerance)
        most = float(np.percentile(loops, 90))
        points.append(Stopping(tolerance, float(loops.mean()), most, float(stopped.mean())))
    return tuple(points)


def pair_errors(model: PromptTransformer, prompts: Prompts, loops: int) -> Array:
    """Return the squared errors [N, n] at all points after a number of loops."""
    with torch.no_grad():
        chunks = [(model(xs, ys[:, :-1], loops, 1)[-1] - ys).square().numpy() for xs, ys in _chunks(prompts)]
    return np.concatenate(chunks)


def error_path(
    model: PromptTransformer, prompts: Prompts, loops: int, solve: Callable[..., Trajectory] = trajectory
) -> Trajectory:
    """Return the squared errors at the last point in place of predictions, and the residuals, [loops, N]."""
    chunks = [solve(model, xs, ys[:, :-1], loops) for xs, ys in _chunks(prompts)]
    predictions, residuals = (np.concatenate(arrays, axis=1) for arrays in zip(*chunks, strict=True))
    return Trajectory((predictions - prompts.ys[:, -1].numpy()) ** 2, residuals)


def _sample(errors: Array) -> Sample:
    return Sample.of_items(errors.astype(np.float64), np.ones(errors.shape[1]))


def _floats(values: Array) -> tuple[float, ...]:
    return tuple(map(float, values))


def _chunks(prompts: Prompts) -> Iterable[Prompts]:
    pieces = torch.split(prompts.xs, _CHUNK), torch.split(prompts.ys, _CHUNK)
    return [Prompts(xs, ys) for xs, ys in zip(*pieces, strict=True)]
