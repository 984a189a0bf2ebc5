"""Plans of one model for several devices, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from export.finetune.models import open_model
from export.finetune.run import task_of
from export.models.heads import Head
from export.models.transformer import LayerShape
from export.reduce.device import devices_of
from export.reduce.grid import grid_of, widest
from export.reduce.losses import OnProgress, measure_losses, silent
from export.reduce.run import open_source, state_of
from export.reduce.search import check_target, choose_shapes
from export.reduce.spread import spread_shapes
from export.reduce.target import Target
from export.training.points import Point, PointTimes


class DevicePlan(msgspec.Struct, frozen=True):
    """The plan for one device.

    Attributes:
        target: as ``--for`` takes it, or the device of a latency table.
        label: whether its times are measured or predicted.
        layers: None is left out.
        loss: sum of the layers' losses, a divergence of the outputs; None of a strategy that needs none.
        points: times on this device at each operating point.
        speedups: of the mean time of this plan on each device, in the order of the plans.
    """

    device: str
    target: str
    label: str
    key: dict[str, str]
    layers: tuple[LayerShape | None, ...]
    loss: float | None
    points: tuple[PointTimes, ...]
    speedups: tuple[float, ...]


class PlanComparison(msgspec.Struct, frozen=True):
    """Plans of one model for the same target on several devices."""

    run: str
    target_speedup: float
    dense: LayerShape
    plans: tuple[DevicePlan, ...]


def compare_plans(
    source: str | Path,
    data_dir: str | Path | None,
    target_speedup: float,
    targets: Sequence[Target],
    *,
    points: Sequence[Point],
    examples: int,
    precision: str = "fp16",
    on_progress: OnProgress = silent,
) -> PlanComparison:
    """Plan a model for several devices, without reducing it.

    Timings and losses are kept where :func:`export.reduce.run.reduce_runs` finds them.

    Args:
        data_dir: for the losses of the search; None plans by the strategy ``spread``, which needs none.

    Raises:
        UsageError: the model does not take an operating point, or a latency table is of another model.
        ReductionError: there are too few examples.
        PlanError: no plan is that fast on one of the devices.
    """
    source = Path(source)
    opened = open_source(source, data_dir, source, examples, on_progress=on_progress) if data_dir else None
    model = opened.model if opened else _model(source)
    config, state, losses = model.transformer.config, state_of(source, source), None
    dense, grid = config.layers, grid_of(config)
    devices = devices_of(targets, model, points, state, precision=precision, on_progress=on_progress)
    if opened:
        for device in devices:
            check_target(dense, device.mean, target_speedup, f"target speed-up on {device.name}")
        losses = measure_losses(model, opened.loss_rows, grid, state=state, on_progress=on_progress)
    plans = []
    for device in devices:
        if losses is None:
            shapes = spread_shapes(config, device.mean, target_speedup, f"target speed-up on {device.name}")
            loss = None
        else:
            shapes = choose_shapes(dense, losses, device.mean, target_speedup)
            loss = sum(layer.of(grid, shape) for layer, shape in zip(losses, shapes, strict=True))
        speedups = tuple(other.mean.speedup(dense, shapes) for other in devices)
        at_points = device.at_points(dense, shapes)
        plans.append(
            DevicePlan(device.name, device.target, device.label, device.key, tuple(shapes), loss, at_points, speedups)
        )
    return PlanComparison(str(source), target_speedup, widest(config), tuple(plans))


def _model(source: Path) -> Head:
    """Return the model of a run; a UsageError refuses one without a task."""
    found = open_model(source)
    task_of(found, source)
    assert found.head is not None
    return found.head
