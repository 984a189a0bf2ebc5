"""Export of imported runs, those made of them, and runs on SQuAD to one bundle: a tier for each, and its INT8 twin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor, nn

from edge.bundles.bundle import write_bundle
from edge.bundles.manifest import Manifest, Measure, Profile, Tier
from edge.bundles.steps import LabelPostprocess, Postprocess, ScorePostprocess, TokenLabelPostprocess
from edge.datatypes import Array, TensorSpec, datatype_of
from export.bundle.accuracy import BY_TOKEN, OnRows, in_tier, int8_measures
from export.bundle.clients import MAX_BATCH_SIZE, USUAL_TOKENS, image_inputs, text_inputs
from export.bundle.exported import RUNTIMES, Exported
from export.bundle.latencies import with_latencies
from export.bundle.tier_files import tier_files
from export.data.examples import limited, split_holdout
from export.data.tokens import Rows
from export.finetune.imported import MOST_HELD_OUT, ImportedTask, check_alike
from export.finetune.models import SCORE, open_model
from export.importing.questions import as_imported, task_of
from export.models.heads import Head, SequenceClassifier, TokenClassifier
from export.training.provenance import provenance

#: Output with the characters of each token.
_OFFSETS = "offsets"
#: Rows of a run.
_MAX_IMAGES = 8


class _WithOffsets(nn.Module):
    """A model that also returns the characters of its tokens, which it reads last."""

    def __init__(self, model: Head) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, mask: Tensor, third: Tensor, fourth: Tensor | None = None) -> tuple[Tensor, ...]:
        segments, offsets = (None, third) if fourth is None else (third, fourth)
        outputs = self.model(inputs, mask, segments)
        return (*((outputs,) if isinstance(outputs, Tensor) else outputs), offsets.clone())


def export_imported(
    runs: Sequence[Path],
    repository: str | Path,
    name: str,
    data: Path | None,
    *,
    tiers: Sequence[str],
    version: int = 1,
    artifacts: Sequence[str] = RUNTIMES,
    replace: bool = False,
    on_rows: OnRows | None = None,
) -> Exported:
    """Write imported and reduced runs, or runs on SQuAD, as the tiers of one bundle, ``repository/<name>-<version>``.

    Args:
        runs: the original first.
        data: texts or images for the golden set, the ranges of INT8 and its agreement, of runs on SQuAD the data
            directory; None takes some of ours, and measures nothing.
        tiers, artifacts: see :func:`export.bundle.classifier.export_classifier`.
        on_rows: called while the files in INT8 are compared with the first run on the hold-out; None compares none.

    Raises:
        UsageError: the runs are not of one imported model.
        DataError: ``data`` cannot be read.
    """
    opened = [as_imported(open_model(run)) for run in runs]
    head, description = opened[0].head, opened[0].architecture
    assert head is not None
    assert description is not None
    for run, one in zip(runs, opened, strict=True):
        fix = "Give an imported run first, and runs that were reduced from it; or runs on SQuAD alone."
        check_alike(f"run {run}", one, description, runs[0], fix)
    task = task_of(opened[0])
    inputs = image_inputs(task, data) if description.image else text_inputs(task, runs[0], data)
    by_token = isinstance(head, BY_TOKEN)
    rows = _holdout(task, runs[0], data) if data and on_rows else None
    outputs = [*head.outputs, *([_OFFSETS] if by_token else [])]
    files, made, measures, differences = dict(inputs.files), list[Tier](), list[Measure](), dict[str, float]()
    for tier, one in zip(tiers, opened, strict=True):
        assert one.head is not None
        model = _WithOffsets(one.head) if by_token else one.head
        found = tier_files(
            model, inputs.golden, inputs.calibration, outputs, raw=inputs.raw, name=tier, artifacts=artifacts
        )
        files |= found.files
        made += found.tiers
        measures += in_tier(one.metrics.measures if one.metrics else (), tier)
        if rows is not None and on_rows is not None:
            measures += int8_measures(task, tier, found.exported, rows, names=inputs.batch_names, on_rows=on_rows)
        differences |= found.differences
    manifest = Manifest(
        name=name,
        version=version,
        description=_described(task),
        inputs=_specs(inputs.golden, by_token=description.image is None),
        outputs=_specs(found.golden.outputs, by_token),
        max_batch_size=_MAX_IMAGES if description.image else MAX_BATCH_SIZE,
        profile=_profiles(task, inputs.golden),
        tiers=tuple(made),
        golden=f"{tiers[0]}.golden.npz",
        files={},
        provenance=provenance(trainer=", ".join(run.name for run in runs), data=task.origin, seed=None),
        preprocess=inputs.step,
        postprocess=_postprocess(task),
        measures=tuple(measures),
    )
    manifest = with_latencies(manifest, files, measure=on_rows is not None)
    written = write_bundle(Path(repository) / f"{name}-{version}", manifest, files, replace=replace)
    return Exported.of(written, differences)


def _holdout(task: ImportedTask, run: Path, data: Path) -> Rows:
    items = limited(split_holdout(task.items(data))[1], MOST_HELD_OUT)
    return task.answered(items, data, task.reader(run), task.description.max_length)


def _specs(tensors: Mapping[str, Array], by_token: bool) -> tuple[TensorSpec, ...]:
    """Return the specs of golden tensors, whose rows are dynamic, and with ``by_token`` their second dimension, too."""
    dynamic = (-1, -1) if by_token else (-1,)
    return tuple(
        TensorSpec(name, datatype_of(array), (*dynamic, *array.shape[len(dynamic) :]))
        for name, array in tensors.items()
    )


def _profiles(task: ImportedTask, inputs: dict[str, Array]) -> dict[str, Profile]:
    description = task.description
    usual, most = min(USUAL_TOKENS * (1 + description.pair), description.max_length), description.max_length
    found = {}
    for name, array in inputs.items():
        rest = array.shape[1:] if description.image else array.shape[2:]
        shapes = ((1,), (1,), (_MAX_IMAGES,)) if description.image else ((1, 1), (1, usual), (MAX_BATCH_SIZE, most))
        least, tuned, largest = ((*shape, *rest) for shape in shapes)
        found[name] = Profile(min=least, opt=tuned, max=largest)
    return found


def _postprocess(task: ImportedTask) -> Postprocess | None:
    model, labels = task.original, task.description.labels
    if isinstance(model, TokenClassifier):
        return TokenLabelPostprocess(logits="logits", output="labels", labels=labels)
    if not isinstance(model, SequenceClassifier):
        return None
    if model.regression:
        return ScorePostprocess(logits="logits", output=SCORE)
    return LabelPostprocess(logits="logits", output="label", labels=labels)


def _described(task: ImportedTask) -> str:
    labels = task.description.labels
    what = task.name.replace("-", " ")
    return f"{what}: {', '.join(labels[:8])}{' …' if len(labels) > 8 else ''}" if labels else what
