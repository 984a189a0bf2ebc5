"""Runs that differ in nothing but their seed, as one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import scipy.stats

from edge.bundles.manifest import Measure
from export.runs import RunMetrics


def pooled(runs: Sequence[RunMetrics]) -> RunMetrics:
    """Return the metrics of runs that differ in their seed: means of the measures, sums of epochs and seconds."""
    if len(runs) == 1:
        return runs[0]
    return RunMetrics(
        runs[0].parameters,
        sum(run.epochs for run in runs),
        sum(run.best_epoch for run in runs),
        sum(run.seconds for run in runs),
        across_seeds([run.measures for run in runs]),
    )


def across_seeds(runs: Sequence[Sequence[Measure]]) -> tuple[Measure, ...]:
    """Return the mean of each measure over runs that differ in their seed, with Student's interval over the seeds.

    Args:
        runs: the measures of two or more runs, alike in metrics and splits.
    """
    pooled = []
    for same in zip(*runs, strict=True):
        values = [measure.value for measure in same]
        mean, error = float(np.mean(values)), float(scipy.stats.sem(values))
        half = float(scipy.stats.t.ppf(0.975, len(values) - 1)) * error
        first = same[0]
        pooled.append(
            Measure(
                metric=first.metric,
                split=first.split,
                value=mean,
                n=first.n,
                seeds=len(values),
                interval=(mean - half, mean + half),
            )
        )
    return tuple(pooled)
