"""The figure of all settings: their errors on each split, with intervals, beside the base."""

from __future__ import annotations

from pathlib import Path

from export.figures import new_figure, write_figure
from export.papers.calculator.variations.grid import BASE, PRODUCT
from export.papers.calculator.variations.results import COLUMNS, Results

_TICKS = [digit * 10.0**power for power in range(-3, 2) for digit in (1, 2, 3, 5)]


def draw(results: Results, path: Path) -> None:
    """Draw the mean absolute errors on four splits, a line for each setting."""
    rows = [row for row in results.rows if row.factor != PRODUCT and row.measures]
    rows = [*rows, *results.cells][::-1]  # the first at the top
    figure = new_figure(13, 1.2 + 0.22 * len(rows), without="give --no-plots")
    panels = figure.subplots(1, 4, sharey=True)
    for axes, (metric, split, heading) in zip(panels, COLUMNS[:4], strict=True):
        for place, row in enumerate(rows):
            measure = row.measure(metric, split)
            low, high = measure.interval or (measure.value, measure.value)
            color = "black" if row.setting == BASE else "C1" if row.factor == PRODUCT else "C0"
            # A few seeds may have an interval that reaches below zero, which a logarithmic axis cannot show.
            axes.plot([max(low, measure.value / 10), high], [place, place], color=color, lw=0.8)
            axes.plot(measure.value, place, "o", color=color, ms=4)
            if row.setting == BASE:
                axes.axvline(measure.value, color="black", lw=0.5, ls=":")
        axes.set(title=heading, xscale="log")
        low, high = axes.get_xlim()
        axes.set_xticks([tick for tick in _TICKS if low <= tick <= high])
        axes.xaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
        axes.tick_params(axis="x", labelsize=6)
        axes.grid(alpha=0.3, axis="x")
    panels[0].set_yticks(range(len(rows)), [f"{row.factor}: {row.setting}" for row in rows], fontsize=7)
    write_figure(figure, path)
