"""Pictures of what calculators do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from export.figures import new_figure, write_figure
from export.papers.calculator.data import IN_RANGE
from export.papers.calculator.view.attention import PADDING, Attention
from export.papers.calculator.view.errors import FORMS, OPERANDS
from export.papers.calculator.view.report import View

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Errors below this have the colour of 0, and larger ones a logarithmic scale.
_SMALL = 0.1
_LARGE = 20.0


def draw(view: View, out: Path) -> None:
    """Draw ``errors.png``, ``terms.png`` and, of a network with attention, ``attention.png`` into OUT/RUN.

    A network with several queries in a layer has ``maps.png``, too.
    """
    draw_together([view], out / view.run)
    if view.attention is None:
        return
    write_figure(_attention(view, view.attention), out / view.run / "attention.png")
    if len(view.attention.layers[0][0]) > 1:
        write_figure(_maps(view, view.attention), out / view.run / "maps.png")


def draw_together(views: Sequence[View], out: Path) -> None:
    """Draw ``errors.png`` and ``terms.png`` of several networks into OUT."""
    write_figure(_errors(views), out / "errors.png")
    write_figure(_terms(views), out / "terms.png")


def _errors(views: Sequence[View]) -> Figure:
    from matplotlib.colors import SymLogNorm
    from matplotlib.patches import Rectangle

    columns = len(FORMS) if len(views) > 1 else 3
    panels = [(view, grid) for view in views for grid in view.grids]
    rows = len(panels) // columns
    figure = new_figure(2.4 * columns + 1, 2.5 * rows + 0.7)
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    low, high = OPERANDS[0] - 0.5, OPERANDS[-1] + 0.5
    image: Any = None
    for place, (axis, (view, grid)) in enumerate(zip(axes.flat, panels, strict=True)):
        image = axis.imshow(
            grid.array,
            cmap="RdBu_r",
            norm=SymLogNorm(_SMALL, vmin=-_LARGE, vmax=_LARGE),
            extent=(low, high, low, high),
            origin="lower",
        )
        start, size = IN_RANGE.start - 0.5, len(IN_RANGE)
        axis.add_patch(Rectangle((start, start), size, size, fill=False, linewidth=1.2))
        axis.set_xticks((-10, -5, 0, 5, 10))
        axis.set_yticks((-10, -5, 0, 5, 10))
        axis.set_title(grid.form, fontsize=10)
        if place // columns == rows - 1:
            axis.set_xlabel("b")
        if place % columns == 0:
            axis.set_ylabel(f"{_short(view)}\na", fontsize=9)
    bar = figure.colorbar(image, ax=axes, shrink=0.9, extend="both", label="answer less truth")
    ticks = (-_LARGE, -1, -_SMALL, 0, _SMALL, 1, _LARGE)
    bar.set_ticks(ticks, labels=[f"{tick:g}" for tick in ticks])
    bar.minorticks_off()
    figure.suptitle("Error by operands; the frame holds those of training", fontsize=11)
    return figure


def _terms(views: Sequence[View]) -> Figure:
    figure = new_figure(6.5, 4.2)
    axis = figure.subplots()
    largest = 0.0
    for index, view in enumerate(views):
        terms = range(1, len(view.by_terms) + 1)
        values = [measure.value for measure in view.by_terms]
        low, high = zip(*(measure.interval or (measure.value, measure.value) for measure in view.by_terms), strict=True)
        style = ("-", "--", ":", "-.")[index // 10 % 4]
        axis.plot(terms, values, marker="o", markersize=3, linestyle=style, color=f"C{index % 10}", label=_short(view))
        axis.fill_between(terms, low, high, color=f"C{index % 10}", alpha=0.2, linewidth=0)
        largest = max(largest, *high)
    axis.axvline(3, color="grey", linewidth=0.8, linestyle=":", label="length of training")
    axis.set_yscale("symlog", linthresh=0.01)
    axis.set_ylim(0, max(largest * 1.5, 0.01))
    axis.set_xlabel("terms")
    axis.set_ylabel("mean absolute error, with its 95 % interval")
    axis.set_title(
        f"New expressions of operands from {IN_RANGE[0]} to {IN_RANGE[-1]}, at most {_most(views)} each", fontsize=10
    )
    axis.grid(alpha=0.3)
    if len(views) > 6:
        axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    else:
        axis.legend(fontsize=8)
    return figure


def _attention(view: View, attention: Attention) -> Figure:
    """Draw the attention of the value, or of the summary token, of each head: one panel for each layer."""
    layers = [np.array(layer)[:, 0] for layer in attention.layers]  # [heads, keys]
    heads = max(len(layer) for layer in layers)
    columns = min(len(layers), 3)
    rows = -(-len(layers) // columns)
    width = max(5.0 * columns, 6.5)
    figure = new_figure(width, rows * (0.9 + 0.25 * heads) + 0.9)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    largest = max(float(np.abs(layer).max()) for layer in layers)
    colours = (
        {"cmap": "RdBu_r", "vmin": -largest, "vmax": largest}
        if attention.kind == "gate"
        else {"cmap": "viridis", "vmin": 0, "vmax": largest}
    )
    image: Any = None
    for number, (axis, layer) in enumerate(zip(axes, layers, strict=False), start=1):
        image = axis.imshow(layer, aspect="auto", **colours)
        _label_keys(axis, attention.keys)
        axis.set_yticks([])
        if heads > 1:
            axis.set_yticks(range(len(layer)), [str(head) for head in range(1, len(layer) + 1)])
            axis.set_ylabel("head")
        if len(layers) > 1:
            axis.set_title(f"layer {number}", fontsize=9)
        if len(layer) == 1:
            for key, weight in enumerate(layer[0]):
                axis.annotate(
                    f"{round(weight, 2) + 0:.2f}",
                    (key, 0),
                    ha="center",
                    va="center",
                    fontsize=7,
                    color="white",
                    bbox={"boxstyle": "round,pad=0.1", "facecolor": "black", "alpha": 0.4, "linewidth": 0},
                )
    for axis in axes[len(layers) :]:
        axis.set_visible(False)
    figure.colorbar(image, ax=axes.tolist(), label="gate" if attention.kind == "gate" else "weight")
    figure.suptitle(
        _title(view, "attention of the value" if heads == 1 else "attention of the summary token Σ"), fontsize=10
    )
    return figure


def _maps(view: View, attention: Attention) -> Figure:
    """Draw the whole maps of all layers and heads; the last layer has one query."""
    layers = [np.array(layer) for layer in attention.layers]  # [heads, queries, keys]
    heads = max(len(layer) for layer in layers)
    heights = [1.0 if layer.shape[1] > 1 else 0.25 for layer in layers]
    figure = new_figure(2.1 * heads + 0.6, 2.1 * sum(heights) + 1.2)
    axes = figure.subplots(len(layers), heads, squeeze=False, height_ratios=heights)
    largest = max(float(layer.max()) for layer in layers)
    image: Any = None
    for row, layer in enumerate(layers):
        for head, weights in enumerate(layer):
            axis = axes[row][head]
            image = axis.imshow(weights, cmap="viridis", vmin=0, vmax=largest, aspect="auto")
            _label_keys(axis, attention.keys, size=5)
            axis.set_yticks(range(len(weights)), attention.keys[: len(weights)], fontsize=5)
            if row == 0:
                axis.set_title(f"head {head + 1}", fontsize=8)
            if head == 0:
                axis.set_ylabel(f"layer {row + 1}", fontsize=8)
    figure.colorbar(image, ax=axes.ravel().tolist(), label="weight", shrink=0.6)
    figure.suptitle(_title(view, "row: attending token; column: attended token"), fontsize=10)
    return figure


def _label_keys(axis: Any, keys: Sequence[str], size: int = 8) -> None:
    axis.set_xticks(range(len(keys)), keys, fontsize=size)
    if PADDING in keys:
        axis.axvline(keys.index(PADDING) - 0.5, color="0.6", linestyle="--", linewidth=1)


def _title(view: View, what: str) -> str:
    return f"{_short(view)}: {view.expression} → {view.answer:.4g}; {what}; right of the dashed line is padding"


def _short(view: View) -> str:
    return view.run.removeprefix("calculator-")


def _most(views: Sequence[View]) -> int:
    return max(measure.n for view in views for measure in view.by_terms)
