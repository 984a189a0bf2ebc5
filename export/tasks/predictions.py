"""Predictions for every item, stored with the weights, so that two models can be compared in pairs."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import torch
from torch import Tensor

from edge.bundles.manifest import Measure
from edge.datatypes import Array
from edge.errors import Raw
from export.data.tokens import Rows, sorted_batches
from export.errors import CheckpointError
from export.finetune.objectives import Head, outputs_of
from export.finetune.predictions import METRICS, measures
from export.models.heads import SequenceClassifier
from export.training.device import model_device
from export.training.intervals import Estimate, known_interval
from export.training.runs import PREDICTIONS

_BATCH = 64


class Predicted(msgspec.Struct, frozen=True):
    """Predictions for the items of a split, in their order. Fields are arrays [n, …] for an ``.npz``."""

    def score(self, metric: str) -> float:
        """Return one of the task's metrics; more is better."""
        raise NotImplementedError

    def measures(self, metrics: Sequence[str], split: str) -> tuple[Measure, ...]:
        """Return metrics with their intervals; ``split`` names the items."""
        raise NotImplementedError


PredictedT = TypeVar("PredictedT", bound=Predicted)


class Predictions(Predicted, frozen=True):
    """Logits [n, labels] of float32 and targets [n]."""

    logits: Array
    targets: Array

    @property
    def answers(self) -> Array:
        """The predicted classes, or the values of a single output, [n]."""
        return self.logits[:, 0] if self.logits.shape[1] == 1 else self.logits.argmax(axis=1)

    def score(self, metric: str) -> float:
        """Return a metric of :data:`export.finetune.predictions.METRICS`."""
        return float(METRICS[metric](self.answers, self.targets))

    def measures(self, metrics: Sequence[str], split: str) -> tuple[Measure, ...]:
        """See :func:`export.finetune.predictions.measures`."""
        return measures(metrics, split, self.answers, self.targets)


def predict(model: Head, rows: Rows) -> Predictions:
    """Return a classifier's predictions for rows, in batches sorted by length, for little padding."""
    assert isinstance(model, SequenceClassifier)
    logits = np.empty((len(rows.targets), model.classifier.out_features), dtype=np.float32)
    device = model_device(model)
    with torch.inference_mode():
        for indices in sorted_batches(rows.lengths, _BATCH):
            outputs = outputs_of(model, rows.batch(indices).to(device))
            assert isinstance(outputs, Tensor)
            logits[indices] = outputs.cpu().numpy()
    return Predictions(logits, rows.targets)


def paired(metric: str, ours: Sequence[Predictions], theirs: Sequence[Predictions]) -> Estimate:
    """Return the difference of a metric, a mean over seeds, with the interval over resampled items.

    All seeds share the resampled items, because the difficulty of an item is common to them.
    """
    function = METRICS[metric]

    def difference(a: Array, b: Array, truth: Array) -> Array:
        # [..., n, seeds] each, and [..., n]
        differences = [function(a[..., s], truth) - function(b[..., s], truth) for s in range(a.shape[-1])]
        return np.asarray(np.mean(differences, axis=0))

    one, other = (np.stack([predictions.answers for predictions in side], axis=-1) for side in (ours, theirs))
    truth = ours[0].targets
    return Estimate(float(difference(one, other, truth)), known_interval(difference, one, other, truth))


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
        fix = "Give the --data-dir that the run was trained with."
        given = Raw(f"{len(predictions.targets)} items with other targets")
        expected = f"the {len(targets)} items of the data"
        raise CheckpointError(f"{run} split {split}", given=given, expected=expected, fix=fix)
    return predictions


def read_predicted(kind: type[PredictedT], run: str | Path, split: str) -> PredictedT:
    """Read the predictions of a run on a split."""
    path = Path(run) / PREDICTIONS
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return kind(**{field: arrays[f"{split}/{field}"] for field in kind.__struct_fields__})
    except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile) as error:
        fix = "Give a run of 'fewheads finetune' and a split that it was measured on."
        expected = f"predictions on {split}"
        raise CheckpointError(f"{path}", given=Raw(error), expected=expected, fix=fix) from None
