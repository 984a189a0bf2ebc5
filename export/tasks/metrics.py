"""The official metrics of GLUE, and how sure they are: bootstrap intervals, and differences of two models in pairs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np
import scipy.stats

from edge.bundles.manifest import Measure
from edge.datatypes import Array

#: How often items are drawn anew.
RESAMPLES = 1000
_CHUNK = 50


class Difference(msgspec.Struct, frozen=True):
    """Advantage of one model over another on the same items, with its 95 % interval."""

    value: float
    interval: tuple[float, float]


def accuracy(predictions: Array, targets: Array) -> Array:
    """Return the share of equal entries; this and the other metrics take [..., n] twice and return [...]."""
    return np.asarray((predictions == targets).mean(axis=-1))


def f1(predictions: Array, targets: Array) -> Array:
    """Return the F1 of class 1: 2 tp / (2 tp + fp + fn); 0 where class 1 neither is nor is predicted."""
    hits = ((predictions == 1) & (targets == 1)).sum(axis=-1)
    return _ratio(2 * hits, 2 * hits + (predictions != targets).sum(axis=-1))


def matthews(predictions: Array, targets: Array) -> Array:
    """Return Matthews' correlation of two classes; 0 where either side is constant."""
    return pearson((predictions == 1).astype(np.float64), (targets == 1).astype(np.float64))


def pearson(predictions: Array, targets: Array) -> Array:
    """Return Pearson's correlation; 0 where either side is constant."""
    x, y = _centred(predictions), _centred(targets)
    return _ratio((x * y).sum(axis=-1), np.sqrt((x * x).sum(axis=-1) * (y * y).sum(axis=-1)))


def spearman(predictions: Array, targets: Array) -> Array:
    """Return Spearman's correlation, that of the ranks, ties at their mean rank."""
    return pearson(scipy.stats.rankdata(predictions, axis=-1), scipy.stats.rankdata(targets, axis=-1))


METRICS: Mapping[str, Callable[[Array, Array], Array]] = {
    "accuracy": accuracy,
    "f1": f1,
    "matthews": matthews,
    "pearson": pearson,
    "spearman": spearman,
}


def resampled(metric: Callable[..., Array], *arrays: Array) -> Array:
    """Return a metric over items drawn anew, [:data:`RESAMPLES`]; the draws are the same at every call.

    Args:
        metric: takes as many arrays [..., n] as there are, and returns [...].
        arrays: [n] each; an item is the same position in all of them.
    """
    random = np.random.default_rng(0)
    number = len(arrays[0])
    values = []
    for _ in range(RESAMPLES // _CHUNK):  # in chunks: QQP has 40,000 items
        rows = random.integers(0, number, size=(_CHUNK, number))
        values.append(metric(*(array[rows] for array in arrays)))
    return np.concatenate(values)


def middle(values: Array) -> tuple[float, float]:
    """Return between which two numbers the middle 95 % of some values lie."""
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)


def interval(metric: Callable[..., Array], *arrays: Array) -> tuple[float, float]:
    """Return the 95 % percentile interval of a metric over :func:`resampled` items."""
    return middle(resampled(metric, *arrays))


def measures(metrics: Sequence[str], split: str, predictions: Array, targets: Array) -> tuple[Measure, ...]:
    """Return each metric on a split with its bootstrap interval.

    Args:
        metrics: names in :data:`METRICS`.
        predictions: classes or scores, [n].
        targets: [n].
    """
    return tuple(
        Measure(
            metric=name,
            split=split,
            value=float(METRICS[name](predictions, targets)),
            n=len(targets),
            interval=interval(METRICS[name], predictions, targets),
        )
        for name in metrics
    )


def _centred(values: Array) -> Array:
    # Exactly zero for a constant, whose mean need not be exact.
    constant = values.max(axis=-1, keepdims=True) == values.min(axis=-1, keepdims=True)
    return np.where(constant, 0.0, values - values.mean(axis=-1, keepdims=True, dtype=np.float64))


def _ratio(numerator: Array, denominator: Array) -> Array:
    return np.divide(numerator, denominator, out=np.zeros(np.shape(numerator)), where=denominator > 0)
