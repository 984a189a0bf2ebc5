"""Reduction of a fine-tuned run to a smaller run, measured on the same data."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from edge.profiling.table import Comparison, LatencyTable, Shape
from export.errors import PlanError
from export.provenance import provenance
from export.reduction.latency import feeds_of, machine_key, measure_models, measure_times, table_times
from export.reduction.options import LATENCIES
from export.reduction.plan import check_speedup
from export.reduction.reduce import (
    LAYERS,
    LayerReport,
    Progress,
    ReducedModel,
    calibration_batches,
    check_weights,
    divergence,
    reduce_model,
)
from export.reduction.search import Costs, Grid, grid_of, widest
from export.reduction.strategy import Strategy
from export.runs import RunMetrics, Speedup
from export.tasks.models import Architecture, open_model
from export.tasks.objectives import Head
from export.tasks.registry import task_of
from export.tasks.run import predict_splits, prepare, save_run
from export.tasks.task import Data, Reader, Task
from export.training.trainer import Trained
from export.transformer import LayerShape, TransformerConfig

#: Calls of each model to measure the speed-up: a ratio that other work has spoilt is measured again, and longer.
_CALLS = (60, 120, 240)


class Divergence(msgspec.Struct, frozen=True):
    """Divergence of a reduced model's outputs from the original's, on the calibration set and on the hold-out."""

    calibration: float
    holdout: float


class Reduced(msgspec.Struct, frozen=True):
    """Result of a reduction.

    Attributes:
        divergence: much larger on the hold-out if there are too few examples for the calibration.
        expected_speedup: by the sum of the layers' times, on the device of ``latency_key``.
        measured: both models in turns, on ONNX Runtime, one thread.
        bound: the largest speed-up that the removed multiplications allow, without the tolerance of
            :func:`export.reduction.plan.check_speedup`.
        latency_label: whether that table is measured or a prediction.
    """

    directory: str
    tokens: int
    expected_speedup: float
    measured: Comparison
    bound: float
    dense: LayerShape
    layers: tuple[LayerReport, ...]
    metrics: RunMetrics
    divergence: Divergence
    latency_key: dict[str, str]
    latency_label: str


class Device(NamedTuple):
    """Times of the parts of a model on a device.

    Attributes:
        label: ``measured``, or that it is a prediction.
        times: of the options of a layer, in units of the dense one.
    """

    name: str
    label: str
    key: dict[str, str]
    times: Costs
    rest: float


def measured_device(model: Head, grid: Grid, tokens: int, state: Path, on_shape: Callable[[int, int], None]) -> Device:
    """Measure this machine's processor; the measurements are kept in the directory ``state``."""
    times, rest = measure_times(model, grid, tokens, cache=state / LATENCIES, on_shape=on_shape)
    table = LatencyTable(key=machine_key(model.transformer.config))
    return Device(table.name, table.label, table.key, times, rest)


def tabled_device(path: Path, config: TransformerConfig, grid: Grid, tokens: int) -> Device:
    """Read a device from its latency table.

    Raises:
        UsageError: the table cannot be read, is of another model, or lacks shapes or the length.
    """
    table = LatencyTable.read(path)
    times, rest = table_times(table, config, grid, tokens, f"latency table {path}")
    return Device(table.name, table.label, table.key, times, rest)


