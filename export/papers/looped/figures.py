"""Figures of the looped experiments."""

from __future__ import annotations

from typing import TYPE_CHECKING

from export.papers.looped.measure import TaskResult
from export.report.drawing import finish_axes, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ERROR = "squared error / variance of the values"
#: Baselines that have no error left, and those that diverge, would squeeze everything else.
_LEAST, _MOST = 1e-4, 4.0


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
