"""Pictures of scores: those of each head in each layer, on average and in their spread between inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from export.papers.adaptive.measures import HeadUse
from export.report.drawing import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(uses: Mapping[str, HeadUse]) -> Figure | None:
    """Draw the scores of mechanisms side by side, the spread below; None where none has scores."""
    scored = {name: use for name, use in uses.items() if use.by_head}
    if not scored:
        return None
    figure = new_figure(1 + 2.4 * len(scored), 5.0)
    panels = figure.subplots(2, len(scored), squeeze=False)
    for column, (name, use) in enumerate(scored.items()):
        for axes, scores, title, most in (
            (panels[0, column], use.by_head, f"{name}: mean score", 1.0),
            (panels[1, column], use.deviations, "deviation between inputs", 0.5),
        ):
            image = axes.imshow(np.array(scores), vmin=0, vmax=most, cmap="viridis", aspect="auto")
            heads = range(len(scores[0]))  # a layer that is skipped has one score
            axes.set(title=title, xlabel="head", ylabel="layer", xticks=heads[::4], yticks=range(len(scores)))
            axes.title.set_fontsize(8)
            figure.colorbar(image, ax=axes)
    return figure
