"""The page of a report: one HTML file without scripts, which loads nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from export.report import page as figures
from export.report.items import Items
from export.report.numbers import Report, Split

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
            curve=Markup(figures.training_curve(metrics, report.headline)) if metrics.scores else "",
        )
    )


def _split(split: Split, items: Items) -> dict[str, Any]:
    picture = items.measured[split.name].picture
    found = split.classes or split.values
    assert found is not None
    pictures = [figures.picture(picture(error.row)) if picture else "" for error in found.errors]
    drawn: dict[str, Any] = {"numbers": split, "errors": list(zip(found.errors, pictures, strict=True))}
    if split.classes:
        drawn["confusion"] = Markup(figures.confusion(split.classes))
        drawn["reliability"] = Markup(figures.reliability(split.classes))
    if split.values:
        drawn["scatter"] = Markup(figures.scatter(split.values))
    return drawn
