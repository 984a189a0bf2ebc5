"""The figure of the trials: their errors in their order, by the size of the network, and by what was proposed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from export.figures import new_figure, write_figure
from export.papers.calculator.search.records import TrialRecord

_COLUMNS = 4


def draw(trials: Sequence[TrialRecord], path: Path) -> None:
    """Draw the errors of all trials that did not diverge."""
    found = [trial for trial in trials if trial.value is not None]
    shared = [name for name in found[0].values if all(name in trial.values for trial in found)] if found else []
    panels = {
        "trial": [trial.number + 1 for trial in found],
        "parameters": [trial.parameters for trial in found],
        **{name: [trial.values[name] for trial in found] for name in shared},
    }
    rows = -(-len(panels) // _COLUMNS)
    figure = new_figure(3.4 * _COLUMNS, 3.2 * rows, without="give --no-plots")
    axes_list = list(figure.subplots(rows, _COLUMNS, sharey=True, squeeze=False).flat)
    for axes in axes_list[len(panels) :]:
        axes.set_axis_off()
    for axes, (name, values) in zip(axes_list, panels.items(), strict=False):
        axes.scatter(values, [trial.value for trial in found], s=16)
        axes.set(xlabel=name, yscale="log", xscale="log" if name in ("parameters", "learning rate") else "linear")
        axes.grid(alpha=0.3)
    figure.supylabel("least mean squared error on validation")
    write_figure(figure, path)
