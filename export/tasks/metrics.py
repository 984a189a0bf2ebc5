"""The official metrics of GLUE, and those of own data, with intervals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import scipy.stats

from edge.bundles.manifest import Measure
from edge.datatypes import Array
from export.training.intervals import known_interval, mean_measure


def accuracy(predictions: Array, targets: Array) -> Array:
    """Return the share of equal entries; this and the other metrics take [..., n] twice and return [...]."""
    return np.asarray((predictions == targets).mean(axis=-1))


def f1(predictions: Array, targets: Array) -> Array:
    """Return the F1 of class 1: 2 tp / (2 tp + fp + fn); 0 where class 1 neither is nor is predicted."""
    hits = ((predictions == 1) & (targets == 1)).sum(axis=-1)
    return _ratio(2 * hits, 2 * hits + (predictions != targets).sum(axis=-1))


def macro_f1(predictions: Array, targets: Array) -> Array:
    """Return the mean of the F1 of all classes that are or are predicted."""
    classes, found = np.unique(np.stack([predictions, targets]), return_inverse=True)
    predicted, wanted = found.reshape(2, -1, predictions.shape[-1])  # [m, n] each
    rows = np.arange(len(wanted))[:, None] * len(classes)
    size = len(wanted) * len(classes)

    def counts(numbers: Array, of: Array | None = None) -> Array:
        chosen = (rows + numbers).ravel() if of is None else (rows + numbers)[of]
        return np.bincount(chosen, minlength=size).reshape(len(wanted), len(classes))

    both = counts(predicted) + counts(wanted)  # 2 tp + fp + fn of each class
    each = _ratio(2 * counts(wanted, predicted == wanted), both)
    return np.asarray((each.sum(axis=1) / (both > 0).sum(axis=1)).reshape(targets.shape[:-1]))


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
    "macro_f1": macro_f1,
    "matthews": matthews,
    "pearson": pearson,
    "spearman": spearman,
}


def measures(metrics: Sequence[str], split: str, predictions: Array, targets: Array) -> tuple[Measure, ...]:
    """Return each metric, a name in :data:`METRICS`, on a split: with Wilson's interval, or that of resamples."""
    return tuple(
        mean_measure(name, split, predictions == targets)
        if name == "accuracy"
        else Measure(
            metric=name,
            split=split,
            value=float(METRICS[name](predictions, targets)),
            n=len(targets),
            interval=known_interval(METRICS[name], predictions, targets),
        )
        for name in metrics
    )


def _centred(values: Array) -> Array:
    # Exactly zero for a constant, whose mean need not be exact.
    constant = values.max(axis=-1, keepdims=True) == values.min(axis=-1, keepdims=True)
    return np.where(constant, 0.0, values - values.mean(axis=-1, keepdims=True, dtype=np.float64))


def _ratio(numerator: Array, denominator: Array) -> Array:
    return np.divide(numerator, denominator, out=np.zeros(np.shape(numerator)), where=denominator > 0)
