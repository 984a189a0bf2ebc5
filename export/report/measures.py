"""The table of a run's measures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge.cli.output import print_table

# torch takes seconds to import, and a command that fails at once need not wait for it.
if TYPE_CHECKING:
    from export.training.runs import RunMetrics


def print_measures(name: str, runs: str, metrics: RunMetrics) -> None:
    """Print the measures of a model, and the places of its runs."""
    from export.training.intervals import bounds_of

    rows = [
        (one.split, one.metric.replace("_", " "), one.value, bounds_of(one.interval, "{:.4g}".format), one.n)
        for one in metrics.measures
    ]
    title = f"{name}: {metrics.parameters:,} parameters, {metrics.epochs} epochs, {metrics.seconds:.0f} s, in {runs}"
    print_table(title, ("split", "metric", "value", "95 % interval", "items"), rows)
