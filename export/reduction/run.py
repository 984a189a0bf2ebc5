"""Reduction of a fine-tuned run to a smaller run, measured on the same data."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from edge.profiling.table import Comparison
from export.errors import PlanError
from export.provenance import provenance
from export.reduction.latency import measure_times
from export.reduction.layer import LayerReport
from export.reduction.plan import check_speedup
from export.reduction.reduce import Progress, ReducedModel, calibration_batches, check_model, reduce_model
from export.reduction.search import grid_of
from export.reduction.timing import feeds_of, measure_models
from export.runs import RunMetrics, Speedup
from export.tasks.models import find
from export.tasks.objectives import Head
from export.tasks.registry import task_of
from export.tasks.run import predict_splits, prepare, save_run
from export.transformer import LayerShape

#: Of each model, when the speed-up is confirmed: a ratio that neighbours have spoilt is measured again, and longer.
_CALLS = (60, 120, 240)


class Reduced(msgspec.Struct, frozen=True):
    """Result of a reduction.

    Attributes:
        directory: of the new run.
        tokens: in the input that was timed.
        expected_speedup: what the layers' times add up to.
        measured: both models in turns, on ONNX Runtime, one thread.
        bound: the most that the removed multiplications allow, before the tolerance of
            :func:`export.reduction.plan.check_speedup`.
        dense: the shape that each layer had.
        layers: a report for each.
        metrics: of the new model, not fine-tuned yet.
    """

    directory: str
    tokens: int
    expected_speedup: float
    measured: Comparison
    bound: float
    dense: LayerShape
    layers: tuple[LayerReport, ...]
    metrics: RunMetrics


def reduce_run(
    source: str | Path,
    data_dir: str | Path,
    directory: str | Path,
    target_speedup: float,
    *,
    tokens: int,
    examples: int,
    on_shape: Callable[[int, int], None] = lambda done, shapes: None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Reduced:
    """Reduce a fine-tuned model and write a run directory, to be fine-tuned further with the original as teacher.

    Latencies, losses and unfinished layers are kept beside the new run, in :func:`state_of`; the same call resumes from
    them, and a call with another target uses them too.

    Args:
        source: a run of ``fewheads finetune``.
        data_dir: holds the data of its task.
        directory: path of the new run; an earlier run there is replaced when this one is done.
        target_speedup: of the whole model.
        tokens: in the input that times are measured with; an image has as many as the model makes of it.
        examples: of the training set, to calibrate with.
        on_shape: see :func:`export.reduction.latency.measure_layers`.
        on_progress: see :func:`export.reduction.reduce.reduce_model`.

    Raises:
        UsageError: the source is no run on a task.
        DataError: the data are missing or malformed.
        CheckpointError: the source cannot be read, or something not be written.
        ReductionError: the model is reduced already, or there are too few examples.
        PlanError: no plan is that fast, or a measured speed-up is more than the plan can explain.
    """
    started = time.perf_counter()
    source, directory = Path(source), Path(directory)
    found = find(source)
    task = task_of(found, source)
    assert found.head is not None
    assert found.architecture is not None
    model, architecture = found.head, found.architecture
    reader = task.reader(source)
    data = prepare(task, data_dir, reader, max_length=architecture.max_length, limit=examples)
    check_model(model)
    calibration_batches(model, data.train)  # now, not after minutes of timing
    state = state_of(source, directory)
    config = model.transformer.config
    if config.architecture == "vit":
        tokens = config.max_positions
    grid = grid_of(config.layers[0])
    times, rest = measure_times(model, grid, tokens, cache=state / "latency.json", on_shape=on_shape)
    reduced = reduce_model(
        model, data.train, target_speedup, grid=grid, times=times, rest=rest, state=state, on_progress=on_progress
    )
    measured, bound = _measured(model, reduced, tokens)
    how = f"reduced from {source.name} for {target_speedup:g}x at {tokens} tokens, calibrated with {examples} examples"
    metrics = save_run(
        task,
        directory,
        reduced.model,
        msgspec.structs.replace(architecture, transformer=reduced.model.transformer.config),
        reader,
        predict_splits(task, reduced.model, data),
        record=provenance(trainer=how, data=task.origin, seed=None),
        epochs=0,
        best_epoch=0,
        seconds=time.perf_counter() - started,
        data_dir=data_dir,
        speedup=Speedup(measured.ratio, tokens),
    )
    for unfinished in state.glob("layers-*.state"):
        unfinished.unlink()
    return Reduced(
        str(directory),
        tokens,
        reduced.expected_speedup,
        measured,
        bound,
        config.layers[0],
        reduced.reports,
        metrics,
    )


def state_of(source: Path, directory: Path) -> Path:
    """Return the directory that keeps what a reduction of ``source`` to ``directory`` has done so far."""
    return directory.parent / f".{source.name}.reduction"


def _measured(model: Head, reduced: ReducedModel, tokens: int) -> tuple[Comparison, float]:
    """Return how much faster the reduced model is, and the bound of that; other work on the machine may need patience.

    Raises:
        PlanError: however often it is measured, the speed-up is more than the plan can explain.
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
