"""A figure of what the head changes on a task."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from export.figures import new_figure, write_figure
from export.papers.backward.compare.changes import RANKS, Changes


def draw(changes: Changes, directory: Path) -> Path:
    """Write the figure of a task as PNG, and return its path."""
    figure = new_figure(15, 5, without="give --no-plots")
    moved, ranks, flips = figure.subplots(1, 3)
    figure.suptitle(f"{changes.task}: the frozen model, and with a head of backward attention")
    # repr shows spaces and line breaks; matplotlib would read a dollar as mathematics.
    labels = [repr(one.token).replace("$", r"\$") for one in changes.moved]
    values = [one.change for one in changes.moved]
    moved.barh(np.arange(len(values)), values, color=["C0" if value > 0 else "C3" for value in values])
    moved.set_yticks(np.arange(len(values)), labels, fontsize=7)
    moved.invert_yaxis()
    moved.set(title="tokens most moved", xlabel="change of the mean probability")
    places = np.arange(len(RANKS))
    for shift, shares, label in ((-0.2, changes.frozen_ranks, "frozen"), (0.2, changes.head_ranks, "with the head")):
        ranks.bar(places + shift, shares, 0.4, label=label)
    ranks.set_xticks(places, [f"≤ {most}" for most in RANKS])
    ranks.set(
        title=f"rank of the right token: {changes.rises} rise, {changes.falls} fall",
        ylabel="share of the tokens",
        ylim=(min(changes.frozen_ranks[0], changes.head_ranks[0]) * 0.9, 1.005),
    )
    ranks.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=2, frameon=False)  # bars fill the axes
    for place, found in enumerate((changes.tokens, changes.answers)):
        for shift, number, color in ((-0.2, found.wrong_to_right, "C0"), (0.2, found.right_to_wrong, "C3")):
            flips.bar(place + shift, number / found.of, 0.4, color=color)
            flips.annotate(str(number), (place + shift, number / found.of), ha="center", va="bottom")
    flips.set_xticks([-0.2, 0.2, 0.8, 1.2], ["tokens\ngained", "tokens\nlost", "answers\ngained", "answers\nlost"])
    counts = f"of {changes.tokens.of:,} tokens and {changes.answers.of:,} answers"
    flips.set(title="wrong to right, and right to wrong", xlabel=counts, ylabel="share")
    path = directory / f"{changes.task}-changes.png"
    write_figure(figure, path)
    return path
