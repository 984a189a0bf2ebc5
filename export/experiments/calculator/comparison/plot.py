"""Figures of the results."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edge.bundles.manifest import Measure
from export.figures import new_figure, write_figure
from export.papers.calculator.benchmark import FLOOR, SCORE, SPLIT
from export.papers.calculator.comparison.results import ModelResult, Results
from export.papers.calculator.data import LONG_TERMS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WITHOUT = "give --no-plots"
_MARKERS = "osD^v"
#: Where the axis of scores is cut: networks that learn the rule are above it by far, and all others below it.
_GAP = 20.0


def draw(results: Results, directory: Path) -> list[Path]:
    """Write the figures as PNG, and return their paths; the figure of latencies is left out if none were measured."""
    written = []
    for name, figure in (("accuracy-by-latency", _by_latency(results)), ("error-by-terms", _by_terms(results))):
        if figure is not None:
            write_figure(figure, directory / f"{name}.png")
            written.append(directory / f"{name}.png")
    return written


def _by_latency(results: Results) -> Figure | None:
    """Draw the score and the error on long expressions over the latency of a served request; None without latencies."""
    if not all(model.cost.latencies for model in results.models):
        return None
    figure = new_figure(12, 6, without=_WITHOUT)
    grid = figure.add_gridspec(2, 2, height_ratios=[1, 3])
    # Scores of exact networks are a million times those of the others.
    learned = figure.add_subplot(grid[1, 0])
    exact = figure.add_subplot(grid[0, 0], sharex=learned)
    errors = figure.add_subplot(grid[:, 1])
    for model, style in _styled(results):
        latency = model.cost.latencies[1].served
        around = [[latency.median - latency.least], [latency.most - latency.median]]
        score, error = (_bars(model.measure(*key)) for key in ((SCORE, SPLIT), ("mae", "long/4-8")))
        for axes, (value, bars) in ((learned, score), (exact, score), (errors, error)):
            axes.errorbar(latency.median, value, bars, around, ls="", capsize=2, elinewidth=0.6, **style)
    values = [model.measure(SCORE, SPLIT).value for model in results.models]
    learned.set(yscale="log", ylim=(min(*values, 1.0) / 2, _GAP))
    exact.set(yscale="log", ylim=(_GAP, 10 * max(*values, _GAP)))
    exact.tick_params(labelbottom=False)
    exact.set(title="score, on a logarithmic axis in two parts")
    learned.axhline(1, color="0.6", linewidth=0.8)
    learned.set(ylabel="score; 1 is the baseline")
    errors.set(title="4 to 8 terms", ylabel="mean absolute error", ylim=(-0.2, None))
    for axes in (learned, exact, errors):
        axes.grid(alpha=0.3)
    for axes in (learned, errors):
        axes.set(xlabel="ms of one expression, served: median and range over rounds", xscale="log")
    _finish(figure, errors)
    return figure


def _by_terms(results: Results) -> Figure:
    """Draw the error on long expressions over the number of terms, with intervals."""
    figure = new_figure(12, 5, without=_WITHOUT)
    linear, logarithmic = figure.subplots(1, 2)
    for model, style in _styled(results):
        measures = [model.measure("mae", f"long/{terms}") for terms in LONG_TERMS]
        values = [measure.value for measure in measures]
        low, high = zip(*(measure.interval or (measure.value,) * 2 for measure in measures), strict=True)
        for axes, floor in ((linear, 0.0), (logarithmic, FLOOR)):
            axes.plot(LONG_TERMS, np.maximum(values, floor), markersize=4, linewidth=1.2, **style)
            bounds = np.maximum(low, floor), np.maximum(high, floor)
            axes.fill_between(LONG_TERMS, *bounds, color=style["color"], alpha=0.15, linewidth=0)
    logarithmic.set(yscale="log", title=f"the same; errors below {FLOOR:g} are drawn as that")
    linear.set(title="3 terms were trained on; bands are 95 % intervals", ylabel="mean absolute error")
    for axes in (linear, logarithmic):
        axes.axvline(3, color="0.6", linewidth=0.8, linestyle=":")
        axes.set(xlabel="terms")
        axes.grid(alpha=0.3)
    _finish(figure, linear)
    return figure


def _styled(results: Results) -> Iterator[tuple[ModelResult, dict[str, Any]]]:
    """Yield models with a style of their own: no two of the first fifty share colour and marker."""
    for number, model in enumerate(results.models):
        marker = _MARKERS[(number // 10 + number) % len(_MARKERS)]
        yield model, {"color": f"C{number % 10}", "marker": marker, "label": model.name}


def _bars(measure: Measure) -> tuple[float, list[list[float]]]:
    """Return a value, and how far its interval reaches below and above it."""
    low, high = measure.interval or (measure.value, measure.value)
    return measure.value, [[max(measure.value - low, 0.0)], [max(high - measure.value, 0.0)]]


def _finish(figure: Figure, axes: Axes) -> None:
    handles, names = axes.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside right center", fontsize=8)
