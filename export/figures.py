"""Figures by matplotlib, which is optional; they need no display."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from edge.errors import Raw, UsageError
from edge.files import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width: float, height: float, *, without: str = "leave --plot out") -> Figure:
    """Return an empty figure.

    Args:
        width: in inches.
        without: alternative to an installation of matplotlib, for the message.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        fix = f"Install it: pip install 'fewheads[plot]', or {without}."
        raise UsageError("plots", given=Raw("no matplotlib"), expected="matplotlib", fix=fix) from None
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def write_figure(figure: Figure, path: str | Path) -> None:
    """Write a figure whole or not at all; the suffix is the format: ``.png``, ``.svg`` or ``.pdf``."""
    path, data = Path(path), io.BytesIO()
    try:
        figure.savefig(data, dpi=120, format=path.suffix.removeprefix("."))
        write_whole(path, data.getvalue())
    except (OSError, ValueError) as error:  # ValueError: an unknown format
        fix = "Choose another place, and .png, .svg or .pdf."
        raise UsageError(f"{path}", given=Raw(error), expected="a file to write", fix=fix) from None
