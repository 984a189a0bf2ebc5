"""Figures of the results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from export.figures import new_figure, write_figure
from export.papers.looped.published import DIMS, PUBLISHED
from export.papers.looped.results import Curve, Shifted, TaskResult
from export.papers.looped.stopping import PLAIN

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WITHOUT = "give --no-plots"
_ERROR = "squared error / variance of the values"
#: Baselines that have no error left, and those that diverge, would squeeze everything else.
_LEAST, _MOST = 1e-4, 4.0
_COLUMNS = 4
_MODELS = ("looped", "unlooped")
#: Of models and of baselines.
_STYLES: dict[bool, dict[str, Any]] = {True: {"ls": "-", "lw": 2}, False: {"ls": "--", "lw": 1}}


def draw(result: TaskResult, directory: Path) -> list[Path]:
    """Write the figures of a task as PNG, and return their paths."""
    makers: dict[str, Callable[[TaskResult], Figure | None]] = {
        "samples": _samples,
        "loops": _loops,
        "sizes": _sizes,
        "shifts": _shifts,
        "probes": _probes,
        "stopping": _stopping,
    }
    written = []
    for name, make in makers.items():
        figure = make(result)
        if figure is not None:
            path = directory / f"{result.name}-{name}.png"
            write_figure(figure, path)
            written.append(path)
    return written


def _samples(result: TaskResult) -> Figure:
    """Draw the error over the number of pairs, and beside it the published one in 20 dimensions."""
    figure = new_figure(13, 5, without=_WITHOUT)
    measured, published = figure.subplots(1, 2, sharey=True)
    roles = {result.looped: "looped", result.unlooped: "unlooped"}
    names = ["looped", "unlooped", *(curve.name for curve in result.by_pairs if curve.name not in roles)]
    for curve in result.by_pairs:
        role = roles.get(curve.name, curve.name)
        _band(measured, curve, color=f"C{names.index(role)}", **_STYLES[role in _MODELS])
    measured.set(title=f"{result.function}, d = {result.dims}, measured", ylabel=_ERROR)
    for name, errors in PUBLISHED[result.function].items():
        style = _STYLES[name in _MODELS]
        color = f"C{names.index(name)}"
        published.plot(list(errors), list(errors.values()), marker=".", color=color, label=name, **style)
    same = "" if result.dims == DIMS else ", another size"
    published.set(title=f"{result.function}, d = {DIMS}, published by the paper's authors{same}")
    for axes in (measured, published):
        axes.set(xlabel="pairs in the prompt", yscale="log")
        axes.legend(fontsize=7)
        axes.grid(alpha=0.3)
    measured.set_ylim(_LEAST, _MOST)
    return figure


def _loops(result: TaskResult) -> Figure | None:
    """Draw the error over the loops of the main looped group, its seeds, and the end of its training."""
    if result.looped is None:
        return None
    figure = new_figure(7, 4.5, without=_WITHOUT)
    axes = figure.subplots()
    for curve in result.run_loops:
        axes.plot(curve.x, curve.mean, color="0.6", lw=0.8)
    axes.plot([], [], color="0.6", lw=0.8, label="each seed")
    _band(axes, next(curve for curve in result.by_loops if curve.name == result.looped), color="C0", lw=2)
    _levels(axes, result)
    trained = next(group.loops for group in result.groups if group.name == result.looped)
    axes.axvline(trained, color="black", lw=0.8, ls=":", label=f"most loops in training, {trained}")
    axes.set(title=f"{result.function}, d = {result.dims}, {result.points - 1} pairs", xlabel="loops", ylabel=_ERROR)
    _finish(axes)
    return figure


def _sizes(result: TaskResult) -> Figure | None:
    """Draw the error over the loops for each shape, as the paper's figure 3."""
    if len(result.by_loops) < 2:
        return None
    figure = new_figure(8, 5, without=_WITHOUT)
    axes = figure.subplots()
    for number, curve in enumerate(result.by_loops):
        axes.plot(curve.x, curve.mean, color=f"C{number}", label=curve.name)
    _levels(axes, result)
    axes.set(title=f"{result.function}, d = {result.dims}: layers L and width D", xlabel="loops", ylabel=_ERROR)
    _finish(axes)
    return figure


def _shifts(result: TaskResult) -> Figure | None:
    """Draw the error over the number of pairs, a panel for each shift."""
    names = [name for name in dict.fromkeys(one.shift for one in result.shifts) if len(_of(result, name)) > 2]
    if not names:
        return None
    rows = -(-len(names) // _COLUMNS)
    figure = new_figure(3.6 * _COLUMNS, 3 * rows, without=_WITHOUT)
    panels = list(figure.subplots(rows, _COLUMNS, sharex=True, sharey=True, squeeze=False).flat)
    for axes in panels[len(names) :]:
        axes.set_axis_off()
    for axes, name in zip(panels, names, strict=False):
        found = _of(result, name)
        for method in found[0].errors:
            axes.plot([one.pairs for one in found], [one.errors[method] for one in found], label=method)
        axes.set(title=name, yscale="log", ylim=(_LEAST, _MOST))
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    figure.supxlabel("pairs in the prompt")
    figure.supylabel(_ERROR)
    return figure


def _probes(result: TaskResult) -> Figure | None:
    if not result.probes:
        return None
    figure = new_figure(4.5 * len(result.probes), 4, without=_WITHOUT)
    panels = figure.subplots(1, len(result.probes), sharey=True, squeeze=False)[0]
    for axes, probed in zip(panels, result.probes, strict=True):
        for target, errors in probed.errors.items():
            axes.plot(probed.stages, errors, ".-", label=target)
        stages = "layers" if probed.model == "unlooped" else "loops"
        axes.set(title=f"{probed.model}, d = {result.dims}", xlabel=stages)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("held-out error of the probe / variance")
    panels[0].legend(fontsize=8)
    return figure


def _stopping(result: TaskResult) -> Figure | None:
    """Draw the error over mean loops, of fixed numbers of loops and of tolerances."""
    if not result.stopping:
        return None
    figure = new_figure(7, 4.5, without=_WITHOUT)
    axes = figure.subplots()
    for number, method in enumerate(dict.fromkeys(point.method for point in result.stopping)):
        for stopped in (False, True):
            points = [p for p in result.stopping if p.method == method and (p.tolerance is not None) is stopped]
            label = f"{method}, {'stopped by its residual' if stopped else 'fixed loops'}"
            loops, errors = [p.mean_loops for p in points], [p.error for p in points]
            axes.plot(loops, errors, "o-" if stopped else "--", ms=4, lw=1, color=f"C{number}", label=label)
    axes.set(title=f"{result.function}, d = {result.dims}: {PLAIN} and accelerated loops", xlabel="mean loops")
    axes.set_ylabel(_ERROR)
    _finish(axes)
    return figure


def _of(result: TaskResult, shift: str) -> list[Shifted]:
    return [one for one in result.shifts if one.shift == shift]


def _levels(axes: Axes, result: TaskResult) -> None:
    """Draw the errors of unlooped groups, which have no loops."""
    for number, group in enumerate(group for group in result.groups if not group.looped):
        axes.axhline(group.error, color=f"C{9 - number}", lw=1, ls="--", label=group.name)


def _band(axes: Axes, curve: Curve, *, color: str, **style: Any) -> None:
    axes.plot(curve.x, curve.mean, color=color, label=curve.name, **style)
    axes.fill_between(curve.x, curve.low, curve.high, color=color, alpha=0.2, lw=0)


def _finish(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
