"""Accuracy of ONNX files by the metrics of their task, on ONNX Runtime's CPU.

A file for TensorRT runs there as its graph says: ONNX Runtime has no INT8 products for FP16, so it rounds where
QuantizeLinear does, and multiplies what DequantizeLinear returns. Sums and roundings to FP16 differ from TensorRT's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import msgspec
import numpy as np

from edge.bundles.manifest import Artifact, Measure
from edge.datatypes import Array
from edge.runtimes.onnxruntime_runner import OnnxRuntimeRunner
from export.bundle.tier_files import ExportedArtifact
from export.data.tokens import Rows, sorted_batches
from export.finetune.predictions import Predictions, paired
from export.finetune.task import Task
from export.quantize.calibration import feeds_of

_BATCH = 16
#: Called with the file that is measured, the rows that are done, and all rows.
OnRows = Callable[[str, int, int], None]


def predict_file(
    data: bytes,
    rows: Rows,
    *,
    subject: str,
    names: Mapping[str, str] | None = None,
    rows_at_once: bool = True,
    on_rows: Callable[[int, int], None] = lambda done, rows: None,
) -> Predictions:
    """Return the predictions of a file.

    Args:
        names: of the file's inputs, to those of :attr:`export.data.tokens.Batch.named`; None if they are the same.
        rows_at_once: whether rows may share a run: in dynamic INT8, they would share their scales.
        on_rows: called with the rows that are done, and all rows.
    """
    logits: dict[int, Array] = {}
    runs = outputs_of_file(data, rows, subject=subject, names=names, rows_at_once=rows_at_once, on_rows=on_rows)
    for indices, outputs in runs:
        (found,) = outputs.values()
        logits |= zip(indices, found, strict=True)
    return Predictions(np.stack([logits[row] for row in range(len(rows.targets))]), rows.targets)


def outputs_of_file(
    data: bytes,
    rows: Rows,
    *,
    subject: str,
    names: Mapping[str, str] | None,
    rows_at_once: bool,
    on_rows: Callable[[int, int], None],
) -> Iterator[tuple[Array, dict[str, Array]]]:
    """Yield the indices of the rows of each run, and its outputs by name; see :func:`predict_file`.

    The offsets of tokens, which a graph only returns, are zeros under the name ``offsets``.
    """
    runner = OnnxRuntimeRunner(data, subject=subject)
    done = 0
    try:
        for indices in sorted_batches(rows.lengths, _BATCH if rows_at_once else 1):
            feeds = feeds_of(rows, indices)
            feeds["offsets"] = np.zeros((*feeds["inputs"].shape[:2], 2), np.int64)
            inputs = [spec.name for spec in runner.inputs]
            yield indices, runner.infer({name: feeds[names[name] if names else name] for name in inputs})
            done += len(indices)
            on_rows(done, len(rows.targets))
    finally:
        runner.close()


def rows_share_runs(artifact: Artifact) -> bool:
    """Return whether rows may share a run of a file: in dynamic INT8, they would share their scales."""
    return (artifact.runtime, artifact.precision) != ("onnxruntime", "int8")


def tier_measures(
    task: Task,
    tier: str,
    exported: Sequence[ExportedArtifact],
    splits: Mapping[str, Rows],
    recorded: Mapping[str, Predictions],
    *,
    names: Mapping[str, str],
    on_rows: OnRows,
) -> list[Measure]:
    """Return the metrics of a tier's files in INT8, and their paired differences to the model in FP32.

    Args:
        recorded: predictions in FP32 by split; where there are none, the tier's file in FP32 or FP16 is measured, too.
        names: see :func:`predict_file`.
    """
    plain, *others = sorted(exported, key=lambda one: one.artifact.precision == "int8")
    int8 = [one for one in others if one.artifact.precision == "int8"]
    measures: list[Measure] = []

    def answers(one: ExportedArtifact, rows: Rows) -> Predictions:
        file, together = one.artifact.file, rows_share_runs(one.artifact)
        on_file = partial(on_rows, file)
        return predict_file(one.data, rows, subject=file, names=names, rows_at_once=together, on_rows=on_file)

    for split, rows in splits.items():
        fp32 = recorded.get(split)
        if fp32 is None:
            fp32 = answers(plain, rows)
            measures += in_tier(fp32.measures(task.metrics, split), tier)
        for one in int8:
            found = answers(one, rows)
            made = [*found.measures(task.metrics, split), *_differences(task.metrics, split, found, fp32)]
            measures += in_tier(made, f"{tier}-int8 on {one.artifact.runtime}")
    return measures


def in_tier(measures: Iterable[Measure], tier: str) -> list[Measure]:
    """Return measures whose splits name a tier, too."""
    return [msgspec.structs.replace(measure, split=f"{measure.split}, tier {tier}") for measure in measures]


def _differences(metrics: Sequence[str], split: str, found: Predictions, fp32: Predictions) -> Iterator[Measure]:
    for metric in metrics:
        change, name = paired(metric, [found], [fp32]), f"{metric}, difference to FP32"
        yield Measure(metric=name, split=split, value=change.value, n=len(found.targets), interval=change.interval)
