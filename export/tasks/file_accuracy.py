"""Accuracy of ONNX files by the metrics of their task, on ONNX Runtime's CPU.

A file for TensorRT runs there as its graph says: ONNX Runtime has no INT8 products for FP16, so it rounds where
QuantizeLinear does, and multiplies what DequantizeLinear returns. Sums and roundings to FP16 differ from TensorRT's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import msgspec
import numpy as np

from edge.bundles.manifest import Measure
from edge.runtimes.onnxruntime_runner import OnnxRuntimeRunner
from export.tasks.calibration import feeds_of
from export.tasks.predictions import Predictions, paired
from export.tasks.task import Task
from export.tasks.tokens import Rows, sorted_batches

_BATCH = 16


def predict_file(
    data: bytes,
    rows: Rows,
    *,
    subject: str,
    names: Mapping[str, str],
    rows_at_once: bool = True,
    on_rows: Callable[[int, int], None] = lambda done, rows: None,
) -> Predictions:
    """Return the predictions of a file.

    Args:
        names: of the file's inputs, to those of :attr:`export.tasks.tokens.Batch.named`.
        rows_at_once: whether rows may share a run: in dynamic INT8, they would share their scales.
        on_rows: called with the rows that are done, and all rows.
    """
    runner = OnnxRuntimeRunner(data, subject=subject)
    try:
        inputs, (output,) = [spec.name for spec in runner.inputs], runner.outputs
        logits = np.empty((len(rows.targets), output.shape[1]), dtype=np.float32)
        done = 0
        for indices in sorted_batches(rows.lengths, _BATCH if rows_at_once else 1):
            feeds = feeds_of(rows, indices)
            logits[indices] = runner.infer({name: feeds[names[name]] for name in inputs})[output.name]
            done += len(indices)
            on_rows(done, len(logits))
    finally:
        runner.close()
    return Predictions(logits, rows.targets)


def file_measures(task: Task, split: str, found: Predictions, fp32: Predictions) -> list[Measure]:
    """Return the metrics of a file on a split, and their differences to those of the model in FP32, in pairs.

    Args:
        fp32: predictions for the same items.
    """
    measures = list(found.measures(task.metrics, split))
    for metric in task.metrics:
        change, name = paired(metric, [found], [fp32]), f"{metric}, difference to FP32"
        measures.append(
            Measure(metric=name, split=split, value=change.value, n=len(found.targets), interval=change.interval)
        )
    return measures


def in_tier(measures: Iterable[Measure], tier: str) -> list[Measure]:
    """Return measures whose splits name a tier, too."""
    return [msgspec.structs.replace(measure, split=f"{measure.split}, tier {tier}") for measure in measures]
