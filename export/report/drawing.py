"""Figures by matplotlib, which is optional; they need no display."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge.errors import Raw, UsageError
from edge.files import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def new_figure(width: float, height: float, *, without: str = "give --no-plots") -> Figure:
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


def plot_band(
    axes: Axes, x: Sequence[float], y: Sequence[float], low: Sequence[float], high: Sequence[float], **style: Any
) -> None:
    """Draw a line, and its interval from ``low`` to ``high`` as a band of the same colour."""
    (line,) = axes.plot(x, y, **style)
    axes.fill_between(x, low, high, color=line.get_color(), alpha=0.2, linewidth=0)


def plot_points(
    axes: Axes, x: Sequence[float], y: Sequence[float], intervals: Sequence[tuple[float, float] | None], **style: Any
) -> None:
    """Draw values with their intervals as error bars; None is a value without one."""
    bars = [
        [max(value - interval[0], 0) if interval else 0 for value, interval in zip(y, intervals, strict=True)],
        [max(interval[1] - value, 0) if interval else 0 for value, interval in zip(y, intervals, strict=True)],
    ]
    axes.errorbar(x, y, yerr=bars, **{"fmt": "o", "capsize": 3, **style})


def finish_axes(axes: Axes, *, legend: bool = True, **labels: Any) -> None:
    """Set title, labels and scales as :meth:`Axes.set` takes them, and draw a grid and a legend."""
    axes.set(**labels)
    axes.grid(alpha=0.3)
    if legend and axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)
