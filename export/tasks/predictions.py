"""What a model said of every item, kept beside its weights so that two models can be compared in pairs."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from edge.datatypes import Array
from edge.errors import Literally
from export.checkpoint import PREDICTIONS
from export.errors import CheckpointError
from export.heads import SequenceClassifier
from export.tasks.glue import Task
from export.tasks.metrics import Difference, paired_difference
from export.tasks.objectives import outputs_of
from export.tasks.tokens import Rows, sorted_batches

_BATCH = 64


class Predictions(msgspec.Struct, frozen=True):
    """Logits [n, labels] of float32 and targets [n], in the order of the file that the items come from."""

    logits: Array
    targets: Array

    @property
    def answers(self) -> Array:
        """The classes, or for a single output its values, [n]."""
        return self.logits[:, 0] if self.logits.shape[1] == 1 else self.logits.argmax(axis=1)


def predict(model: SequenceClassifier, rows: Rows) -> Predictions:
    """Return what a model says of rows; batches are sorted by length, so that little of them is padding."""
    logits = np.empty((len(rows.targets), model.classifier.out_features), dtype=np.float32)
    with torch.inference_mode():
        for indices in sorted_batches(rows.lengths, _BATCH):
            outputs = outputs_of(model, rows.batch(indices))
            assert isinstance(outputs, Tensor)
            logits[indices] = outputs.numpy()
    return Predictions(logits, rows.targets)


def encode_predictions(splits: Mapping[str, Predictions]) -> bytes:
    """Return the predictions on some splits as the bytes of an ``.npz``."""
    buffer = io.BytesIO()
    arrays = {f"{name}/logits": split.logits for name, split in splits.items()}
    arrays |= {f"{name}/targets": split.targets for name, split in splits.items()}
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()


def read_predictions(run: str | Path, split: str) -> Predictions:
    """Read the predictions of a run on a split.

    Raises:
        CheckpointError: the run has none, or they are malformed.
    """
    path = Path(run) / PREDICTIONS
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return Predictions(arrays[f"{split}/logits"], arrays[f"{split}/targets"])
    except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile) as error:
        fix = "Give a run of 'fewheads finetune' and a split that it was measured on."
        expected = f"predictions on {split}"
        raise CheckpointError(f"{path}", given=Literally(error), expected=expected, fix=fix) from None


def compare(task: Task, run: str | Path, other: str | Path, split: str) -> dict[str, Difference]:
    """Return how much better a run is than another on the same items, for each official metric.

    Args:
        task: of both.
        run: the one directory.
        other: the other.
        split: ``holdout``, or one of ``task.dev``.

    Raises:
        CheckpointError: predictions are missing, malformed, or of other items.
    """
    ours, theirs = read_predictions(run, split), read_predictions(other, split)
    if not np.array_equal(ours.targets, theirs.targets):
        fix = "Compare runs that held out the same items."
        given = Literally(f"{len(theirs.targets)} items with other targets")
        raise CheckpointError(f"{other} split {split}", given=given, expected=f"the items of {run}", fix=fix)
    return {metric: paired_difference(metric, ours.answers, theirs.answers, ours.targets) for metric in task.metrics}
