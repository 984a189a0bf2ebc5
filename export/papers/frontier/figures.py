"""The figure of a frontier."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from export.papers.frontier.records import DENSE, Key
from export.papers.frontier.summary import Summary, geometric
from export.papers.frontier.tables import PAPER, processors
from export.report.drawing import finish_axes, new_figure, plot_points

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw(summary: Summary) -> Figure:
    """Draw the differences to dense FP32 over the speed-ups; bars are 95 % intervals, thin lines are tasks.

    A control that lacks one of the judged tasks is left out, since its average is that of others.
    """
    figure = new_figure(6.0 * len(PAPER), 4.5, without="give --no-plots")
    panels = figure.subplots(1, len(PAPER), sharey=True)
    for axes, precision in zip(panels, PAPER, strict=True):
        _panel(axes, summary, precision)
    panels[0].set_ylabel("points lost or won against dense FP32")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center")
    tasks = ", ".join(f"{name} ({len(summary.tasks[name].families)})" for name in summary.judged)
    where = ", ".join(processors(summary))
    figure.suptitle(f"Tasks (seeds): {tasks}; ONNX Runtime, one thread, batch 1, {where}")
    return figure


def _panel(axes: Axes, summary: Summary, precision: str) -> None:
    runs = [run for run, form in summary.keys if form == precision]
    tiers = [(run, precision) for run in runs if run in (DENSE, *summary.settings.tiers)]
    speeds = {key: geometric(summary.speedups(key)) for key in tiers}
    for name in summary.judged:
        having = [key for key in tiers if summary.tasks[name].having(key)]
        points = [(speeds[key], summary.difference(key, tasks=[name]).value) for key in having]
        axes.plot(*zip(*points, strict=True), ".-", linewidth=0.8, alpha=0.5, label=name)
    _with_bars(axes, summary, tiers, fmt="o-", label="average", color="black")
    control = summary.settings.control_run, precision
    if control in summary.keys and summary.is_complete(control):
        _with_bars(axes, summary, [control], fmt="s", label=control[0], color="C5", markersize=5)
    for key in tiers:
        at = (speeds[key], summary.difference(key).value)
        axes.annotate(key[0], at, xytext=(6, 6), textcoords="offset points")
    axes.plot(*PAPER[precision], "x", color="C3", markersize=9, label="paper 002 claims")
    axes.axhline(0, color="0.7", linewidth=0.8)
    finish_axes(axes, legend=False, title=precision.upper(), xlabel="times as fast as dense FP32, dev as it is")


def _with_bars(axes: Axes, summary: Summary, keys: list[Key], **style: Any) -> None:
    differences = [summary.difference(key) for key in keys]
    speeds = [geometric(summary.speedups(key)) for key in keys]
    plot_points(axes, speeds, [one.value for one in differences], [one.interval for one in differences], **style)
