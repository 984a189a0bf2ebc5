"""Ranges for INT8 from the rows of a task."""

from __future__ import annotations

import numpy as np

from edge.datatypes import Array
from export.data.tokens import Rows
from export.models.convert import dynamic_of, to_onnx
from export.models.heads import Head

#: Rows to calibrate with.
CALIBRATION_ROWS = 256


def plain_onnx(model: Head, rows: Rows) -> bytes:
    """Return a model in FP32 with the inputs of :attr:`export.data.tokens.Batch.named`."""
    examples = rows.batch(np.arange(2)).named
    dynamic = dynamic_of({name: tensor.numpy() for name, tensor in examples.items()})
    return to_onnx(model, examples, model.outputs, dynamic)


def calibration_feeds(rows: Rows, number: int = CALIBRATION_ROWS) -> list[dict[str, Array]]:
    """Return up to ``number`` rows, evenly spread, one at a time: padding must not enter the ranges."""
    places = np.linspace(0, len(rows.targets) - 1, min(number, len(rows.targets))).astype(int)
    return [feeds_of(rows, np.array([place])) for place in places]


def feeds_of(rows: Rows, indices: Array) -> dict[str, Array]:
    """Return some rows as inputs of :func:`plain_onnx`."""
    return {name: tensor.numpy() for name, tensor in rows.batch(indices).named.items()}