def reduce_run(
    source: str | Path,
    data_dir: str | Path,
    directory: str | Path,
    target_speedup: float,
    *,
    tokens: int,
    examples: int,
    table_path: Path | None = None,
    strategy: Strategy = "search",
    seed: int = 0,
    asymmetric: bool = False,
    on_shape: Callable[[int, int], None] = lambda done, shapes: None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Reduced:
    """Reduce a fine-tuned model and write a run directory, for further fine-tuning with the original as teacher.

    Latencies, losses and unfinished layers are kept beside the new run, in :func:`state_of`; the same call resumes from
    them, and a call with another target reuses them.

    Args:
        directory: path of the new run; an earlier run there is replaced when this one is done.
        examples: of the training set, for calibration.
        table_path: a latency table of the device to plan for; None measures this machine.
        strategy: see :data:`export.reduction.strategy.Strategy`.
        seed: of a random choice.
        asymmetric: see :func:`export.reduction.reduce.reduce_model`.

    Raises:
        UsageError: the source is not a run on a task, or the latency table is of another model or lacks entries.
        ReductionError: there are too few examples.
        PlanError: no plan is that fast, or a measured speed-up is more than the plan can explain.
    """
    started = time.perf_counter()
    source, directory = Path(source), Path(directory)
    task, model, architecture, reader, data = open_source(source, data_dir, examples)
    state = state_of(source, directory)
    config = model.transformer.config
    tokens = tokens_of(config, tokens)
    grid = grid_of(config)
    if table_path is None:
        device = measured_device(model, grid, tokens, state, on_shape)
    else:
        device = tabled_device(table_path, config, grid, tokens)
    reduced = reduce_model(
        model,
        data.train,
        target_speedup,
        grid=grid,
        times=device.times,
        rest=device.rest,
        strategy=strategy,
        seed=seed,
        asymmetric=asymmetric,
        state=state,
        on_progress=on_progress,
    )
    measured, bound = _measured(model, reduced, tokens)
    how = (
        f"reduced from {source.name} by {strategy} for {target_speedup:g}x at {tokens} tokens on {device.name} "
        f"({device.label}), calibrated with {examples} examples"
    )
    metrics = save_run(
        task,
        directory,
        reduced.model,
        msgspec.structs.replace(architecture, transformer=reduced.model.transformer.config),
        reader,
        predict_splits(task, reduced.model, data),
        record=provenance(trainer=how, data=task.origin, seed=None),
        tuned=Trained((), (), 0, 0, time.perf_counter() - started),  # no training
        data_dir=data_dir,
        speedup=Speedup(measured.ratio, tokens, tuple(map(Shape.of, config.layers))),
    )
    for unfinished in state.glob(f"{LAYERS}-*.state"):
        unfinished.unlink()
    return Reduced(
        str(directory),
        tokens,
        reduced.expected_speedup,
        measured,
        bound,
        widest(config),
        reduced.reports,
        metrics,
        Divergence(*(divergence(model, reduced.model, rows) for rows in (data.train, data.holdout))),
        device.key,
        device.label,
    )


class OpenedSource(NamedTuple):
    """A run that can be reduced: its task, model, architecture and reader, and data for calibration."""

    task: Task
    model: Head
    architecture: Architecture
    reader: Reader
    data: Data


def open_source(source: Path, data_dir: str | Path, examples: int) -> OpenedSource:
    """Open a run and check that it can be reduced, before any step that takes minutes.

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
    return OpenedSource(task, found.head, found.architecture, reader, data)


def tokens_of(config: TransformerConfig, tokens: int) -> int:
    """Return the tokens of the input to plan for: the given number, except for images, which have a fixed one."""
    return config.max_positions if config.architecture == "vit" else tokens


def state_of(source: Path, directory: Path) -> Path:
    """Return the directory with the state of a reduction of ``source`` to ``directory``."""
    return directory.parent / f".{source.name}.reduction"


def _measured(model: Head, reduced: ReducedModel, tokens: int) -> tuple[Comparison, float]:
    """Return the speed-up of the reduced model and its bound; a busy machine needs several measurements.

    Raises:
        PlanError: every measured speed-up is more than the plan can explain.
    """
    refused: PlanError | None = None
    for calls in _CALLS:
        measured = measure_models(model, reduced.model, feeds_of(model.transformer.config, tokens), calls)
        try:
            return measured, check_speedup(reduced.plan, tokens, measured.ratio)
        except PlanError as error:
            refused = error
    assert refused is not None
    raise refused
