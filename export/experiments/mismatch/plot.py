"""A figure of the path from the accuracy in training to that in use."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from export.figures import new_figure, write_figure
from export.papers.backward.mismatch.results import Step


def draw(path: Sequence[Step], place: Path) -> None:
    """Write the figure of a path."""
    figure = new_figure(9, 4, without="give --no-plots")
    axes = figure.subplots()
    for number, step in enumerate(path):
        value = 100 * step.accuracy.value
        low, high = (100 * bound for bound in step.accuracy.interval)
        axes.barh(number, value, color="C1" if step.change and step.change.interval[1] < 0 else "C0")
        axes.hlines(number, low, high, color="black")
        axes.annotate(f" {value:.1f}", (max(value, high), number), va="center")
    axes.set_yticks(range(len(path)), [f"{step.name}\n{step.split}" for step in path], fontsize=8)
    axes.invert_yaxis()
    axes.set(
        title="adapters of the NF4 base: steps in orange lose more than chance",
        xlabel="accuracy in %, and its 95 % interval",
        xlim=(0, 108),
    )
    write_figure(figure, place)
