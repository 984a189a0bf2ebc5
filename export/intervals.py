"""Intervals: bootstrap over items, and Student's over runs that differ in their seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

import msgspec
import numpy as np
import scipy.stats

from edge.bundles.manifest import Measure
from edge.datatypes import Array
from export.runs import RunMetrics

#: Resamples of a bootstrap.
RESAMPLES = 1000
_CHUNK = 50


class Difference(msgspec.Struct, frozen=True):
    """Advantage of one model over another on the same items, with its 95 % interval."""

    value: float
    interval: tuple[float, float]


def draws(items: int, generator: np.random.Generator | None = None) -> Iterator[Array]:
    """Yield the indices of :data:`RESAMPLES` resamples in chunks [chunk, items], because QQP has 40,000 items.

    Without a generator, every call yields the same resamples, so that metrics and models can be compared in pairs.
    """
    generator = generator or np.random.default_rng(0)
    for _ in range(RESAMPLES // _CHUNK):
        yield generator.integers(0, items, size=(_CHUNK, items))


def resampled(metric: Callable[..., Array], *arrays: Array, generator: np.random.Generator | None = None) -> Array:
    """Return a metric of each resample of the items, [:data:`RESAMPLES`].

    Args:
        arrays: [n] each; an item has the same position in all of them.
        generator: see :func:`draws`.
    """
    rows = draws(len(arrays[0]), generator)
    return np.concatenate([metric(*(array[chunk] for array in arrays)) for chunk in rows])


@lru_cache(maxsize=1)
def item_shares(items: int) -> Array:
    """Return the share of each item in each resample of :func:`draws`, [:data:`RESAMPLES`, items], read-only.

    The product with values [items, m] is their means in all resamples.
    """
    rows = np.concatenate(list(draws(items)))
    shares = np.stack([np.bincount(row, minlength=items) for row in rows]) / items
    shares.flags.writeable = False
    return shares


class Sample:
    """Values of runs on the same items: their mean, and their means in resamples of items and runs.

    Resamples of two samples with as many items, runs and the same kind are paired.

    Args:
        values: [S, n], of S runs.
        weights: of the items, [n]: a mean is a sum of values over a sum of weights.
        kind: runs of different kinds are resampled apart, because equal seeds do not make them pairs.
    """

    def __init__(self, values: Array, weights: Array, kind: int) -> None:
        self.mean = float((values.sum(axis=1) / weights.sum()).mean())
        seeds, items = values.shape
        shares = item_shares(items)
        means = (shares @ values.T) / (shares @ weights)[:, None]
        of_runs = np.random.default_rng(kind).multinomial(seeds, [1 / seeds] * seeds, size=RESAMPLES) / seeds
        self.drawn: Array = (means * of_runs).sum(axis=1)


def middle(values: Array) -> tuple[float, float]:
    """Return the bounds of the middle 95 % of some values."""
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)


def interval(metric: Callable[..., Array], *arrays: Array) -> tuple[float, float]:
    """Return the 95 % percentile interval of a metric over :func:`resampled` items."""
    return middle(resampled(metric, *arrays))


def mean(values: Array) -> Array:
    """Return the mean over the last axis, as a metric for :func:`resampled`."""
    return np.asarray(values.mean(axis=-1))


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
