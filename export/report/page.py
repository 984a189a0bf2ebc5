"""The page of a report: one HTML file without scripts, which loads nothing, and its figures as SVG."""

from __future__ import annotations

import base64
import io
import math
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from edge.datatypes import Array
from export.report.drawing import finish_axes, new_figure, plot_points
from export.report.items import Items
from export.report.numbers import Classes, Report, SplitAnswers, Values
from export.training.runs import RunMetrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure


#: More classes than this are too many for numbers in the cells of a confusion matrix.
_MOST_NUMBERS = 12


def training_curve(metrics: RunMetrics, headline: str) -> str:
    """Draw the loss and the score on the hold-out of each epoch."""
    figure = new_figure(6, 3)
    losses, scores = figure.subplots(1, 2)
    epochs = range(1, len(metrics.losses) + 1)
    losses.plot(epochs, metrics.losses, "o-")
    scores.plot(epochs, metrics.scores, "o-")
    scores.plot(metrics.best_epoch, metrics.scores[metrics.best_epoch - 1], "o", color="C1", label="kept")
    for axes, label in ((losses, "training loss"), (scores, f"{headline.replace('_', ' ')} on the hold-out")):
        finish_axes(axes, xlabel="epoch", ylabel=label, xticks=epochs[:: math.ceil(len(epochs) / 10)])
    return _svg(figure)


def reliability(classes: Classes) -> str:
    """Draw accuracy over the largest probability, with intervals; the diagonal is perfect calibration."""
    figure = new_figure(4.2, 4)
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], color="0.6", linewidth=1)
    shares = [one.accuracy for one in classes.bins]
    confidences, intervals = [one.confidence for one in classes.bins], [share.interval for share in shares]
    plot_points(axes, confidences, [share.value for share in shares], intervals)
    finish_axes(axes, xlabel="probability of the answer", ylabel="share of right answers")
    axes.set(xlim=(0, 1.02), ylim=(0, 1.02))
    return _svg(figure)


def confusion(classes: Classes) -> str:
    """Draw the shares of each class in the data by predicted class, with counts where they fit."""
    counts = np.array(classes.confusion)
    labels, few = [row.label[:20] for row in classes.rows], len(classes.rows) <= _MOST_NUMBERS
    side = min(2.5 + 0.6 * len(labels), 9)
    figure = new_figure(side, side)
    axes = figure.subplots()
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    axes.set(xlabel="predicted", ylabel="in the data")
    if few:
        axes.set_xticks(range(len(labels)), labels, rotation=45, ha="right", parse_math=False)
        axes.set_yticks(range(len(labels)), labels, parse_math=False)
        for (row, column), count in np.ndenumerate(counts):
            colour = "w" if shares[row, column] > 0.5 else "k"
            axes.text(column, row, f"{count}", ha="center", va="center", color=colour)
    return _svg(figure)


def scatter(values: Values) -> str:
    """Draw predictions, and residuals, over the values in the data."""
    figure = new_figure(8, 3.8)
    left, right = figure.subplots(1, 2)
    targets, answers = np.array(values.points).T
    ends = [min(targets.min(), answers.min()), max(targets.max(), answers.max())]
    left.plot(ends, ends, color="0.6", linewidth=1)
    left.plot(targets, answers, ".", alpha=0.4)
    right.axhline(0, color="0.6", linewidth=1)
    right.plot(targets, answers - targets, ".", alpha=0.4)
    for axes, label in ((left, "predicted"), (right, "residual: predicted minus in the data")):
        finish_axes(axes, xlabel="in the data", ylabel=label)
    return _svg(figure)


def picture(colours: Array) -> str:
    """Return an image [size, size, channels], from 0 to 1, as the URL of an inline PNG."""
    from matplotlib.image import imsave

    data = io.BytesIO()
    imsave(data, np.broadcast_to(colours, (*colours.shape[:2], 3)).clip(0, 1), format="png")
    return f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"


def _svg(figure: Figure) -> str:
    from matplotlib import rc_context

    data = io.StringIO()
    # The browser's fonts have letters that matplotlib's lacks, which it warns of while it arranges the figure.
    with rc_context({"svg.fonttype": "none"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")
        figure.savefig(data, format="svg")
    text = data.getvalue()
    return text[text.index("<svg") :]


_TEMPLATE = Path(__file__).with_name("page.html")


def page_of(report: Report, items: Items) -> str:
    """Return the page; all texts of the data are escaped.

    Args:
        items: of the report, for the pictures of images.

    Raises:
        UsageError: matplotlib is not installed.
    """
    metrics = report.metrics
    # Markup: the figures are SVG of our own making, in which matplotlib has escaped the labels.
    return (
        Environment(autoescape=True, undefined=StrictUndefined)
        .from_string(_TEMPLATE.read_text("utf-8"))
        .render(
            report=report,
            splits=[_split(split, items) for split in report.splits],
            curve=Markup(training_curve(metrics, report.headline)) if metrics.scores else "",
        )
    )


def _split(split: SplitAnswers, items: Items) -> dict[str, Any]:
    colours = items.measured[split.name].picture
    answers = split.classes or split.values
    assert answers is not None
    pictures = [picture(colours(error.row)) if colours else "" for error in answers.errors]
    drawn: dict[str, Any] = {"numbers": split, "errors": list(zip(answers.errors, pictures, strict=True))}
    if split.classes:
        drawn["confusion"] = Markup(confusion(split.classes))
        drawn["reliability"] = Markup(reliability(split.classes))
    if split.values:
        drawn["scatter"] = Markup(scatter(split.values))
    return drawn
