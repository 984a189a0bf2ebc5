"""Export of fine-tuned runs to one bundle for texts, pairs or images: a tier for each run, and its INT8 twin."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from edge.bundles.bundle import write_bundle
from edge.bundles.manifest import Manifest, Measure, Tier
from edge.bundles.steps import LabelPostprocess, ScorePostprocess
from edge.datatypes import TensorSpec
from edge.errors import Raw, UsageError
from export.bundle.accuracy import OnRows, in_tier, tier_measures
from export.bundle.clients import MAX_BATCH_SIZE, BundleInputs, image_inputs, text_inputs
from export.bundle.exported import RUNTIMES, Exported, int8_tier
from export.bundle.latencies import with_latencies
from export.bundle.tier_files import ExportedArtifact, tier_files
from export.finetune.image_tasks import ImageTask
from export.finetune.models import SCORE, Architecture, open_model
from export.finetune.predictions import read_predictions
from export.finetune.run import task_of
from export.finetune.task import Task
from export.finetune.text_tasks import SentenceTask
from export.models.heads import SequenceClassifier
from export.quantize.ranges import InputRange
from export.quantize.training import trained_ranges
from export.training.provenance import provenance

_LOGITS = "logits"


class _Source(NamedTuple):
    tier: str
    path: Path
    model: SequenceClassifier
    architecture: Architecture
    task: Task
    measures: tuple[Measure, ...]
    trained: dict[str, InputRange]


def export_classifier(
    runs: Sequence[Path],
    repository: str | Path,
    name: str,
    data_dir: str | Path,
    *,
    tiers: Sequence[str],
    version: int = 1,
    artifacts: Sequence[str] = RUNTIMES,
    replace: bool = False,
    on_rows: OnRows | None = None,
) -> Exported:
    """Write runs on one task as the tiers of one bundle, ``repository/<name>-<version>``.

    Args:
        runs: of ``fewheads finetune`` or ``fewheads reduce``, the full model first.
        data_dir: golden and calibration rows are from the task's training set there.
        tiers: a name for each run; each tier has a twin in INT8, ``<tier>-int8``.
        artifacts: of :data:`export.bundle.exported.RUNTIMES`.
        on_rows: called while the files in INT8 are measured on the hold-out and dev; None measures none of them.

    Raises:
        UsageError: a run is not a classifier or regression, or the runs are of different tasks or classes, or read
            other images.
    """
    sources = [_source(run, tier) for run, tier in zip(runs, tiers, strict=True)]
    first = sources[0]
    task = _one_task(sources)
    if isinstance(task, ImageTask):
        inputs = image_inputs(task, first.architecture, data_dir)
    else:
        inputs = text_inputs(task, first.path, first.architecture, data_dir)
    files = dict(inputs.files)
    made: list[Tier] = []
    measures: list[Measure] = []
    differences: dict[str, float] = {}
    for source in sources:
        tier = tier_files(
            source.model,
            inputs.golden,
            inputs.calibration,
            [_LOGITS],
            raw=inputs.raw,
            name=source.tier,
            artifacts=artifacts,
            trained=source.trained or None,
        )
        files |= tier.files
        measures += _measures(source, tier.exported, inputs, data_dir, on_rows)
        made += tier.tiers
        differences |= tier.differences
    manifest = Manifest(
        name=name,
        version=version,
        description=inputs.description,
        inputs=inputs.tensors,
        outputs=(TensorSpec(_LOGITS, "FP32", (-1, len(inputs.labels) or 1)),),
        max_batch_size=MAX_BATCH_SIZE,
        profile={tensor.name: inputs.profile for tensor in inputs.tensors},
        tiers=tuple(made),
        golden=f"{first.tier}.golden.npz",
        files={},
        provenance=provenance(trainer=", ".join(run.name for run in runs), data=task.origin, seed=None),
        preprocess=inputs.preprocess,
        postprocess=(
            LabelPostprocess(logits=_LOGITS, output="label", labels=inputs.labels)
            if inputs.labels
            else ScorePostprocess(logits=_LOGITS, output=SCORE)
        ),
        measures=tuple(measures),
    )
    manifest = with_latencies(manifest, files, measure=on_rows is not None)
    written = write_bundle(Path(repository) / f"{name}-{version}", manifest, files, replace=replace)
    return Exported.of(written, differences)


def _source(run: Path, tier: str) -> _Source:
    found = open_model(run)
    if found.architecture is None or not isinstance(found.head, SequenceClassifier):
        fix = "Give runs of 'fewheads finetune' or 'fewheads reduce' on texts or images."
        raise UsageError(f"run {run}", given=Raw("no classifier"), expected="a classifier", fix=fix)
    measures = found.metrics.measures if found.metrics else ()
    return _Source(tier, run, found.head, found.architecture, task_of(found, run), measures, trained_ranges(found.int8))


def _measures(
    source: _Source,
    exported: Sequence[ExportedArtifact],
    inputs: BundleInputs,
    data_dir: str | Path,
    on_rows: OnRows | None,
) -> list[Measure]:
    """Return the recorded measures of a run, and those of its files in INT8.

    What a run that was trained for INT8 has recorded is of INT8, so its other file is measured, too.
    """
    task = source.task
    measures = in_tier(source.measures, int8_tier(source.tier) if source.trained else source.tier)
    if on_rows is None:
        return measures
    length = source.architecture.max_length
    splits = task.prepare(data_dir, task.reader(source.path), max_length=length, limit=None).measured
    recorded = {} if source.trained else {split: read_predictions(source.path, split) for split in splits}
    for split, predictions in recorded.items():
        number, found = len(predictions.targets), len(splits[split].targets)
        if number != found:
            subject, expected = f"{split} of {task.name} in {data_dir}", f"{number} rows, as the run was measured on"
            fix = "Give the --data-dir that the run was trained with, or --no-measure."
            raise UsageError(subject, given=Raw(f"{found} rows"), expected=expected, fix=fix)
    made = tier_measures(task, source.tier, exported, splits, recorded, names=inputs.batch_names, on_rows=on_rows)
    return made if source.trained else [*measures, *made]


def _one_task(sources: Sequence[_Source]) -> SentenceTask | ImageTask:
    names = sorted({source.task.name for source in sources})
    task = sources[0].task
    if len(names) > 1 or not isinstance(task, SentenceTask | ImageTask):
        fix = "Export runs of one task; runs of another become a bundle of their own."
        raise UsageError("task of the runs", given=names, expected="one task, of texts or images", fix=fix)
    for source in sources[1:]:
        if source.architecture.labels != sources[0].architecture.labels:
            given, expected = (", ".join(one.architecture.labels) for one in (source, sources[0]))
            fix = "Export runs with the same classes, in the same order."
            raise UsageError(f"classes of run {source.path}", given=Raw(given), expected=expected, fix=fix)
        sizes = [(one.image_size, one.channels) for one in (s.architecture.transformer for s in (source, sources[0]))]
        if sizes[0] != sizes[1]:
            fix = "Export runs on images of one size."
            raise UsageError(f"images of run {source.path}", given=sizes[0], expected=f"{sizes[1]}", fix=fix)
    return task
