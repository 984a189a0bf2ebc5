"""Fine-tuned, imported and reduced runs as the tiers of one bundle, each with a twin in INT8."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace as replaced
from torch import Tensor, nn

from edge.bundles.image import ImagePreprocessor
from edge.bundles.manifest import Manifest, Measure, Tier
from edge.bundles.programs import CascadeProgram
from edge.bundles.steps import ImagePreprocess
from edge.errors import Raw, UsageError
from edge.programs.program import AUTO
from export.bundle.accuracy import in_tier, int8_measures
from export.bundle.cascade import cascade
from export.bundle.clients import (
    GOLDEN_ROWS,
    ClientInputs,
    image_inputs,
    profiles_of,
    specs_of,
    text_inputs,
)
from export.bundle.exportable import Contents, ExportedArtifact, File, OnRows
from export.bundle.exported import RUNTIMES
from export.bundle.new_bundles import no_cascade
from export.bundle.tier_files import PRECISIONS, export_tier, files_of, tiers_of
from export.data.examples import HOLDOUT, Examples, drawn, limited, split_holdout
from export.data.images import ImageFolder, Images, ImageShape, image_step
from export.data.squad import window_shape
from export.data.unlabelled import MAX_TEXT_BYTES, read_image, read_pixels, sample_texts
from export.finetune import IMPORTED
from export.finetune.image_tasks import ImageTask
from export.finetune.imported import MOST_HELD_OUT, ImportedTask, check_alike
from export.finetune.models import MODEL, Architecture, OpenedModel, open_model, space_of
from export.finetune.predictions import read_matching
from export.finetune.questions import SquadQuestions, as_imported, questions_task
from export.finetune.run import split_of, task_of
from export.finetune.text_tasks import SentenceTask
from export.importing.image_processor import sample_images
from export.models.convert import golden_of
from export.models.heads import Head, SpanClassifier, tensors_of
from export.quantize.calibration import CALIBRATION_ROWS
from export.training.points import MAX_BATCH_SIZE
from export.training.provenance import provenance

_TEXTS = ("text", "text_pair")
#: Rows of a run, of the golden set and to calibrate with, of imported models of images, which may be large.
_MAX_IMAGES, _GOLDEN_IMAGES, _CALIBRATION_IMAGES = 8, 8, 64
#: Class names in the description of a bundle, at most.
_NAMED_CLASSES = 12


class _Run(NamedTuple):
    tier: str
    path: Path
    head: Head
    architecture: Architecture
    opened: OpenedModel
    space: str | None

    @property
    def is_plain(self) -> bool:
        """Whether it is a transformer without the modules of a paper."""
        return self.opened.config is None or self.opened.config.model == MODEL


class Classifiers(NamedTuple):
    """Runs of one task: an :class:`export.bundle.exportable.Exportable`.

    Attributes:
        runs: the full model first; also imported runs and those on questions.
        name: of the bundle.
        data: the data directory, of imported runs their texts or images; None takes some of ours, and measures nothing.
        tiers: a name for each run; each tier of a plain transformer has a twin in INT8, ``<tier>-int8``.
        artifacts: of :data:`export.bundle.exported.RUNTIMES`.
        cascade: share of the hold-out that the first run repeats for the last one, in the tier ``auto``; None is none.
        open_run: reads a run.
    """

    runs: Sequence[Path]
    name: str
    data: Path | None
    tiers: Sequence[str]
    artifacts: Sequence[str] = RUNTIMES
    cascade: float | None = None
    open_run: Callable[[Path], OpenedModel] = open_model

    def contents(self, on_rows: OnRows | None) -> Contents:
        """See :class:`export.bundle.exportable.Exportable`.

        Raises:
            UsageError: a run is no classifier, or the runs are of different tasks, classes, inputs or images, or
                cannot be a cascade.
            DataError: ``data`` cannot be read.
            CheckpointError: ``data`` are others than those that a run was measured on.
        """
        opened = [_opened(tier, run, self.open_run) for tier, run in zip(self.tiers, self.runs, strict=True)]
        first = opened[0]
        source: _FineTuned | _Imported
        if first.architecture.task in IMPORTED:
            source = _Imported(opened, self.data)
        else:
            assert self.data is not None, "only imported runs may have none"
            source = _FineTuned(opened, self.data)
        program, of_cascade = None, list[Measure]()
        if self.cascade is not None:
            if isinstance(source, _Imported) or not source.labels or any(run.opened.measured_in_int8 for run in opened):
                raise no_cascade(self.cascade)
            if AUTO in self.tiers:
                fix = "Give another --tier-name."
                raise UsageError("--tier-name", given=AUTO, expected="a name that the cascade does not have", fix=fix)
            program, of_cascade = source.cascade(opened, self.cascade)
        inputs, by_token = source.inputs, first.head.by_token
        names = [*first.head.outputs, *(["offsets"] if by_token else [])]
        tiers, measures = list[Tier](), list[Measure]()
        files: dict[str, File] = {**inputs.files}
        for run in opened:
            model = _WithOffsets(run.head) if by_token else run.head
            golden, golden_file = golden_of(model, inputs.golden, names), f"{run.tier}.golden.npz"
            exported = export_tier(
                *(model, golden, inputs.calibration),
                name=run.tier,
                runtimes=self.artifacts,
                precisions=PRECISIONS if run.is_plain else ("fp32", "fp16"),
            )
            files |= {golden_file: replaced(golden, raw=inputs.raw), **files_of(exported)}
            tiers += tiers_of(run.tier, exported, golden_file, run.space)
            measures += source.measures(run, exported, on_rows)
        manifest = Manifest(
            name=self.name,
            version=1,
            description=source.description,
            inputs=specs_of(inputs.golden, by_token=not isinstance(inputs.step, ImagePreprocess)),
            outputs=specs_of(golden.outputs, by_token=by_token),
            max_batch_size=source.max_batch_size,
            profile=profiles_of(inputs, source.max_batch_size),
            tiers=tuple(tiers),
            golden=f"{first.tier}.golden.npz",
            files={},
            provenance=provenance(trainer=", ".join(run.name for run in self.runs), data=source.task.origin, seed=None),
            preprocess=inputs.step,
            postprocess=first.head.postprocess(source.labels),
            measures=(*measures, *of_cascade),
            program=program,
        )
        # The work of a branch depends on the input, so that a bundle with one has no latencies.
        return Contents(manifest, files, predicted="always" if all(run.is_plain for run in opened) else "countable")


class _FineTuned:
    """Runs on data with labels, of texts or images."""

    max_batch_size = MAX_BATCH_SIZE

    def __init__(self, runs: Sequence[_Run], data_dir: Path) -> None:
        self._data_dir, first = data_dir, runs[0]
        self.task = task = _one_task(runs)
        if isinstance(task, ImageTask):
            self.labels = labels = first.architecture.labels
            classes = ", ".join(labels) if len(labels) <= _NAMED_CLASSES else f"{len(labels)} classes"
            self.description = f"{task.name if task.own_data else task.origin}: {classes}"
            self.inputs = self._images(task, first.architecture)
        else:
            self.labels, self.description = task.class_names, task.description
            splits = task.examples(data_dir)
            every = (splits.train, *splits.measured.values())
            longest = max(len(text.encode()) for examples in every for texts in examples.texts for text in texts)
            self.inputs = text_inputs(
                first.path,
                _TEXTS[: len(task.texts)],
                first.architecture,
                limited(splits.holdout, GOLDEN_ROWS).texts,
                limited(splits.train, CALIBRATION_ROWS).texts,
                max_text_bytes=max(MAX_TEXT_BYTES, longest),
            )

    def _images(self, task: ImageTask, architecture: Architecture) -> ClientInputs:
        transformer = architecture.transformer
        shape = ImageShape(transformer.image_size, transformer.channels)
        data = task.prepare(self._data_dir, shape, max_length=architecture.max_length, limit=None)
        train, holdout = data.train, data.holdout
        assert isinstance(train, Images | ImageFolder)
        assert isinstance(holdout, Images | ImageFolder)
        files = list(holdout.files(drawn(holdout.keys, GOLDEN_ROWS)))
        pixels = train.batch(drawn(train.keys, CALIBRATION_ROWS)).inputs.numpy()
        return image_inputs(image_step(shape.size, shape.channels), files, list(pixels))

    def measures(self, run: _Run, exported: Sequence[ExportedArtifact], on_rows: OnRows | None) -> list[Measure]:
        """Return the recorded measures of a run in FP32, and if ``on_rows`` is given, those of its files in INT8."""
        task, in_fp32 = self.task, not run.opened.measured_in_int8
        measures = in_tier(run.opened.metrics.measures if run.opened.metrics and in_fp32 else (), run.tier)
        if on_rows is None:
            return measures
        length = run.architecture.max_length
        every = task.prepare(self._data_dir, task.reader(run.path), max_length=length, limit=None).measured
        splits = {split: rows for split, rows in every.items() if split in _splits(run)}
        kept = splits if in_fp32 else {}
        recorded = {split: read_matching(run.path, split, rows.targets) for split, rows in kept.items()}
        names = self.inputs.batch_names
        made = int8_measures(task, run.tier, exported, splits, names=names, on_rows=on_rows, recorded=recorded)
        return [*measures, *made]

    def cascade(self, runs: Sequence[_Run], share: float) -> tuple[CascadeProgram, list[Measure]]:
        """Return :func:`export.bundle.cascade.cascade` of the first and the last run."""
        ends = runs[0], runs[-1]
        splits = [split for split in _splits(ends[0]) if split in _splits(ends[1])]
        (logits,) = ends[0].head.outputs
        return cascade({run.tier: run.path for run in ends}, logits, share, splits, self.task.metrics)


class _Imported:
    """Imported runs, those made of them, and runs on questions: the answers of the first one are the targets."""

    def __init__(self, runs: Sequence[_Run], data: Path | None) -> None:
        first = runs[0]
        for run in runs:
            fix = "Give an imported run first, and runs that were reduced from it; or runs on questions alone."
            check_alike(f"run {run.path}", run.opened, first.architecture, first.path, fix)
        _check_space(runs)
        trained_on, described = questions_task(first.opened.config), (first.architecture, first.head)
        task = SquadQuestions(*described, trained_on=trained_on) if trained_on else ImportedTask(*described)
        self.task = task
        self._data, self._first = data, first.path
        self.labels = labels = first.architecture.labels
        what = task.name.replace("-", " ")
        self.description = f"{what}: {', '.join(labels[:8])}{' …' if len(labels) > 8 else ''}" if labels else what
        step = first.architecture.image
        self.max_batch_size = _MAX_IMAGES if step else MAX_BATCH_SIZE
        self.inputs = self._images(step) if step else self._texts(first)

    def _texts(self, run: _Run) -> ClientInputs:
        architecture = run.architecture
        names: tuple[str, ...] = ("question", "context") if architecture.task == "question-answering" else _TEXTS
        if self._data is None:
            texts = sample_texts(architecture.pair)
            items = Examples(texts, np.zeros(len(texts), np.int64))
        else:
            items = self.task.items(self._data)
        golden, calibration = _split(items, GOLDEN_ROWS, CALIBRATION_ROWS)
        by_token, names = run.head.by_token, names[: 1 + architecture.pair]
        return text_inputs(
            run.path,
            names,
            architecture,
            golden,
            calibration,
            max_text_bytes=max(MAX_TEXT_BYTES, *(len(text.encode()) for texts in items.texts for text in texts)),
            by_token=by_token,
            windows=window_shape(architecture.max_length) if isinstance(run.head, SpanClassifier) else None,
        )

    def _images(self, step: ImagePreprocess) -> ClientInputs:
        if self._data is None:
            files = sample_images(step)
            inputs = image_inputs(step, files, [])
            return inputs._replace(calibration=[{step.output: row[None]} for row in inputs.golden[step.output]])
        golden, calibration = _split(self.task.items(self._data), _GOLDEN_IMAGES, _CALIBRATION_IMAGES)
        reader = ImagePreprocessor(step)
        files = [read_image(self._data / name) for (name,) in golden]
        pixels = [read_pixels(self._data / name, reader) for (name,) in (*golden, *calibration)]
        return image_inputs(step, files, pixels[len(golden) :])

    def measures(self, run: _Run, exported: Sequence[ExportedArtifact], on_rows: OnRows | None) -> list[Measure]:
        """Return the recorded measures of a run, and if ``on_rows`` is given, the agreement of its files in INT8."""
        measures, task = in_tier(run.opened.metrics.measures if run.opened.metrics else (), run.tier), self.task
        if self._data is not None and on_rows is not None:
            items = limited(split_holdout(task.items(self._data))[1], MOST_HELD_OUT)
            rows = task.answered(items, self._data, task.reader(self._first), task.description.max_length)
            names = self.inputs.batch_names
            measures += int8_measures(task, run.tier, exported, {HOLDOUT: rows}, names=names, on_rows=on_rows)
        return measures


def _splits(run: _Run) -> tuple[str, ...]:
    return run.opened.metrics.splits if run.opened.metrics else ()


class _WithOffsets(nn.Module):
    """A model that also returns the characters of its tokens, which it reads last."""

    def __init__(self, model: Head) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, mask: Tensor, third: Tensor, fourth: Tensor | None = None) -> tuple[Tensor, ...]:
        segments, offsets = (None, third) if fourth is None else (third, fourth)
        return (*tensors_of(self.model(inputs, mask, segments)), offsets.clone())


def _opened(tier: str, run: Path, open_run: Callable[[Path], OpenedModel]) -> _Run:
    found = as_imported(open_run(run))
    head, architecture = found.head, found.architecture
    if architecture is None or head is None:
        fix = "Give runs of 'fewheads finetune' or 'fewheads reduce' on texts or images."
        raise UsageError(f"run {run}", given=Raw("no classifier"), expected="a classifier", fix=fix)
    return _Run(tier, run, head, architecture, found, space_of(found))


def _one_task(runs: Sequence[_Run]) -> SentenceTask | ImageTask:
    tasks = [task_of(run.opened, run.path) for run in runs]
    names, task = sorted({task.name for task in tasks}), tasks[0]
    if len(names) > 1 or not isinstance(task, SentenceTask | ImageTask):
        fix = "Export runs of one task; runs of another become a bundle of their own."
        raise UsageError("task of the runs", given=names, expected="one task, of texts or images", fix=fix)
    split_of(task.name, {f"tier {run.tier}": run.path for run in runs})
    for run in runs[1:]:
        if run.architecture.labels != runs[0].architecture.labels:
            given, expected = (", ".join(one.architecture.labels) for one in (run, runs[0]))
            fix = "Export runs with the same classes, in the same order."
            raise UsageError(f"classes of run {run.path}", given=Raw(given), expected=expected, fix=fix)
        sizes = [(one.image_size, one.channels) for one in (r.architecture.transformer for r in (run, runs[0]))]
        if sizes[0] != sizes[1]:
            fix = "Export runs on images of one size."
            raise UsageError(f"images of run {run.path}", given=sizes[0], expected=f"{sizes[1]}", fix=fix)
    return task


def _check_space(runs: Sequence[_Run]) -> None:
    """Refuse tiers whose embeddings cannot be compared: a policy may answer each request with another tier."""
    first, *others = [run for run in runs if run.space] or [runs[0]]
    for run in others:
        if run.space != first.space:
            expected = f"{first.space}, that of {first.path}, because a policy may answer with any tier"
            fix = f"Export it as a bundle of its own, or distil it first: 'fewheads finetune --teacher {first.path}'."
            raise UsageError(f"space of the embeddings of {run.path}", given=run.space, expected=expected, fix=fix)


def _split(items: Examples, golden: int, calibration: int) -> tuple[tuple[tuple[str, ...], ...], ...]:
    """Return items for the golden set, of the hold-out where it has enough, and others for calibration."""
    train, holdout = split_holdout(items)
    first = limited(holdout if len(holdout.texts) >= golden else items, golden)
    # All items are held out together where they have the same first text.
    return first.texts, limited(train if train.texts else items, calibration).texts
