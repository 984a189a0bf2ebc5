"""A :class:`export.experiments.frontier.Frontier` drawn: points lost over speed-up, a panel for each precision."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from export.experiments.frontier import Frontier
from export.experiments.measure import PRECISIONS
from export.figures import new_figure, write_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WITHOUT = "give --no-plots"
#: What paper 002 claims for the average of GLUE: speed-up and points, as it prints them.
PAPER = {"fp32": (1.76, -0.2), "int8": (2.3, -0.5)}


def draw(frontier: Frontier, path: str | Path) -> None:
    """Write the differences to dense FP32 over the speed-ups; bars are 95 % intervals, thin lines are tasks.

    Args:
        path: its suffix is the format: ``.png``, ``.svg`` or ``.pdf``.

    Raises:
        UsageError: there is no matplotlib, or the file cannot be written, or not in this format.
    """
    figure = new_figure(6.0 * len(PRECISIONS), 4.5, without=_WITHOUT)
    panels = figure.subplots(1, len(PRECISIONS), squeeze=False, sharey=True)[0]
    for axes, precision in zip(panels, PRECISIONS, strict=True):
        _panel(axes, frontier, precision)
    panels[0].set_ylabel("points lost or won against dense FP32")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center")
    tasks = ", ".join(f"{task} ({seeds})" for task, seeds in frontier.seeds.items())
    figure.suptitle(f"Tasks (seeds): {tasks}; ONNX Runtime, one thread, batch 1, {', '.join(frontier.processors)}")
    write_figure(figure, path)


def _panel(axes: Axes, frontier: Frontier, precision: str) -> None:
    points = [point for point in frontier.points if point.precision == precision]
    speeds = [point.speedup for point in points]
    for number, task in enumerate(frontier.seeds):
        values = [point.tasks[number].difference.value for point in points]
        axes.plot(speeds, values, ".-", linewidth=0.8, alpha=0.5, label=task)
    values = [point.difference.value for point in points]
    bars = [
        [point.difference.value - point.difference.interval[0] for point in points],
        [point.difference.interval[1] - point.difference.value for point in points],
    ]
    axes.errorbar(speeds, values, yerr=bars, fmt="o-", color="black", capsize=3, label="average")
    for point in points:
        axes.annotate(point.tier, (point.speedup, point.difference.value), xytext=(6, 6), textcoords="offset points")
    axes.plot(*PAPER[precision], "x", color="C3", markersize=9, label="paper 002 claims")
    axes.axhline(0, color="0.7", linewidth=0.8)
    axes.set(title=precision.upper(), xlabel="times as fast as dense FP32, dev as it is")
    axes.grid(alpha=0.3)
