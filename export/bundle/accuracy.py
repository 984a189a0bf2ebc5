"""Accuracy of ONNX files by the metrics of their task, on ONNX Runtime's CPU.

A file for TensorRT runs there as its graph says: ONNX Runtime has no INT8 products for FP16, so it rounds where
QuantizeLinear does, and multiplies what DequantizeLinear returns. Sums and roundings to FP16 differ from TensorRT's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from functools import partial

import msgspec
import numpy as np
import torch

from edge.bundles.manifest import Measure
from edge.datatypes import Array
from edge.runtimes.onnxruntime_runner import OnnxRuntimeRunner
from export.bundle.exportable import ExportedArtifact, OnRows
from export.bundle.exported import int8_tier
from export.data.tokens import Rows, sorted_batches
from export.finetune.imported import ImportedTask
from export.finetune.predictions import Predicted, Predictions, paired
from export.finetune.task import Task
from export.models.heads import Outputs
from export.quantize.calibration import feeds_of

_BATCH = 16


def outputs_by_row(
    data: bytes,
    rows: Rows,
    *,
    subject: str,
    names: Mapping[str, str] | None = None,
    rows_at_once: bool = True,
    on_rows: Callable[[int, int], None] = lambda done, rows: None,
) -> list[dict[str, Array]]:
    """Return the outputs of a file for each row, with padding.

    Args:
        names: of the file's inputs, to those of :attr:`export.data.tokens.Batch.named`; None if they are the same.
            The offsets of tokens, which a graph only returns, are zeros under the name ``offsets``.
        rows_at_once: whether rows may share a run: in dynamic INT8, they would share their scales.
        on_rows: called with the rows that are done, and all rows.
    """
    found: dict[int, dict[str, Array]] = {}
    with closing(OnnxRuntimeRunner(data, subject=subject)) as runner:
        for indices in sorted_batches(rows.lengths, _BATCH if rows_at_once else 1):
            feeds = feeds_of(rows, indices)
            feeds["offsets"] = np.zeros((*feeds["inputs"].shape[:2], 2), np.int64)
            inputs = [spec.name for spec in runner.inputs]
            outputs = runner.infer({name: feeds[names[name] if names else name] for name in inputs})
            for place, row in enumerate(indices):
                found[row] = {name: array[place] for name, array in outputs.items()}
            on_rows(len(found), len(rows.targets))
    return [found[row] for row in range(len(rows.targets))]


def predictions_of(outputs: Sequence[Mapping[str, Array]], targets: Array) -> Predictions:
    """Return the predictions of a classifier from its outputs for each row."""
    return Predictions(np.stack([logits for row in outputs for logits in row.values()]), targets)


def int8_measures(
    task: Task | ImportedTask,
    tier: str,
    exported: Sequence[ExportedArtifact],
    splits: Mapping[str, Rows],
    *,
    names: Mapping[str, str],
    on_rows: OnRows,
    recorded: Mapping[str, Predictions] | None = None,
) -> list[Measure]:
    """Return the metrics of a tier's files in INT8: of an imported model, their agreement with the original.

    Args:
        names: see :func:`outputs_by_row`.
        recorded: predictions in FP32 by split, for paired differences to them, if there are any.
    """

    def predicted(one: ExportedArtifact, rows: Rows) -> Predicted:
        file, at_once = one.artifact.file, (one.artifact.runtime, one.artifact.precision) != ("onnxruntime", "int8")
        counted = partial(on_rows, file)
        outputs = outputs_by_row(one.data, rows, subject=file, names=names, rows_at_once=at_once, on_rows=counted)
        if isinstance(task, ImportedTask):
            return task.compared(_without_padding(task, outputs, rows.lengths), rows.targets)
        return predictions_of(outputs, rows.targets)

    measures: list[Measure] = []
    for split, rows in splits.items():
        fp32 = recorded[split] if recorded else None
        for one in exported:
            if one.artifact.precision != "int8":
                continue
            found = predicted(one, rows)
            made = [*found.measures(task.metrics, split)]
            if isinstance(found, Predictions) and fp32 is not None:
                made += [_difference(metric, split, found, fp32) for metric in task.metrics]
            measures += in_tier(made, f"{int8_tier(tier)} on {one.artifact.runtime}")
    return measures


def in_tier(measures: Iterable[Measure], tier: str) -> list[Measure]:
    """Return measures whose splits name a tier, too."""
    return [msgspec.structs.replace(measure, split=f"{measure.split}, tier {tier}") for measure in measures]


def _without_padding(task: ImportedTask, rows: Sequence[Mapping[str, Array]], lengths: Array) -> list[Outputs]:
    head = task.original
    ends = lengths if head.by_token else [None] * len(rows)
    return [
        head.joined([torch.from_numpy(row[name][:end]) for name in head.outputs])
        for row, end in zip(rows, ends, strict=True)
    ]


def _difference(metric: str, split: str, found: Predictions, fp32: Predictions) -> Measure:
    change, name = paired(metric, [found], [fp32]), f"{metric}, difference to FP32"
    return Measure(metric=name, split=split, value=change.value, n=len(found.targets), interval=change.interval)
