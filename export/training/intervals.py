"""Intervals: over items, Wilson's for shares and bootstrap for others, and over runs that differ in their seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import msgspec
import numpy as np

from edge.bundles.manifest import Measure
from edge.datatypes import Array
from export.training.runs import RunMetrics

#: Resamples of a bootstrap.
RESAMPLES = 1000
_CHUNK = 50


class Estimate(msgspec.Struct, frozen=True):
    """A metric, or a difference of two, with its 95 % interval.

    There is none where all resamples agree, as for the difference of equal answers: they say nothing of other items.
    """

    value: float
    interval: tuple[float, float] | None


class Mean(msgspec.Struct, frozen=True):
    """A mean, with its 95 % interval."""

    value: float
    interval: tuple[float, float]


class Difference(Mean, frozen=True):
    """Advantage of one model over another on the same items, with its 95 % interval."""


def clipped(mean: Mean, least: float = 0.0, most: float = 100.0) -> Mean:
    """Return a mean whose interval ends where its values can end: by default, those of shares in percent."""
    low, high = mean.interval
    return Mean(mean.value, (max(low, least), min(high, most)))


def percent(share: Measure | Mean) -> Mean:
    """Return a share in percent, clipped; one without an interval gets an empty one."""
    low, high = share.interval or (share.value, share.value)
    return clipped(Mean(100 * share.value, (100 * low, 100 * high)))


def with_interval(value: float, interval: tuple[float, float] | None, form: Callable[[float], str]) -> str:
    """Return a value with its interval in parentheses, if there is one, for people; ``form`` writes a number."""
    return f"{form(value)} ({bounds_of(interval, form)})" if interval else form(value)


def bounds_of(interval: tuple[float, float] | None, form: Callable[[float], str]) -> str:
    """Return the bounds of an interval for a column of their own, empty where there is none."""
    return " … ".join(map(form, interval)) if interval else ""


def points(change: Difference | Estimate) -> str:
    """Return a difference of shares with its interval in percentage points, for people."""
    return with_interval(change.value, change.interval, lambda share: f"{100 * share:+.1f}")


class Sample(NamedTuple):
    """A metric of runs, which differ in their seed, on the same items.

    Intervals add two independent errors in quadrature: that of the items, from resamples, and that of the seeds,
    Student's or Welch's, because they are few; one run has no spread of seeds. Both contain what seeds and items have
    in common, so an interval is, if anything, too wide.

    Attributes:
        by_seed: [S].
        drawn: the mean over the seeds in each resample of the items, [:data:`RESAMPLES`].
    """

    by_seed: Array
    drawn: Array

    @classmethod
    def of_items(cls, values: Array, weights: Array) -> Sample:
        """Return the mean of values [S, n], a sum over a sum of weights [n]."""
        shares = item_shares(values.shape[1])
        return cls(values.sum(axis=1) / weights.sum(), shares @ values.mean(axis=0) / (shares @ weights))

    @classmethod
    def of_answers(cls, metric: Callable[..., Array], runs: Sequence[Array], targets: Array, draw: int = 0) -> Sample:
        """Return a metric of each run's answers [n] to items with targets [n]; ``draw`` is the resamples' seed."""
        by_seed = np.array([float(metric(answers, targets)) for answers in runs])
        drawn = [resampled(metric, answers, targets, generator=np.random.default_rng(draw)) for answers in runs]
        return cls(by_seed, np.mean(drawn, axis=0))

    def paired(self, other: Sample) -> Sample:
        """Return the difference, seed by seed, to models of the same seeds, or to the same models used otherwise."""
        return Sample(self.by_seed - other.by_seed, self.drawn - other.drawn)

    def mean(self) -> Mean:
        """Return the mean over items and runs."""
        value = float(self.by_seed.mean())
        return Mean(value, _widened(value, self.drawn, _error([self.by_seed])))

    def minus(self, other: Sample) -> Difference:
        """Return the difference of the means to other models, whose seeds have nothing in common with these."""
        value = float(self.by_seed.mean() - other.by_seed.mean())
        error = math.hypot(_error([self.by_seed]), _error([other.by_seed]))
        return Difference(value, _widened(value, self.drawn - other.drawn, error))

    def over(self, other: Sample) -> Mean:
        """Return the ratio of the means; the error of the seeds is by Welch, on logarithms."""
        value = float(self.by_seed.mean() / other.by_seed.mean())
        seeds = 2 * _error([np.log(self.by_seed), np.log(other.by_seed)])  # of a sum, not of a mean of two
        low, high = _widened(math.log(value), np.log(self.drawn) - np.log(other.drawn), seeds)
        return Mean(value, (math.exp(low), math.exp(high)))

    def is_above(self, level: float) -> bool:
        """Return whether the lower bound of the mean's one-sided 95 % interval is above a level."""
        value = float(self.by_seed.mean())
        items = value - float(np.quantile(self.drawn, 0.05))
        return value - math.hypot(items, _error([self.by_seed], 0.95)) > level


