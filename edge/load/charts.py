"""Charts as SVG text, for a page that fetches nothing: lines, stacked bars, linear and logarithmic axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

_WIDTH, _HEIGHT = 560, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 12, 42

Points = Sequence[tuple[float, float]]


class Axis(NamedTuple):
    """An axis: its words, and the place of values on it.

    Attributes:
        label: with the unit.
        low: the value at its beginning.
        high: the value at its end.
        ticks: values that are written, and how.
        log: whether equal distances are equal ratios.
    """

    label: str
    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    log: bool = False

    def share(self, value: float) -> float:
        """Return the position of a value, 0 to 1; values beyond the axis are at its end."""
        low, high, at = self.low, self.high, value
        if self.log:
            low, high, at = math.log(low), math.log(high), math.log(max(value, self.low))
        return min(max((at - low) / (high - low), 0.0), 1.0)


class Line(NamedTuple):
    """A line through points; a gap where a value is NaN."""

    name: str
    color: str
    points: Points


class Bars(NamedTuple):
    """One layer of stacked bars: a value for each interval."""

    name: str
    color: str
    values: Sequence[float]


def linear_axis(label: str, high: float, low: float = 0.0) -> Axis:
    """Return an axis of round numbers from ``low`` to at least ``high``."""
    span = max(high - low, 1e-9)
    step = 10 ** math.floor(math.log10(span / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if span / (factor * step) <= 5)
    first, last = math.floor(low / step), math.ceil((low + span) / step - 1e-9)
    values = [index * step for index in range(first, last + 1)]
    return Axis(label, values[0], values[-1], tuple((value, f"{value:.6g}") for value in values))


def log_axis(label: str, low: float, high: float) -> Axis:
    """Return an axis by 1, 2 and 5 of every power of ten around two positive values."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    values = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
    first = max(value for value in values if value <= low * (1 + 1e-9))
    last = min((value for value in values if value >= high * (1 - 1e-9)), default=values[-1])
    last = last if last > first else values[values.index(first) + 1]
    shown = [value for value in values if first <= value <= last]
    dense = len(shown) <= 8
    ticks = tuple((v, f"{v:.6g}") for v in shown if dense or f"{v:e}".startswith("1.0"))
    return Axis(label, first, last, ticks, log=True)


def chart(
    title: str,
    x: Axis,
    y: Axis,
    *,
    lines: Sequence[Line] = (),
    bars: Sequence[Bars] = (),
    starts: Sequence[float] = (),
    width: float = 0.0,
    limits: Sequence[tuple[float, str]] = (),
) -> str:
    """Return a figure.

    Args:
        title: above it.
        x: the horizontal axis.
        y: the vertical axis.
        lines: drawn above the bars.
        bars: stacked in their order.
        starts: where each bar begins.
        width: of a bar.
        limits: values of ``y`` that are marked, and their names.
    """
    parts = [*_grid(x, y), *_stack(x, y, bars, starts, width)]
    for value, name in limits:
        if y.low <= value <= y.high:
            at = _down(y, value)
            parts.append(f'<line class="limit" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
            parts.append(f'<text class="limit" x="{_WIDTH - _RIGHT - 4}" y="{at - 5:.1f}">{escape(name)}</text>')
    parts += [f'<path class="line" stroke="{line.color}" d="{_path(x, y, line.points)}"/>' for line in lines]
    shown: tuple[Bars | Line, ...] = (*bars, *lines)
    legend = "".join(f'<span><i style="background:{each.color}"></i>{escape(each.name)}</span>' for each in shown)
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
        f'<div class="legend">{legend}</div></figure>'
    )


def _across(x: Axis, value: float) -> float:
    return _LEFT + x.share(value) * (_WIDTH - _LEFT - _RIGHT)


def _down(y: Axis, value: float) -> float:
    return _HEIGHT - _BOTTOM - y.share(value) * (_HEIGHT - _TOP - _BOTTOM)


def _grid(x: Axis, y: Axis) -> list[str]:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    parts = []
    for value, name in y.ticks:
        at = _down(y, value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="tick" text-anchor="end" x="{_LEFT - 7}" y="{at + 4:.1f}">{escape(name)}</text>')
    for value, name in x.ticks:
        at = _across(x, value)
        parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{bottom}" y2="{bottom + 4}"/>')
        parts.append(f'<text class="tick" text-anchor="middle" x="{at:.1f}" y="{bottom + 17}">{escape(name)}</text>')
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    middle = (_LEFT + right) / 2
    parts.append(f'<text class="label" x="{middle}" y="{_HEIGHT - 6}">{escape(x.label)}</text>')
    turn = f"rotate(-90 14 {(_TOP + bottom) / 2})"
    parts.append(f'<text class="label" transform="{turn}" x="14" y="{(_TOP + bottom) / 2}">{escape(y.label)}</text>')
    return parts


def _stack(x: Axis, y: Axis, bars: Sequence[Bars], starts: Sequence[float], width: float) -> list[str]:
    below = [0.0] * len(starts)
    parts = []
    for layer in bars:
        pieces = []
        for index, value in enumerate(layer.values):
            if value:
                left, right = _across(x, starts[index]), _across(x, starts[index] + width)
                low, high = _down(y, below[index]), _down(y, below[index] + value)
                # A hair between the bars, where there is room for one.
                gap = 0.6 if right - left > 4 else 0.0
                pieces.append(f"M{left:.1f} {low:.1f}V{high:.1f}H{right - gap:.1f}V{low:.1f}Z")
                below[index] += value
        parts.append(f'<path fill="{layer.color}" d="{"".join(pieces)}"/>')
    return parts


def _path(x: Axis, y: Axis, points: Points) -> str:
    path, pen = [], "M"
    for across, value in points:
        if math.isnan(value):
            pen = "M"
            continue
        # Where it begins it is drawn to itself: a point between two gaps would be invisible otherwise.
        dot = "h0" if pen == "M" else ""
        path.append(f"{pen}{_across(x, across):.1f} {_down(y, value):.1f}{dot}")
        pen = "L"
    return "".join(path)
