"""Two fine-tuned runs as a cascade, whose margin is chosen on the hold-out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from edge.bundles.manifest import Measure
from edge.bundles.programs import CascadeProgram
from edge.programs.program import AUTO, margins
from export.bundle.accuracy import in_tier
from export.data.examples import HOLDOUT
from export.finetune.predictions import Predictions, read_matching, read_predictions
from export.training.intervals import mean_measure


def cascade(
    runs: Mapping[str, Path], logits: str, share: float, splits: Sequence[str], metrics: Sequence[str]
) -> tuple[CascadeProgram, list[Measure]]:
    """Return the program of a full and a lean tier, each with its run, and its measures by the runs' predictions.

    The full tier answers the ``share`` of the hold-out of which the lean one is least sure. Raise a CheckpointError if
    the runs have no predictions for the same items of all ``splits``.
    """
    full, lean = runs
    margin = float(np.quantile(margins(read_predictions(runs[lean], HOLDOUT).logits), share))
    measures: list[Measure] = []
    for split in splits:
        ours = read_predictions(runs[lean], split)
        theirs = read_matching(runs[full], split, ours.targets)
        unsure = margins(ours.logits) < margin
        answers = Predictions(np.where(unsure[:, None], theirs.logits, ours.logits), ours.targets)
        made = [*answers.measures(metrics, split), mean_measure(f"share of {full}", split, unsure)]
        measures += in_tier(made, AUTO)
    return CascadeProgram(lean=lean, full=full, logits=logits, margin=margin), measures
