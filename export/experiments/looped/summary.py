"""Results of the parts: means over runs, with intervals that resample prompts and seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from export.papers.looped.baselines import BASELINES
from export.papers.looped.parts import Key
from export.papers.looped.paths import Arrays
from export.papers.looped.probe import TARGETS
from export.papers.looped.results import Against, Group, Probed, Run, Shifted, TaskResult
from export.papers.looped.runs import Groups, Task, Trained, main_group
from export.papers.looped.sample import Sample
from export.papers.looped.shifts import SHIFTS
from export.papers.looped.stopping import SETTLED, stopping_of
from export.training.intervals import Difference, middle

#: Errors below this share of the variance are rounding; no ratio to them is a number of interest.
_ROUNDING = 1e-6
_METHODS = ("least squares", "ridge")


def summary_of(task: Task, groups: Groups, parts: Mapping[Key, Arrays]) -> TaskResult:
    """Return the results of a task from its parts."""
    ours, other = main_group(groups, looped=True), main_group(groups, looped=False)
    looped, unlooped = (groups[name] if name else [] for name in (ours, other))

    def by_pairs(runs: Sequence[Trained]) -> Sample:
        return Sample([parts["path", run.name]["pairs"] for run in runs], task.normaliser, int(runs[0].looped))

    def by_loops(runs: Sequence[Trained]) -> Sample:
        return Sample([parts["path", run.name]["loops"].T for run in runs], task.normaliser, 1)

    samples = {name: by_pairs(runs) for name, runs in groups.items()}
    paths = {name: by_loops(runs) for name, runs in groups.items() if runs[0].looped}
    curves = [samples[name].curve(name, range(task.points)) for name in (ours, other) if name]
    baselines = {}
    for name in BASELINES[task.function]:
        part = parts["baseline", name]
        baselines[name] = Sample([part["errors"]], task.normaliser, 2)
        curves.append(baselines[name].curve(name, list(part["pairs"])))
    level = float(samples[other].mean[-1]) if other else None
    return TaskResult(
        name=task.name,
        function=task.function,
        dims=task.dims,
        points=task.points,
        looped=ours,
        unlooped=other,
        groups=tuple(_group(name, groups[name], sample, paths.get(name), level) for name, sample in samples.items()),
        runs=tuple(
            _run(run, name, by_pairs([run]), by_loops([run]) if run.looped else None)
            for name, runs in groups.items()
            for run in runs
        ),
        by_pairs=tuple(curves),
        by_loops=tuple(path.curve(name, _loops(path)) for name, path in paths.items()),
        run_loops=tuple(path.curve(run.name, _loops(path)) for run in looped for path in [by_loops([run])]),
        against=_against(samples, baselines, ours, other),
        shifts=_shifts(task, looped, unlooped, parts),
        probes=_probes(looped, unlooped, parts),
        **stopping_of(task, looped, parts, within=SETTLED),
    )


def _loops(path: Sample) -> range:
    return range(1, path.mean.shape[0] + 1)


def _group(name: str, runs: Sequence[Trained], sample: Sample, path: Sample | None, level: float | None) -> Group:
    config = runs[0].model.config
    settled = as_unlooped = None
    if path is not None:
        outside = np.flatnonzero(path.mean > SETTLED * path.mean[-1])
        settled = int(outside[-1]) + 2 if len(outside) else 1
        reached = np.flatnonzero(path.mean <= (-1 if level is None else level))
        as_unlooped = int(reached[0]) + 1 if len(reached) else None
    return Group(
        name=name,
        looped=path is not None,
        layers=len(config.shapes),
        dim=config.dim,
        seeds=len(runs),
        parameters=runs[0].model.parameter_count,
        loops=runs[0].loops,
        error=float(sample.mean[-1]),
        interval=middle(sample.drawn[:, -1]),
        longest=None if path is None else float(path.mean[-1]),
        settled=settled,
        as_unlooped=as_unlooped,
    )


def _run(run: Trained, group: str, sample: Sample, path: Sample | None) -> Run:
    longest = None if path is None else float(path.mean[-1])
    error, interval = float(sample.mean[-1]), middle(sample.drawn[:, -1])
    return Run(run.name, group, run.seed, run.steps, run.seconds, run.loops, error, interval, longest)


def _against(
    samples: Mapping[str, Sample], baselines: Mapping[str, Sample], looped: str | None, unlooped: str | None
) -> tuple[Against, ...]:
    if looped is None:
        return ()
    ours, found = samples[looped], []
    others = {**({unlooped: samples[unlooped]} if unlooped else {}), **baselines}
    for name, other in others.items():
        error, mine = float(other.mean[-1]), float(ours.mean[-1])
        ratio = mine / error if error > _ROUNDING else None
        bounds = None if ratio is None else middle(ours.drawn[:, -1] / other.drawn[:, -1])
        difference = Difference(mine - error, middle(ours.drawn[:, -1] - other.drawn[:, -1]))
        mean_ratio = mean_bounds = None
        if other.mean.shape == ours.mean.shape:
            mean_ratio = float(ours.mean.mean() / other.mean.mean())
            mean_bounds = middle(ours.drawn.mean(axis=1) / other.drawn.mean(axis=1))
        found.append(Against(name, error, difference, ratio, bounds, mean_ratio, mean_bounds))
    return tuple(found)


def _shifts(
    task: Task, looped: Sequence[Trained], unlooped: Sequence[Trained], parts: Mapping[Key, Arrays]
) -> tuple[Shifted, ...]:
    if task.function != "linear":
        return ()
    found = []
    for name, shift in SHIFTS.items():
        keys: dict[str, list[Key]] = {
            "looped": [("shift", name, run.name) for run in looped],
            "unlooped": [("shift", name, run.name) for run in unlooped],
            **{method: [("shift", name, method)] for method in _METHODS if ("shift", name, method) in parts},
        }
        samples = {
            method: Sample([parts[key]["errors"] for key in of_method], shift.normaliser(task.dims), kind)
            for kind, (method, of_method) in enumerate(keys.items())
            if of_method
        }
        measured = [int(pairs) for pairs in parts["shift", name, "least squares"]["pairs"]]
        for column, pairs in enumerate(measured):
            errors = {method: float(sample.mean[column]) for method, sample in samples.items()}
            difference = None
            if looped and unlooped:
                one, other = samples["looped"], samples["unlooped"]
                bounds = middle(one.drawn[:, column] - other.drawn[:, column])
                difference = Difference(errors["looped"] - errors["unlooped"], bounds)
            found.append(Shifted(name, pairs, errors, difference))
    return tuple(found)


def _probes(looped: Sequence[Trained], unlooped: Sequence[Trained], parts: Mapping[Key, Arrays]) -> tuple[Probed, ...]:
    wanted = {
        "looped": ("probe", looped[0].name) if looped else None,
        "unlooped": ("probe", unlooped[0].name) if unlooped else None,
        "looped, random weights": ("untrained", looped[0].name) if looped else None,
    }
    found = []
    for model, key in wanted.items():
        if key is not None and key in parts:
            part = parts[key]
            errors = {name: tuple(map(float, column)) for name, column in zip(TARGETS, part["errors"].T, strict=True)}
            found.append(Probed(model, tuple(map(int, part["stages"])), errors))
    return tuple(found)
