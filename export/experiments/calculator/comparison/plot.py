"""Figures of the results."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from edge.bundles.manifest import Measure
from export.calculator.benchmark import FLOOR, SCORE, SPLIT
from export.experiments.calculator.comparison.results import ModelResult, Results
from export.figures import new_figure, write_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WITHOUT = "give --no-plots"
_TERMS = range(2, 9)
_MARKERS = "osD^v"


def draw(results: Results, directory: Path) -> list[Path]:
    """Write the figures as PNG, and return their paths; without latencies there is none of them."""
    written = []
    for name, figure in (("accuracy-by-latency", _by_latency(results)), ("error-by-terms", _by_terms(results))):
        if figure is not None:
            write_figure(figure, directory / f"{name}.png")
            written.append(directory / f"{name}.png")
    return written


def _by_latency(results: Results) -> Figure | None:
    """Draw the score and the error on long expressions over the latency of a served request."""
    if not all(model.cost.latencies for model in results.models):
        return None
    figure = new_figure(11, 4.8, without=_WITHOUT)
    scores, errors = figure.subplots(1, 2)
    for model, color, marker in _styled(results):
        latency = model.cost.latencies[1].served
        around = [[latency.median - latency.least], [latency.most - latency.median]]
        for axes, measure in ((scores, model.measure(SCORE, SPLIT)), (errors, model.measure("mae", "long/4-8"))):
            value, low, high = _bounds(measure)
            axes.errorbar(
                latency.median,
                value,
                [[value - low], [high - value]],
                around,
                fmt=marker,
                color=color,
                capsize=2,
                elinewidth=0.6,
                label=model.name,
            )
    scores.axhline(1, color="0.6", linewidth=0.8)
    scores.set(title="score; 1 is the baseline", ylabel="score")
    errors.set(title=f"4 to 8 terms; errors below {FLOOR:g} are drawn as that", ylabel="mean absolute error")
    for axes in (scores, errors):
        axes.set(xlabel="ms, served, one expression: median and range over rounds", xscale="log", yscale="log")
        axes.grid(alpha=0.3)
    _finish(figure, scores)
    return figure


def _by_terms(results: Results) -> Figure:
    """Draw the error on long expressions over the number of terms, with intervals."""
    figure = new_figure(9, 5, without=_WITHOUT)
    axes = figure.subplots()
    for model, color, marker in _styled(results):
        points = [_bounds(model.measure("mae", f"long/{terms}")) for terms in _TERMS]
        values, low, high = zip(*points, strict=True)
        axes.plot(_TERMS, values, marker=marker, ms=4, color=color, label=model.name)
        axes.fill_between(_TERMS, low, high, color=color, alpha=0.15, linewidth=0)
    axes.axvline(3, color="0.6", linewidth=0.8, linestyle=":")
    axes.set(
        title="Expressions of 3 terms were trained on; bands are 95 % intervals",
        xlabel=f"terms (errors below {FLOOR:g} are drawn as that)",
        ylabel="mean absolute error",
        yscale="log",
    )
    axes.grid(alpha=0.3)
    _finish(figure, axes)
    return figure


def _styled(results: Results) -> Iterator[tuple[ModelResult, str, str]]:
    """Yield models with a colour and a marker each, which no two of the first fifty share."""
    for number, model in enumerate(results.models):
        yield model, f"C{number % 10}", _MARKERS[(number // 10 + number) % len(_MARKERS)]


def _bounds(measure: Measure) -> tuple[float, float, float]:
    """Return a value and its interval, as a logarithmic axis can show them."""
    low, high = measure.interval or (measure.value, measure.value)
    value = max(measure.value, FLOOR)
    return value, min(max(low, FLOOR), value), max(high, value)


def _finish(figure: Figure, axes: Axes) -> None:
    handles, names = axes.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside right center", fontsize=8)
