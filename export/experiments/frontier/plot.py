"""Figure of a frontier: the search and its controls, and the average with its interval in each precision."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from export.figures import new_figure, write_figure
from export.papers.frontier.settings import DENSE
from export.papers.frontier.summary import Frontier, Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WITHOUT = "give --no-plots"
#: Claims of paper 002 for the average of GLUE: speed-up and points.
PAPER = {"fp32": (1.76, -0.2), "int8": (2.3, -0.5)}


def draw(frontier: Frontier, path: str | Path) -> None:
    """Draw the differences to dense FP32 over the speed-ups; bars are 95 % intervals, thin lines are tasks.

    Controls that lack one of the judged tasks are left out, since their average is that of others.
    """
    precisions = [one for one in PAPER if any(point.precision == one for point in frontier.points)]
    figure = new_figure(6.0 * len(precisions), 4.5, without=_WITHOUT)
    panels = figure.subplots(1, len(precisions), squeeze=False, sharey=True)[0]
    for axes, precision in zip(panels, precisions, strict=True):
        _panel(axes, frontier, precision)
    panels[0].set_ylabel("points lost or won against dense FP32")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center")
    tasks = ", ".join(f"{task} ({frontier.seeds[task]})" for task in frontier.judged)
    figure.suptitle(f"Tasks (seeds): {tasks}; ONNX Runtime, one thread, batch 1, {', '.join(frontier.processors)}")
    write_figure(figure, path)


def _panel(axes: Axes, frontier: Frontier, precision: str) -> None:
    found = [point for point in frontier.points if point.precision == precision]
    tiers = [point for point in found if point.run in (DENSE, *frontier.settings.tiers)]
    for task in frontier.judged:
        line = [(p.speedup, one.difference.value) for p in tiers for one in p.tasks if one.task == task]
        axes.plot(*zip(*line, strict=True), ".-", linewidth=0.8, alpha=0.5, label=task)
    _with_bars(axes, tiers, "o-", "average", color="black")
    controls = [point for point in found if point not in tiers]
    for number, control in enumerate(controls):
        if frontier.is_judged(one.task for one in control.tasks):
            name = control.run.removeprefix(f"{frontier.settings.control_tier}-")
            _with_bars(axes, [control], "sDv^P"[number % 5], name, color=f"C{5 + number}", markersize=5)
    for point in tiers:
        place = (point.speedup, point.judged.value)
        axes.annotate(point.run, place, xytext=(6, 6), textcoords="offset points")
    axes.plot(*PAPER[precision], "x", color="C3", markersize=9, label="paper 002 claims")
    axes.axhline(0, color="0.7", linewidth=0.8)
    axes.set(title=precision.upper(), xlabel="times as fast as dense FP32, dev as it is")
    axes.grid(alpha=0.3)


def _with_bars(axes: Axes, points: list[Point], form: str, label: str, **style: Any) -> None:
    values = [point.judged.value for point in points]
    bars = [
        [point.judged.value - point.judged.interval[0] for point in points],
        [point.judged.interval[1] - point.judged.value for point in points],
    ]
    speeds = [point.speedup for point in points]
    axes.errorbar(speeds, values, yerr=bars, fmt=form, capsize=3, label=label, **style)
