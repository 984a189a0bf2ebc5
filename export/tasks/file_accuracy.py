"""Accuracy of ONNX files by the metrics of their task, on ONNX Runtime's CPU.

A file for TensorRT runs there as its graph says: ONNX Runtime has no INT8 products for FP16, so it rounds where
QuantizeLinear does, and multiplies what DequantizeLinear returns. Sums and roundings to FP16 differ from TensorRT's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

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
    on_rows: Callable[[int], None] = lambda number: None,
) -> Predictions:
    """Return the predictions of a file.

    Args:
        names: of the file's inputs, to those of :attr:`export.tasks.tokens.Batch.named`.
        rows_at_once: whether rows may share a run: in dynamic INT8, they would share their scales.
        on_rows: called with the number of further rows that are done.
    """
    runner = OnnxRuntimeRunner(data, subject=subject)
    try:
        inputs, (output,) = [spec.name for spec in runner.inputs], runner.outputs
        logits = np.empty((len(rows.targets), output.shape[1]), dtype=np.float32)
        for indices in sorted_batches(rows.lengths, _BATCH if rows_at_once else 1):
            feeds = feeds_of(rows, indices)
            logits[indices] = runner.infer({name: feeds[names[name]] for name in inputs})[output.name]
            on_rows(len(indices))
    finally:
        runner.close()
    return Predictions(logits, rows.targets)


def file_measures(
    task: Task, split: str, found: Predictions, reference: Predictions, what: str
) -> tuple[Measure, ...]:
    """Return the metrics of a file on a split, and their differences to those of the model in FP32, in pairs.

    Args:
        split: names the items.
        reference: predictions of the model in FP32 for the same items.
        what: names the file.
    """
    split = f"{split}, {what}"
    differences = []
    for metric in task.metrics:
        change = paired(metric, [found], [reference])
        differences.append(
            Measure(
                metric=f"{metric}, difference to FP32",
                split=split,
                value=change.value,
                n=len(found.targets),
                interval=change.interval,
            )
        )
    return (*found.measures(task.metrics, split), *differences)
