"""Reduction of a fine-tuned run to a smaller run, measured on the same data."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from edge.bench.layer_latencies import Shape
from export.data.evaluation import evaluation_texts
from export.data.examples import HOLDOUT, TRAIN
from export.data.tokens import Rows
from export.errors import PlanError
from export.finetune.models import Architecture, open_model
from export.finetune.run import predict_splits, prepare, save_run, task_of
from export.finetune.task import Data, Reader, Task
from export.finetune.text_tasks import SentenceTask
from export.models.heads import Head
from export.models.transformer import LayerShape
from export.reduce.calibration import calibration_batches, check_weights
from export.reduce.device import Device, devices_of
from export.reduce.grid import Grid, grid_of, widest
from export.reduce.latency import feeds_of, measure_models
from export.reduce.losses import OnProgress, divergence, silent, tokens_needed
from export.reduce.plan import ReducedModel, ReducedRun, check_speedup
from export.reduce.reduce import LAYERS, reduce_model
from export.reduce.restore import SEED, RestorationRecipe, Texts, read_restoration_texts, reads_pairs, restore
from export.reduce.search import check_target
from export.reduce.spread import spread_shapes
from export.reduce.target import Strategy, Target
from export.training.device import DeviceName
from export.training.log import RunFiles
from export.training.objective import SILENT, Observer
from export.training.points import THIS, Planned, Point, PointTimes
from export.training.provenance import provenance
from export.training.runs import Speedup
from export.training.trainer import Trained

#: Calls of each model to measure the speed-up: a ratio that other work has spoilt is measured again, and longer.
_CALLS = (60, 120, 240)


class Divergence(msgspec.Struct, frozen=True):
    """Divergence of a reduced model's outputs from the original's, on the calibration set and on the hold-out."""

    calibration: float
    holdout: float


class PlannedRun(ReducedRun, frozen=True, kw_only=True):
    """A run that was reduced to a planned speed.

    Attributes:
        expected_speedup: of the mean time, by the sum of the layers' times on the device of ``latency_key``.
        measured_speedup: of the mean time of both models in turns, on ONNX Runtime, one thread.
        planned: the target, its device, and both speeds at each operating point.
        divergence: much larger on the hold-out if there are too few examples for the calibration.
        closeness: of a restored one, to the original on texts that were held out; see :class:`Restored`.
        losses_on: the split on which the search measured its losses; None of a strategy that needs none.
    """

    expected_speedup: float
    measured_speedup: float
    planned: Planned
    dense: LayerShape
    divergence: Divergence
    latency_key: dict[str, str]
    closeness: float | None = None
    losses_on: str | None = None


class Restoration(NamedTuple):
    """How reduced models are restored.

    Attributes:
        texts: files, see :func:`export.reduce.restore.read_restoration_texts`.
        files: state and log of the training, from which the same call resumes.
        evaluated: directory of evaluation sets, whose sentences must not be among the texts; None compares with none.
            ``leave_out`` leaves texts with one out.
        calibrates: whether an imported model is calibrated and measured on the same texts, too, not on its data.
    """

    texts: Sequence[Path]
    recipe: RestorationRecipe
    files: RunFiles
    evaluated: Path | None = None
    leave_out: bool = False
    calibrates: bool = False
    device: DeviceName = "auto"
    observer: Observer = SILENT

    def read(self, task: Task, reader: Reader, max_length: int, data_dir: str | Path) -> Texts:
        """Read the texts for a model; those of the task's own hold-out and dev count as evaluated, too."""
        pair = reads_pairs(task)
        evaluated = set(evaluation_texts(self.evaluated) if self.evaluated else ())
        if isinstance(task, SentenceTask):
            measured = task.examples(data_dir).measured.values()
            evaluated.update(text for examples in measured for row in examples.texts for text in row)
        longest = min(max_length, self.recipe.max_length)
        return read_restoration_texts(self.texts, reader, longest, evaluated, pair=pair, leave_out=self.leave_out)


