"""Reduction of a fine-tuned run to a smaller run, measured on the same data."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from edge.bench.layer_latencies import Shape
from export.errors import PlanError
from export.finetune.models import Architecture, open_model
from export.finetune.run import predict_splits, prepare, save_run, task_of
from export.finetune.task import Data, Reader, Task
from export.models.heads import Head
from export.models.transformer import LayerShape
from export.reduce.calibration import calibration_batches, check_weights
from export.reduce.device import Device, check_points, devices_of
from export.reduce.grid import Grid, grid_of, widest
from export.reduce.latency import feeds_of, measure_models
from export.reduce.losses import OnProgress, divergence, silent
from export.reduce.plan import ReducedModel, ReducedRun, check_speedup
from export.reduce.reduce import LAYERS, reduce_model
from export.reduce.search import check_target
from export.reduce.target import Strategy, Target
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
    """

    expected_speedup: float
    measured_speedup: float
    planned: Planned
    dense: LayerShape
    divergence: Divergence
    latency_key: dict[str, str]


def reduce_run(
    source: str | Path,
    data_dir: str | Path,
    directory: str | Path,
    target_speedup: float,
    *,
    points: Sequence[Point],
    examples: int,
    target: Target = THIS,
    precision: str = "fp16",
    strategy: Strategy = "search",
    seed: int = 0,
    final: bool = False,
    on_progress: OnProgress = silent,
) -> PlannedRun:
    """Reduce a fine-tuned model and write a run directory, for further fine-tuning with the original as teacher.

    Latencies, losses and unfinished layers are kept beside the new run, in :func:`state_of`; the same call resumes from
    them, and a call with another target reuses them.

    Args:
        directory: path of the new run; an earlier run there is replaced when this one is done.
        examples: of the training set, for calibration.
        points: the sizes of runs whose mean time is to fall.
        target: the device to plan for.
        precision: of a prediction, see :func:`export.reduce.device.devices_of`.
        strategy: see :data:`export.reduce.target.Strategy`.
        seed: of a random choice.
        final: whether dev is measured, too, after the choices for which the hold-out is there.

    Raises:
        UsageError: the source is not a run on a task or does not take an operating point, or the latency table is of
            another model or lacks entries.
        ReductionError: there are too few examples.
        PlanError: no plan is that fast, or a measured speed-up is more than the plan can explain.
    """
    started = time.perf_counter()
    source, directory = Path(source), Path(directory)
    opened = open_source(source, data_dir, directory, examples)
    task, model, architecture, reader, data, state = opened
    (device,) = opened.devices([target], points, precision, on_progress)
    if strategy not in ("uniform", "first-layers"):  # those choose among fewer plans
        check_target(opened.layers, device.mean, target_speedup, f"target speed-up on {device.name}")
    reduced = reduce_model(
        model,
        data.train,
        target_speedup,
        times=device.mean,
        strategy=strategy,
        seed=seed,
        state=state,
        on_progress=on_progress,
    )
    planned = Planned(
        target_speedup,
        device.target,
        device.label,
        tuple(_measured(model, reduced, point) for point in device.at_points(opened.layers, reduced.plan.shapes)),
        reduced.plan.kept,
        len(opened.layers),
    )
    sizes = " and ".join(point.name for point in device.points)
    how = (
        f"reduced from {source.name} by {strategy} for {target_speedup:g}x at {sizes} on {device.name} "
        f"({device.label}), calibrated with {examples} examples"
    )
    metrics = save_run(
        task,
        directory,
        reduced.model,
        msgspec.structs.replace(architecture, transformer=reduced.model.transformer.config),
        reader,
        predict_splits(task, reduced.model, data, final=final),
        record=provenance(trainer=how, data=task.origin, seed=None),
        tuned=Trained((), (), 0, 0, time.perf_counter() - started),  # no training
        data_dir=data_dir,
        speedup=Speedup(planned.measured_speedup, device.points[0].tokens, tuple(map(Shape.of, opened.layers))),
        planned=planned,
    )
    for unfinished in state.glob(f"{LAYERS}-*.state"):
        unfinished.unlink()
    return PlannedRun(
        *(str(directory), reduced.reports, metrics),
        expected_speedup=device.mean.speedup(opened.layers, reduced.plan.shapes),
        measured_speedup=planned.measured_speedup,
        planned=planned,
        dense=widest(model.transformer.config),
        divergence=Divergence(*(divergence(model, reduced.model, rows) for rows in (data.train, data.holdout))),
        latency_key=device.key,
    )


class OpenedSource(NamedTuple):
    """A run that can be reduced: its task, model, architecture and reader, data for calibration, and where state is."""

    task: Task
    model: Head
    architecture: Architecture
    reader: Reader
    data: Data
    state: Path

    @property
    def grid(self) -> Grid:
        """The options for a layer."""
        return grid_of(self.model.transformer.config)

    @property
    def layers(self) -> tuple[LayerShape, ...]:
        """The shapes of its layers."""
        return self.model.transformer.config.layers

    def devices(
        self, targets: Sequence[Target], points: Sequence[Point], precision: str, on_progress: OnProgress
    ) -> list[Device]:
        """Return the devices of targets with the times of all options; errors as :func:`devices_of`."""
        given = targets, self.model, self.grid, check_points(self.model.transformer.config, points), self.state
        return devices_of(*given, precision=precision, on_progress=on_progress)


def open_source(source: Path, data_dir: str | Path, directory: Path, examples: int) -> OpenedSource:
    """Open a run and check that it can be reduced to a directory, before any step that takes minutes.

    Raises:
        ReductionError: there are too few examples.
    """
    found = open_model(source)
    task = task_of(found, source)
    assert found.head is not None
    assert found.architecture is not None
    reader = task.reader(source)
    data = prepare(task, data_dir, reader, max_length=found.architecture.max_length, limit=examples)
    check_weights(found.head)
    calibration_batches(found.head, data.train)
    return OpenedSource(task, found.head, found.architecture, reader, data, state_of(source, directory))


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
