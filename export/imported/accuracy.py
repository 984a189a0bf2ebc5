"""Agreement of the INT8 files of imported models with the original, on ONNX Runtime's CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch

from edge.bundles.manifest import Measure
from export.bundle.accuracy import OnRows, in_tier, outputs_of_file, rows_share_runs
from export.bundle.exported import int8_tier
from export.bundle.tier_files import ExportedArtifact
from export.data.examples import HOLDOUT
from export.data.tokens import Rows
from export.finetune.imported import ImportedTask
from export.models.heads import Outputs, SpanClassifier, TokenClassifier

#: Heads whose outputs have a value for each token.
BY_TOKEN = (TokenClassifier, SpanClassifier)


def int8_measures(
    task: ImportedTask,
    tier: str,
    exported: Sequence[ExportedArtifact],
    rows: Rows,
    *,
    names: Mapping[str, str],
    on_rows: OnRows,
) -> list[Measure]:
    """Return the agreement of a tier's files in INT8.

    Args:
        rows: the hold-out, with the answers of the original as targets.
        names: see :func:`export.bundle.accuracy.outputs_of_file`.
    """
    measures = []
    for one in exported:
        if one.artifact.precision == "int8":
            outputs = _outputs(task, one, rows, names, on_rows)
            found = task.compared(outputs, rows.targets).measures(task.metrics, HOLDOUT)
            measures += in_tier(found, f"{int8_tier(tier)} on {one.artifact.runtime}")
    return measures


def _outputs(
    task: ImportedTask, one: ExportedArtifact, rows: Rows, names: Mapping[str, str], on_rows: OnRows
) -> list[Outputs]:
    """Return the outputs of a file for each row, without padding."""
    file, lengths = one.artifact.file, rows.lengths
    found: dict[int, Outputs] = {}
    runs = outputs_of_file(
        one.data,
        rows,
        subject=file,
        names=names,
        rows_at_once=rows_share_runs(one.artifact),
        on_rows=partial(on_rows, file),
    )
    for indices, outputs in runs:
        for place, row in enumerate(indices):
            length = lengths[row] if isinstance(task.original, BY_TOKEN) else None
            tensors = [torch.from_numpy(outputs[name][place][:length]) for name in task.original.outputs]
            found[row] = (tensors[0], tensors[1]) if isinstance(task.original, SpanClassifier) else tensors[0]
    return [found[row] for row in range(len(lengths))]
