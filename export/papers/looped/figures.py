"""Tables and figures of the looped experiments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from export.papers.experiment import Table
from export.papers.looped.measure import TaskResult
from export.report.drawing import finish_axes, new_figure
from export.training.intervals import RESAMPLES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LOOPS = (1, 2, 4, 6, 8, 10, 12, 16, 20, 30, 40, 60, 80, 120, 200, 500)
#: Numbers of pairs in a table of curves, at most.
_COLUMNS = 11
#: Errors below this are of the arithmetic.
_ROUNDING = 1e-6
_ERROR = "squared error / variance of the values"
#: Baselines that have no error left, and those that diverge, would squeeze everything else.
_LEAST, _MOST = 1e-4, 4.0


def text_of(records: Mapping[str, TaskResult], prompts: int) -> str:
    """Return how errors were measured."""
    where = sorted({f"{one.processor.name} ({one.processor.described})" for one in records.values()})
    return (
        f"Errors are squared and divided by the variance of the values, on {prompts:,} prompts, the same for all "
        f"methods. Intervals are of 95 %, over prompts, by {RESAMPLES:,} resamples, and over seeds, by Student or "
        f"Welch, where a model has several; one seed has no spread. Computed on {', '.join(where)}."
    )


def tables_of(task: TaskResult) -> list[Table]:
    """Return the tables of a function class and size."""
    name = f"{task.function}, d = {task.dims}, {task.points - 1} pairs"
    groups = [
        (one.name, seeds_of(len(one.by_seed)), f"{one.parameters:,}", one.loops, one.error, _number(one.longest),
         ", ".join(map(_number, one.by_seed.values())))
        for one in task.groups
    ]  # fmt: skip
    heads = ("model", "seeds", "parameters", "loops", "error", "after most loops", "by seed")
    common = sorted(set(range(1, task.points)).intersection(*task.by_pairs.values()))
    pairs = common[:: len(common) // -_COLUMNS][::-1]  # the last one, and even steps before it
    columns = [loops for loops in _LOOPS if all(loops <= len(curve) for curve in task.by_loops.values())]
    tables = [
        Table(f"{name}: models, after all pairs", heads, groups, 2),
        Table(
            f"{name}: error by number of pairs",
            ("pairs", *map(str, pairs)),
            [(method, *(_number(curve.get(at)) for at in pairs)) for method, curve in task.by_pairs.items()],
        ),
        Table(
            f"{name}: error by loops",
            ("loops", *map(str, columns)),
            [(model, *(_number(curve[at - 1]) for at in columns)) for model, curve in task.by_loops.items()],
        ),
        Table(
            f"{name}: {task.looped} over the others",
            ("other", "seeds", "ratio after all pairs", "ratio of means over all numbers of pairs"),
            [(one.other, seeds_of(*one.seeds), one.after_all, one.overall) for one in task.ratios],
            2,
        ),
        Table(
            f"{name}: loops that stop by their residual",
            ("tolerance", "mean loops", "90th percentile", "error"),
            [(one.tolerance, f"{one.mean_loops:.1f}", f"{one.most:.0f}", _number(one.error)) for one in task.stopping],
            0,
        ),
    ]
    return [table for table in tables if table.rows]


def seeds_of(*numbers: int) -> str:
    """Return numbers of seeds for people, and whether an interval is over prompts alone."""
    words = " / ".join(str(number) if number else "–" for number in numbers)
    return words if max(numbers) > 1 else f"{words}, prompts alone"


def _number(value: float | None) -> str:
    if value is not None and 0 < abs(value) < _ROUNDING:
        return f"<{_ROUNDING:g}"
    return "" if value is None else f"{value:.3g}"


def draw(task: TaskResult) -> dict[str, Figure]:
    """Return the figures of a task by name: errors over pairs, and over loops if there is a looped model."""
    main = (task.looped, task.unlooped)
    where = f"{task.function}, d = {task.dims}"
    figures = {"samples": new_figure(8, 5, without="give --no-plots")}
    axes = figures["samples"].subplots()
    for name, curve in task.by_pairs.items():
        axes.plot(list(curve), list(curve.values()), "-" if name in main else "--", lw=1 + (name in main), label=name)
    axes.set(title=where, xlabel="pairs in the prompt", ylim=(_LEAST, _MOST))
    if task.by_loops:
        figures["loops"] = new_figure(8, 5, without="give --no-plots")
        axes = figures["loops"].subplots()
        for model, errors in task.by_loops.items():
            axes.plot(range(1, len(errors) + 1), errors, lw=2 if model == task.looped else 0.8, label=model)
        for number, group in enumerate(group for group in task.groups if group.longest is None):
            axes.axhline(group.error.value, color=f"C{9 - number}", lw=1, ls="--", label=group.name)
        axes.set(title=f"{where}, {task.points - 1} pairs", xlabel="loops")
    for figure in figures.values():
        finish_axes(figure.axes[0], ylabel=_ERROR, yscale="log")
    return figures