def average(differences: Sequence[Sample]) -> Difference:
    """Return the mean over tasks of :meth:`Sample.paired` differences.

    The resamples are to be drawn anew for each task. The error of the seeds is Student's with the degrees of freedom of
    Welch and Satterthwaite.
    """
    value = float(np.mean([task.by_seed.mean() for task in differences]))
    drawn = np.mean([task.drawn for task in differences], axis=0)
    return Difference(value, _widened(value, drawn, _error([task.by_seed for task in differences])))


def over_seeds(values: Sequence[float]) -> Mean:
    """Return the mean of runs whose items are not known, with Student's interval; that of one run is empty."""
    by_seed = np.array(values)
    value, error = float(by_seed.mean()), _error([by_seed])
    return Mean(value, (value - error, value + error))


def _error(groups: Sequence[Array], quantile: float = 0.975) -> float:
    """Return half of the interval of a mean of the groups' means; groups of one run have no spread."""
    import scipy.stats  # here, because the help of commands needs no SciPy, which a board does not have

    several = [group for group in groups if len(group) > 1]
    variances = np.array([group.var(ddof=1) / len(group) for group in several])  # of the means
    if not variances.sum():
        return 0.0
    freedom = variances.sum() ** 2 / sum(v**2 / (len(group) - 1) for v, group in zip(variances, several, strict=True))
    return float(scipy.stats.t.ppf(quantile, freedom) * math.sqrt(variances.sum()) / len(groups))


def _widened(value: float, drawn: Array, error: float) -> tuple[float, float]:
    low, high = middle(drawn)
    return value - math.hypot(value - low, error), value + math.hypot(high - value, error)


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


def middle(values: Array) -> tuple[float, float]:
    """Return the bounds of the middle 95 % of some values."""
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)


def known_interval(metric: Callable[..., Array], *arrays: Array) -> tuple[float, float] | None:
    """Return the 95 % percentile interval of a metric over :func:`resampled` items; see :func:`known_middle`."""
    return known_middle(resampled(metric, *arrays))


def known_middle(drawn: Array) -> tuple[float, float] | None:
    """Return :func:`middle` of a metric's resamples, or None where they agree: they say nothing of other items."""
    low, high = middle(drawn)
    return (low, high) if low < high else None


def mean(values: Array) -> Array:
    """Return the mean over the last axis, as a metric for :func:`resampled`."""
    return np.asarray(values.mean(axis=-1))


def mean_measure(metric: str, split: str, values: Array) -> Measure:
    """Return the mean of values [n]: with Wilson's interval if they are zeros and ones, else :func:`known_interval`."""
    value, n = float(values.mean()), len(values)
    is_share = np.isin(values, (0, 1)).all()
    bounds = wilson(int(values.sum()), n) if is_share else known_interval(mean, values)
    return Measure(metric=metric, split=split, value=value, n=n, interval=bounds)


def share_of(hits: int, items: int) -> Mean:
    """Return a share with its interval by :func:`wilson`."""
    return Mean(float(hits / items), wilson(hits, items))


def wilson(hits: int, items: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share of items; unlike that of resamples, it is never empty."""
    import scipy.stats

    bounds = scipy.stats.binomtest(int(hits), int(items)).proportion_ci(method="wilson")
    return float(bounds.low), float(bounds.high)


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


def across_seeds(runs: Sequence[Sequence[Measure]], geometric: Collection[str] = ()) -> tuple[Measure, ...]:
    """Return the mean of each measure over two or more runs that differ in their seed.

    Intervals add the error of the items, the mean of the runs' own, and that of the seeds, Student's, in quadrature.

    Args:
        geometric: metrics of which means are geometric.
    """
    means = []
    for same in zip(*runs, strict=True):
        form, inverse = (np.log, np.exp) if same[0].metric in geometric else (np.asarray, np.asarray)
        by_seed = form([one.value for one in same])
        halves = np.abs(form([one.interval or (one.value, one.value) for one in same]) - by_seed[:, None]).mean(axis=0)
        value, (low, high) = by_seed.mean(), np.hypot(halves, _error([by_seed])).tolist()
        bounds = tuple(map(float, inverse([value - low, value + high]))) if low or high else None
        means.append(msgspec.structs.replace(same[0], value=float(inverse(value)), seeds=len(same), interval=bounds))
    return tuple(means)
