"""Summary of a comparison over all seeds: a row for each mechanism."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from export.finetune.predictions import paired, read_predictions
from export.papers.adaptive.records import Record, read_record
from export.training.intervals import Estimate


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One mechanism over all seeds.

    Attributes:
        values: the headline metric by split, a mean over the seeds.
        differences: to ``full`` by split, with paired 95 % intervals over the items.
        speeds: the ratio by number of tokens.
        bounds: largest ratio that the saved multiplications explain.
        explained: whether all speeds are within their bounds.
        kept: the mean share of attention's coordinates in use.
        score: the mean score; None without scores.
        spread: share of the scores' variance that is between inputs.
    """

    name: str
    what: str
    smaller: bool
    values: dict[str, float]
    differences: dict[str, Estimate]
    speeds: dict[int, float]
    bounds: dict[int, float]
    explained: bool
    kept: float
    score: float | None
    spread: float | None
    seconds: float


def row_of(directories: Sequence[Path], baselines: Sequence[Path], metric: str, splits: Sequence[str]) -> Row:
    """Return the summary of a mechanism over all seeds."""
    records = [record for directory in directories if (record := read_record(directory))]
    values, differences = {}, {}
    for split in splits:
        ours, theirs = ([read_predictions(run, split) for run in runs] for runs in (directories, baselines))
        values[split] = float(np.mean([one.score(metric) for one in ours]))
        differences[split] = paired(metric, ours, theirs)
    uses = [record.use for record in records if record.use]
    first = records[0]
    return Row(
        name=first.name,
        what=first.what,
        smaller=first.smaller,
        values=values,
        differences=differences,
        speeds={speed.tokens: _mean(records, place, "ratio") for place, speed in enumerate(first.speeds)},
        bounds={speed.tokens: _mean(records, i, "bound") for i, speed in enumerate(first.speeds) if speed.bound},
        explained=all(speed.explained for record in records for speed in record.speeds),
        kept=float(np.mean([np.mean(record.kept) if record.kept else 1.0 for record in records])),
        score=float(np.mean([score for use in uses for layer in use.scores for score in layer])) if uses else None,
        spread=float(np.mean([use.spread for use in uses])) if uses else None,
        seconds=float(np.mean([record.seconds for record in records])),
    )


def _mean(records: Sequence[Record], place: int, field: str) -> float:
    return float(np.mean([getattr(record.speeds[place], field) for record in records]))
