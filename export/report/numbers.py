"""The numbers of a report: metrics, classes, calibration, residuals, errors and the origin of the data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import scipy.special

from edge.bundles.manifest import Provenance
from edge.datatypes import Array
from edge.errors import Raw, UsageError
from export.finetune.models import OpenedModel, open_model
from export.finetune.predictions import Predictions, read_matching
from export.finetune.run import task_of
from export.finetune.task import Task
from export.report.items import Items, SplitItems, items_of
from export.report.speed import Speed, speed_of
from export.training.intervals import Estimate, Mean, known_interval, mean, share_of
from export.training.runs import DataFile, RunMetrics, SplitRows

#: Bins of equal width, as in Guo et al. 2017, "On Calibration of Modern Neural Networks".
_BINS = 10
_MOST_ERRORS = 20


class ClassRow(msgspec.Struct, frozen=True):
    """A class on a split; shares have Wilson's 95 % intervals.

    Attributes:
        train: examples of it in the training split, of which a run with ``--limit`` learns from some.
        n: items of the class.
        predicted: items that the model takes for it.
        recall: share of ``n`` that is found; None if there are no items.
        precision: share of ``predicted`` that is right; None if there are none.
    """

    label: str
    train: int
    n: int
    predicted: int
    recall: Mean | None
    precision: Mean | None
    f1: float


class Bin(msgspec.Struct, frozen=True):
    """Items whose largest probability is within a tenth: how many, its mean, and the share of right answers."""

    n: int
    confidence: float
    accuracy: Mean


class Wrong(msgspec.Struct, frozen=True):
    """A wrong answer, or a value far off.

    Attributes:
        row: index in the split.
        item: its texts, or the name of the image.
        target: label or value in the data.
        prediction: label or value that the model gives.
        confidence: the largest probability; None for values.
    """

    row: int
    item: tuple[str, ...]
    target: str
    prediction: str
    confidence: float | None = None


class Classes(msgspec.Struct, frozen=True):
    """A classifier on a split.

    Attributes:
        baseline: the accuracy of always giving the commonest class of the training split, :attr:`majority`.
        confusion: items by class in the data and then by predicted class.
        calibration_error: the mean distance of probability and accuracy over the bins, the expected calibration error.
            It has no interval: it is a sum of absolute gaps, which resampling increases.
        errors: wrong answers, the most confident first.
    """

    majority: str
    baseline: Mean
    rows: tuple[ClassRow, ...]
    confusion: tuple[tuple[int, ...], ...]
    calibration_error: float
    bins: tuple[Bin, ...]
    errors: tuple[Wrong, ...]


class Values(msgspec.Struct, frozen=True):
    """A regression on a split.

    Attributes:
        rmse: root of the mean squared error.
        baseline: that of always giving the mean of the training split.
        bias: mean of prediction minus target.
        points: target and prediction of each item.
        errors: the largest residuals first.
    """

    rmse: Estimate
    baseline: Estimate
    bias: Estimate
    points: tuple[tuple[float, float], ...]
    errors: tuple[Wrong, ...]


class SplitAnswers(msgspec.Struct, frozen=True):
    """The answers on a split: classes or values."""

    name: str
    n: int
    classes: Classes | None = None
    values: Values | None = None


class Report(msgspec.Struct, frozen=True):
    """What a run was trained on, and how well it does.

    Attributes:
        headline: the metric by which the best epoch was chosen on the hold-out.
        rows: the splits of the data, the training split first.
        splits: the answers on them.
    """

    run: str
    task: str
    headline: str
    metrics: RunMetrics
    speed: Speed
    provenance: Provenance
    files: tuple[DataFile, ...]
    rows: tuple[SplitRows, ...]
    splits: tuple[SplitAnswers, ...]


def report_of(run: Path, opened: OpenedModel, task: Task, items: Items) -> Report:
    """Return the report of an opened run, from its predictions and the items of its data.

    Raises:
        CheckpointError: the run's predictions are of other items.
    """
    assert opened.config is not None
    assert opened.metrics is not None
    assert opened.architecture is not None
    splits = tuple(
        _split(name, read_matching(run, name, one.targets), one, items)
        for name, one in items.measured.items()
        if name in opened.metrics.splits
    )
    return Report(
        str(run),
        task.name,
        task.headline,
        opened.metrics,
        speed_of(opened.config, opened.architecture),
        opened.config.provenance,
        items.files,
        items.rows,
        splits,
    )


def _split(name: str, predictions: Predictions, items: SplitItems, every: Items) -> SplitAnswers:
    n = len(items.targets)
    if predictions.logits.shape[1] == 1:
        return SplitAnswers(name, n, values=_values(predictions, items, every.train))
    return SplitAnswers(name, n, classes=_classes(predictions, items, every))


def _classes(predictions: Predictions, items: SplitItems, every: Items) -> Classes:
    targets, answers, labels = predictions.targets, predictions.answers, every.labels
    right, confidence = answers == targets, scipy.special.softmax(predictions.logits, axis=1).max(axis=1)
    known, confusion = np.bincount(every.train, minlength=len(labels)), np.zeros((len(labels),) * 2, dtype=np.int64)
    np.add.at(confusion, (targets, answers), 1)
    hits, counts, predicted = confusion.diagonal(), confusion.sum(axis=1), confusion.sum(axis=0)
    majority = int(known.argmax())
    wrong = np.flatnonzero(~right)
    worst = wrong[np.argsort(-confidence[wrong], kind="stable")][:_MOST_ERRORS]
    return Classes(
        majority=labels[majority],
        baseline=share_of(counts[majority], len(targets)),
        rows=tuple(
            ClassRow(
                label,
                int(train),
                int(n),
                int(answered),
                share_of(hit, n) if n else None,
                share_of(hit, answered) if answered else None,
                float(2 * hit / max(n + answered, 1)),
            )
            for label, train, n, answered, hit in zip(labels, known, counts, predicted, hits, strict=True)
        ),
        confusion=tuple(map(tuple, confusion.tolist())),
        calibration_error=calibration_error(confidence, right),
        bins=tuple(
            Bin(int(chosen.sum()), float(confidence[chosen].mean()), share_of(right[chosen].sum(), chosen.sum()))
            for bin_ in range(_BINS)
            if (chosen := _bins(confidence) == bin_).any()
        ),
        errors=tuple(
            Wrong(int(row), items.shown(row), labels[targets[row]], labels[answers[row]], float(confidence[row]))
            for row in worst
        ),
    )


def _values(predictions: Predictions, items: SplitItems, train: Array) -> Values:
    targets, answers = predictions.targets.astype(np.float64), predictions.answers.astype(np.float64)
    residuals = answers - targets
    worst = np.argsort(-np.abs(residuals), kind="stable")[:_MOST_ERRORS]
    return Values(
        rmse=_over_items(_rmse, residuals),
        baseline=_over_items(_rmse, targets - train.mean()),
        bias=_over_items(mean, residuals),
        points=tuple(zip(targets.tolist(), answers.tolist(), strict=True)),
        errors=tuple(Wrong(int(row), items.shown(row), f"{targets[row]:.4g}", f"{answers[row]:.4g}") for row in worst),
    )


def calibration_error(confidence: Array, right: Array) -> float:
    """Return the expected calibration error of the largest probabilities and right answers, [n] each."""
    gaps = np.bincount(_bins(confidence), weights=right - confidence)
    return float(np.abs(gaps).sum() / len(confidence))


def _bins(confidence: Array) -> Array:
    return np.minimum((confidence * _BINS).astype(np.int64), _BINS - 1)


def _over_items(metric: Callable[[Array], Array], values: Array) -> Estimate:
    return Estimate(float(metric(values)), known_interval(metric, values))


def _rmse(residuals: Array) -> Array:
    return np.asarray(np.sqrt(np.square(residuals).mean(axis=-1)))


def read_report(run: Path, data_dir: Path) -> tuple[Report, Items]:
    """Return the report of a run of ``fewheads finetune`` or ``reduce``, and the items that it is about.

    Args:
        data_dir: data directory of a task of Fewheads; own data are where they were, or below it.

    Raises:
        UsageError: the run is not on a task with classes or values.
        DataError: the data are missing, or are not those of the training.
    """
    opened: OpenedModel = open_model(run)
    task = task_of(opened, run)
    assert opened.architecture is not None
    if not opened.architecture.labels:
        given, expected = Raw(f"a run on {task.name}"), "a run on a task with classes or values"
        raise UsageError(f"{run}", given=given, expected=expected, fix="Its metrics are in metrics.json.")
    items = items_of(task, opened.architecture, data_dir)
    return report_of(run, opened, task, items), items
