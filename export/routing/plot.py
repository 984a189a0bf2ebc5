"""Figure of the curves of a :class:`export.reduce.route.Route`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from export.figures import new_figure, write_figure
from export.reduce.route import Route, SplitReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: A line style for each curve: strong for policies, weak for controls.
_STYLES: dict[str, dict[str, Any]] = {
    "cascade": {"color": "C0", "linewidth": 2},
    "linear": {"color": "C1", "linewidth": 2},
    "static": {"color": "black", "linewidth": 1.2, "linestyle": "--"},
    "length": {"color": "C2", "linewidth": 1, "linestyle": "-."},
    "random": {"color": "0.6", "linewidth": 1},
    "oracle": {"color": "C3", "linewidth": 1, "linestyle": ":"},
}


def draw(route: Route, path: str | Path) -> None:
    """Draw accuracy over mean cost, a panel for each split; dots are the policies at their thresholds."""
    panels = len(route.splits)
    figure = new_figure(5.5 * panels, 4.5)
    for axes, split in zip(figure.subplots(1, panels, squeeze=False)[0], route.splits, strict=True):
        _panel(axes, split)
    figure.suptitle(f"{route.task}: a lean tier that takes {route.cost_ratio:.3g} of the full tier's time")
    # One legend beside the panels: inside, it would cover the oracle.
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right center")
    write_figure(figure, path)


def _panel(axes: Axes, split: SplitReport) -> None:
    for name, accuracies in split.curves.items():
        axes.plot(split.costs, accuracies, label=name, **_STYLES[name])
    for policy in split.policies:
        judged = policy.judged
        axes.plot(judged.mean_cost, judged.accuracy, "o", color=_STYLES[judged.policy]["color"])
    axes.set(title=f"{split.split}, {split.items} items", xlabel="mean cost (full tier = 1)", ylabel="accuracy")
    axes.grid(alpha=0.3)
