"""Figures of the calculators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from export.data.expressions import IN_RANGE, LONG_TERMS
from export.papers.calculator.benchmark import FLOOR
from export.papers.calculator.records import Grids, ModelResult, TrainingRecord, results_of
from export.report.drawing import finish_axes, new_figure, plot_band

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Errors below the first have the colour of 0, and larger ones a logarithmic scale up to the second.
_SMALL, _LARGE = 0.1, 20.0


def errors_by_terms(models: Sequence[ModelResult]) -> Figure:
    """Draw the error on long expressions by their number of terms, with intervals."""
    figure = new_figure(9, 5, without="give --no-plots")
    axes = figure.subplots()
    for number, model in enumerate(models):
        measures = [model.measure("mae", f"long/{terms}") for terms in LONG_TERMS]
        ends = np.array([(one.value, *(one.interval or (one.value, one.value))) for one in measures]).T
        marker = "osD^v"[(number // 10 + number) % 5]
        plot_band(axes, LONG_TERMS, *np.maximum(ends, FLOOR), color=f"C{number % 10}", marker=marker, label=model.name)
    axes.axvline(3, color="0.6", linewidth=0.8, linestyle=":")
    title = f"3 terms were trained on; errors below {FLOOR:g} are drawn as that; bands are 95 % intervals"
    finish_axes(axes, legend=False, yscale="log", xlabel="terms", ylabel="mean absolute error", title=title)
    figure.legend(loc="outside right center", fontsize=8)
    return figure


def errors_by_operands(models: Mapping[str, Grids]) -> Figure:
    """Draw answers less truths by two operands: a row for each model, a column for each form."""
    from matplotlib.colors import SymLogNorm
    from matplotlib.patches import Rectangle

    forms = list(next(iter(models.values())))
    figure = new_figure(2.4 * len(forms) + 1, 2.5 * len(models) + 0.7, without="give --no-plots")
    panels = figure.subplots(len(models), len(forms), squeeze=False, sharex=True, sharey=True)
    image: Any = None
    for row, (name, grids) in zip(panels, models.items(), strict=True):
        for axes, (form, errors) in zip(row, grids.items(), strict=True):
            most, norm = len(errors) / 2, SymLogNorm(_SMALL, vmin=-_LARGE, vmax=_LARGE)
            image = axes.imshow(errors, cmap="RdBu_r", norm=norm, extent=(-most, most) * 2, origin="lower")
            trained = (IN_RANGE.start - 0.5,) * 2
            axes.add_patch(Rectangle(trained, len(IN_RANGE), len(IN_RANGE), fill=False, linewidth=1.2))
            axes.set(title=form, xlabel="b")
        row[0].set_ylabel(f"{name}\na")
    figure.colorbar(image, ax=panels, shrink=0.9, extend="both", label="answer less truth")
    figure.suptitle("Error by operands; the frame holds those of training")
    return figure


def figures_of(groups: Mapping[str, Sequence[TrainingRecord]]) -> dict[str, Figure]:
    """Return the figures by name, of the seeds of each calculator of sums."""
    grids = {name: runs[0].grids for name, runs in groups.items() if runs[0].grids}
    return {"errors-by-terms": errors_by_terms(results_of(groups)), "errors-by-operands": errors_by_operands(grids)}
