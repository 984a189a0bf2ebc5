"""Predictions for every item, stored with the weights, so that two models can be compared in pairs."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import scipy.stats
import torch

from edge.bundles.manifest import Measure
from edge.datatypes import Array
from edge.errors import Raw
from export.data.tokens import Rows
from export.errors import CheckpointError
from export.finetune.objectives import outputs_by_row
from export.models.heads import Head, tensors_of
from export.training.intervals import Estimate, Sample, known_interval, mean_measure
from export.training.runs import PREDICTIONS


class Predicted(msgspec.Struct, frozen=True):
    """Predictions for the items of a split, in their order. Fields are arrays [n, …] for an ``.npz``."""

    def of_items(self, metric: str) -> Array:
        """Return a metric of each item, [n], of which the task's metric is the mean; more is better."""
        raise NotImplementedError

    def score(self, metric: str) -> float:
        """Return one of the task's metrics; more is better."""
        return float(self.of_items(metric).mean())

    def measures(self, metrics: Sequence[str], split: str) -> tuple[Measure, ...]:
        """Return metrics with their intervals; ``split`` names the items."""
        return tuple(mean_measure(metric, split, self.of_items(metric)) for metric in metrics)


PredictedT = TypeVar("PredictedT", bound=Predicted)


class Predictions(Predicted, frozen=True):
    """Logits [n, labels] of float32 and targets [n]; metrics are those of :data:`METRICS`."""

    logits: Array
    targets: Array

    @property
    def answers(self) -> Array:
        """The predicted classes, or the values of a single output, [n]."""
        return self.logits[:, 0] if self.logits.shape[1] == 1 else self.logits.argmax(axis=1)

    def score(self, metric: str) -> float:
        return float(METRICS[metric](self.answers, self.targets))

    def measures(self, metrics: Sequence[str], split: str) -> tuple[Measure, ...]:
        return measures(metrics, split, self.answers, self.targets)


def predict(model: Head, rows: Rows) -> Predictions:
    """Return a classifier's predictions for rows."""
    outputs = [tensor for row in outputs_by_row(model, rows) for tensor in tensors_of(row.outputs)]
    return Predictions(torch.stack(outputs).numpy(), rows.targets)


def paired(metric: str, models: Sequence[Predictions], others: Sequence[Predictions]) -> Estimate:
    """Return the difference of a metric between runs with the same seeds, with its interval over items and seeds.

    All seeds share the resampled items, because the difficulty of an item is common to them.
    """
    truth, answers = models[0].targets, [[run.answers for run in runs] for runs in (models, others)]
    here, there = (Sample.of_answers(METRICS[metric], of_runs, truth) for of_runs in answers)
    change = here.paired(there).mean()
    return Estimate(change.value, change.interval if change.interval[0] < change.interval[1] else None)


def encode_predictions(splits: Mapping[str, Predicted]) -> bytes:
    """Return the predictions on some splits as the bytes of an ``.npz``."""
    buffer = io.BytesIO()
    arrays = {
        f"{name}/{field}": a for name, split in splits.items() for field, a in msgspec.structs.asdict(split).items()
    }
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def read_predictions(run: str | Path, split: str) -> Predictions:
    """Read the logits of a run on a split; see :func:`read_predicted`."""
    return read_predicted(Predictions, run, split)


def read_matching(run: str | Path, split: str, targets: Array) -> Predictions:
    """Read the logits of a run on a split, whose items must have these targets, [n]."""
    predictions = read_predictions(run, split)
    if not np.array_equal(predictions.targets, targets):
        given = Raw(f"{len(predictions.targets)} items with other targets")
        expected, fix = f"the {len(targets)} items of the data", "Give the --data-dir that the run was trained with."
        raise CheckpointError(f"{run} split {split}", given=given, expected=expected, fix=fix)
    return predictions


def read_predicted(kind: type[PredictedT], run: str | Path, split: str) -> PredictedT:
    """Read the predictions of a run on a split."""
    path = Path(run) / PREDICTIONS
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return kind(**{field: arrays[f"{split}/{field}"] for field in kind.__struct_fields__})
    except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile) as error:
        fix = "Give a run of 'fewheads finetune' and a split that it was measured on; on dev, it was with --final."
        expected = f"predictions on {split}"
        raise CheckpointError(f"{path}", given=Raw(error), expected=expected, fix=fix) from None


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
#: Those that can be below 0.
CORRELATIONS = ("matthews", "pearson", "spearman")


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