def reduce_runs(
    source: str | Path,
    data_dir: str | Path,
    directories: Mapping[float, Path],
    *,
    points: Sequence[Point],
    examples: int,
    target: Target = THIS,
    precision: str = "fp16",
    strategy: Strategy = "search",
    restoration: Restoration | None = None,
    final: bool = False,
    on_progress: OnProgress = silent,
) -> list[PlannedRun]:
    """Reduce a fine-tuned or imported model to several speed-ups, and write a run directory for each.

    Latencies, losses and unfinished layers are kept beside the new run, or beside the directory of several, in
    :func:`state_of`; the same call resumes from them, and a call with another target reuses them.

    Args:
        directories: paths of the new runs by their target speed-ups, several in one directory; earlier runs there are
            replaced when these are done.
        examples: of the training set, for calibration.
        points: the sizes of runs whose mean time is to fall.
        target: the device to plan for.
        precision: of a prediction, see :func:`export.reduce.device.devices_of`.
        strategy: see :data:`export.reduce.target.Strategy`.
        restoration: None leaves the models as they are cut, to be fine-tuned with the original as teacher.
        final: whether dev is measured, too, after the choices for which the hold-out is there.

    Raises:
        UsageError: the source is not a run on a task or does not take an operating point, or the latency table is of
            another model or lacks entries.
        ReductionError: there are too few examples.
        DataError: the texts cannot be restored on.
        PlanError: no plan is that fast, or a measured speed-up is more than the plan can explain.
        TrainingError: a loss is not finite.
    """
    started = time.perf_counter()
    source, names = Path(source), {f"{speedup:g}x": speedup for speedup in directories}
    first = next(iter(directories.values()))
    place = first if len(directories) == 1 else first.parent
    opened = open_source(source, data_dir, place, examples, restoration, on_progress)
    texts = opened.texts
    targets, state = [target], opened.state
    (device,) = devices_of(targets, opened.model, points, state, precision=precision, on_progress=on_progress)
    for speedup in directories:
        _check_reachable(opened, device, speedup, strategy)
    losses_on = None
    if strategy == "search":
        losses_on = HOLDOUT if opened.loss_rows is opened.data.holdout else TRAIN
    reduced = {
        name: reduce_model(
            *(opened.model, opened.data.train, speedup),
            times=device.mean,
            strategy=strategy,
            loss_rows=opened.loss_rows,
            state=state,
            on_progress=on_progress,
        )
        for name, speedup in names.items()
    }
    # Before a training, because a speed-up that the plan cannot explain ends the command.
    planned = {name: _planned(opened, device, names[name], small) for name, small in reduced.items()}
    sizes = " and ".join(point.name for point in device.points)
    how = f"at {sizes} on {device.name} ({device.label}), calibrated with {examples} examples"
    how += f", with losses on the {losses_on} split" if losses_on else ""
    tuned, closeness, further = Trained((), (), 0, 0, time.perf_counter() - started), dict[str, float](), {}
    if restoration and texts:
        tuned, closeness = restore(
            opened.model,
            reduced,
            texts,
            restoration.recipe,
            restoration.device,
            restoration.files,
            restoration.observer,
        )
        further = restoration.files.finished()
        how += f", and restored on {len(texts.train.targets)} texts for {tuned.steps} steps, {restoration.recipe}"
    runs = []
    for (name, small), directory in zip(reduced.items(), directories.values(), strict=True):
        metrics = save_run(
            opened.task,
            directory,
            small.model,
            msgspec.structs.replace(opened.architecture, transformer=small.model.transformer.config),
            opened.reader,
            predict_splits(opened.task, small.model, opened.data, final=final),
            record=provenance(
                trainer=f"reduced from {source.name} by {strategy} for {name} {how}",
                data=opened.task.origin,
                seed=SEED if restoration else None,
            ),
            tuned=tuned,
            data_dir=data_dir,
            speedup=Speedup(
                planned[name].measured_speedup, device.points[0].tokens, tuple(map(Shape.of, opened.layers))
            ),
            planned=planned[name],
            precision=restoration.recipe.precision if restoration else None,
            trained_on=len(texts.train.targets) if texts else None,
            further=further,
        )
        both = (divergence(opened.model, small.model, rows) for rows in (opened.data.train, opened.data.holdout))
        runs.append(
            PlannedRun(
                *(str(directory), small.reports, metrics),
                expected_speedup=device.mean.speedup(opened.layers, small.plan.shapes),
                measured_speedup=planned[name].measured_speedup,
                planned=planned[name],
                dense=widest(opened.model.transformer.config),
                divergence=Divergence(*both),
                latency_key=device.key,
                closeness=closeness.get(name),
                losses_on=losses_on,
            )
        )
    for unfinished in state.glob(f"{LAYERS}-*.state"):
        unfinished.unlink()
    if restoration:
        restoration.files.remove()
    return runs


