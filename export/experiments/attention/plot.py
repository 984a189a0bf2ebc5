"""Figures of a comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from export.figures import new_figure, write_figure
from export.papers.adaptive.compare import Result
from export.papers.adaptive.records import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Mechanisms with a drawing of heads, and of scores by position.
_HEADS = ("gradient", "fixed", "budget", "ours")
_PLACES = ("literal", "fixed")
_WITHOUT = "give --no-plots"


def draw(result: Result, directory: Path, beside: Sequence[Result] = ()) -> list[Path]:
    """Write the figures of a result as PNG, and return their paths."""
    makers: dict[str, Callable[[], Figure | None]] = {
        "accuracy_by_speed": lambda: _accuracy_by_speed(result),
        "speed_by_length": lambda: _speed_by_length(result),
        "heads": lambda: _heads([result, *beside]),
        "scores_by_place": lambda: _scores_by_place(result),
    }
    written = []
    for name, make in makers.items():
        figure = make()
        if figure is None:
            continue
        path = directory / f"{name}.png"
        write_figure(figure, path)
        written.append(path)
    return written


def _accuracy_by_speed(result: Result) -> Figure:
    """Draw the difference on dev over the speed at the natural length; variants without smaller matrices are hollow."""
    split = next(name for name in result.rows[0].values if name != "holdout")
    figure = new_figure(7, 5, without=_WITHOUT)
    axes = figure.subplots()
    for row in result.rows:
        speed, difference = row.speeds[result.settings.tokens], row.differences[split]
        low, high = difference.interval or (difference.value, difference.value)
        error = [[100 * (difference.value - low)], [100 * (high - difference.value)]]
        fill = "full" if row.smaller else "none"
        axes.errorbar(speed, 100 * difference.value, error, fmt="o", fillstyle=fill, capsize=2, elinewidth=0.6)
        axes.annotate(row.name, (speed, 100 * difference.value), xytext=(4, 4), textcoords="offset points", fontsize=8)
    axes.axhline(0, color="0.6", linewidth=0.8)
    axes.axvline(1, color="0.6", linewidth=0.8)
    axes.set(
        title=f"{result.settings.task}: {split}, {result.settings.tokens} tokens; hollow: no smaller matrices",
        xlabel="times as fast as dense (ONNX Runtime, one thread)",
        ylabel=f"{result.metric}, points over full",
    )
    axes.grid(alpha=0.3)
    return figure


def _speed_by_length(result: Result) -> Figure | None:
    if not result.lengths:
        return None
    figure = new_figure(7, 5, without=_WITHOUT)
    axes = figure.subplots()
    for number, variant in enumerate(dict.fromkeys(one.variant for one in result.lengths)):
        points = sorted((one for one in result.lengths if one.variant == variant), key=lambda one: one.tokens)
        tokens = [one.tokens for one in points]
        axes.plot(tokens, [one.ratio for one in points], "o-", color=f"C{number}", label=variant)
        axes.plot(tokens, [one.bound for one in points], "--", color=f"C{number}", linewidth=0.9)
    axes.plot([], [], "k--", linewidth=0.9, label="Amdahl's bound; for literal, all logits free")
    axes.set_xscale("log", base=2)
    axes.set(xlabel="tokens", ylabel="times as fast as dense", title="Two layers, in turns with the dense ones")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return figure


def _heads(results: Sequence[Result]) -> Figure | None:
    """Draw the share of each head that is kept: a column for each mechanism, a row for each comparison."""
    names = [name for name in _HEADS if _first(results[0], name)]
    if not names:
        return None
    figure = new_figure(3.2 * len(names), 2.6 * len(results), without=_WITHOUT)
    panels = figure.subplots(len(results), len(names), squeeze=False)
    for row, result in zip(panels, results, strict=True):
        for axes, name in zip(row, names, strict=True):
            record = _first(result, name)
            if record is None or record.kept is None:
                axes.set_axis_off()
                continue
            image = axes.imshow(np.array(record.kept), vmin=0, vmax=1, cmap="viridis", aspect="auto")
            axes.set(title=f"{result.settings.task}, {name}", xlabel="head", ylabel="layer")
            axes.set_xticks(range(0, len(record.kept[0]), 2))
    figure.colorbar(image, ax=panels, label="share kept")
    return figure


def _scores_by_place(result: Result) -> Figure | None:
    records = [record for name in _PLACES if (record := _first(result, name)) and record.use and record.use.places]
    if not records:
        return None
    figure = new_figure(5 * len(records), 4, without=_WITHOUT)
    for axes, record in zip(figure.subplots(1, len(records), squeeze=False)[0], records, strict=True):
        assert record.use is not None
        _places(axes, record.use.places)
        axes.set(title=f"{result.settings.task}, {record.name}", xlabel="token", ylabel="mean score over the heads")
    return figure


def _places(axes: Axes, places: Sequence[Sequence[float]]) -> None:
    for layer, scores in enumerate(places):
        axes.plot(scores, label=f"layer {layer}", linewidth=1.2)
    axes.set_ylim(0, 1.02)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, ncols=2)


def _first(result: Result, name: str) -> Record | None:
    return next((record for record in result.records if record.name == name), None)