def _check_reachable(opened: OpenedSource, device: Device, target_speedup: float, strategy: Strategy) -> None:
    """Raise the PlanError of a target that is out of reach, before losses are measured."""
    subject = f"target speed-up on {device.name}"
    if strategy == "spread":
        spread_shapes(opened.model.transformer.config, device.mean, target_speedup, subject)
    else:
        check_target(opened.layers, device.mean, target_speedup, subject)


def _planned(opened: OpenedSource, device: Device, target_speedup: float, small: ReducedModel[Head]) -> Planned:
    points = device.at_points(opened.layers, small.plan.shapes)
    measured = tuple(_measured(opened.model, small, point) for point in points)
    return Planned(target_speedup, device.target, device.label, measured, small.plan.kept, len(opened.layers))


class OpenedSource(NamedTuple):
    """A run that can be reduced: task, model, its reader, data for calibration, state, and texts to restore on."""

    task: Task
    model: Head
    architecture: Architecture
    reader: Reader
    data: Data
    state: Path
    texts: Texts | None = None

    @property
    def grid(self) -> Grid:
        """The options for a layer."""
        return grid_of(self.model.transformer.config)

    @property
    def layers(self) -> tuple[LayerShape, ...]:
        """The shapes of its layers."""
        return self.model.transformer.config.layers

    @property
    def loss_rows(self) -> Rows:
        """Rows for the losses of the search: of a task with labels the hold-out, if it has enough tokens.

        Of rows that a model has learnt, it is so sure that few reductions change its answers. The texts or images of an
        imported model are none of those that it has learnt.
        """
        held, learnt = self.data.holdout, self.data.train
        needed = min(float(learnt.lengths.sum()), tokens_needed(self.model))
        return held if self.data.teacher is None and float(held.lengths.sum()) >= needed else learnt


def open_source(
    source: Path,
    data_dir: str | Path,
    directory: Path,
    examples: int,
    restoration: Restoration | None = None,
    on_progress: OnProgress = silent,
) -> OpenedSource:
    """Open a run and check that it can be reduced to a directory, before any step that takes minutes.

    Raises:
        UsageError: its model cannot be restored on texts.
        ReductionError: there are too few examples.
        DataError: the data, or the texts of the restoration, cannot be used.
    """
    found = open_model(source)
    task = task_of(found, source)
    model, architecture = found.head, found.architecture
    assert model is not None
    assert architecture is not None
    reader, longest = task.reader(source), architecture.max_length
    texts = restoration and restoration.read(task, reader, longest, data_dir)
    if texts:  # some hundred thousand take a minute
        on_progress("texts", 1, 1)
    options = {"items": texts.items} if restoration and texts and restoration.calibrates else {}
    on_progress("data", 0, 1)
    data = prepare(task, data_dir, reader, max_length=longest, limit=examples, **options)
    on_progress("data", 1, 1)
    check_weights(model)
    calibration_batches(model, data.train)
    return OpenedSource(task, model, architecture, reader, data, state_of(source, directory), texts)


def state_of(source: Path, directory: Path) -> Path:
    """Return the directory with the state of a reduction of ``source`` to ``directory``."""
    return directory.parent / f".{source.name}.reduction"


def _measured(model: Head, reduced: ReducedModel[Head], point: PointTimes) -> PointTimes:
    """Add both models' times on this machine and the bound of the speed-up; a busy machine needs several measurements.

    Raises:
        PlanError: every measured speed-up is more than the plan can explain.
    """
    refused: PlanError | None = None
    feeds = feeds_of(model.transformer.config, point.tokens, point.batch)
    for calls in _CALLS:
        measured = measure_models(model, reduced.model, feeds, calls)
        try:
            bound = check_speedup(reduced.plan, point.tokens, measured.ratio)
        except PlanError as error:
            refused = error
        else:
            return msgspec.structs.replace(point, measured=measured, bound=bound)
    assert refused is not None
    raise refused
