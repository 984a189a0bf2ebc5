"""Plans of one model for several devices, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from export.models.transformer import LayerShape
from export.reduce.grid import widest
from export.reduce.losses import OnProgress, measure_losses, silent
from export.reduce.run import open_source
from export.reduce.search import check_target, choose_shapes
from export.reduce.target import Target
from export.training.points import Point, PointTimes


class DevicePlan(msgspec.Struct, frozen=True):
    """The plan for one device.

    Attributes:
        target: as ``--for`` takes it, or the device of a latency table.
        label: whether its times are measured or predicted.
        layers: None is left out.
        loss: sum of the layers' losses, a divergence of the outputs.
        points: times on this device at each operating point.
        speedups: of the mean time of this plan on each device, in the order of the plans.
    """

    device: str
    target: str
    label: str
    key: dict[str, str]
    layers: tuple[LayerShape | None, ...]
    loss: float
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
    data_dir: str | Path,
    target_speedup: float,
    targets: Sequence[Target],
    *,
    points: Sequence[Point],
    examples: int,
    precision: str = "fp16",
    on_progress: OnProgress = silent,
) -> PlanComparison:
    """Plan a model for several devices, without reducing it.

    Timings and losses are kept where :func:`export.reduce.run.reduce_run` finds them.

    Raises:
        UsageError: the model does not take an operating point, or a latency table is of another model.
        ReductionError: there are too few examples.
        PlanError: no plan is that fast on one of the devices.
    """
    source = Path(source)
    opened = open_source(source, data_dir, source, examples)
    devices, dense, grid = opened.devices(targets, points, precision, on_progress), opened.layers, opened.grid
    for device in devices:
        check_target(dense, device.mean, target_speedup, f"target speed-up on {device.name}")
    losses = measure_losses(opened.model, opened.data.train, grid, state=opened.state, on_progress=on_progress)
    plans = []
    for device in devices:
        shapes = choose_shapes(dense, losses, device.mean, target_speedup)
        loss = sum(layer.of(grid, shape) for layer, shape in zip(losses, shapes, strict=True))
        speedups = tuple(other.mean.speedup(dense, shapes) for other in devices)
        at_points = device.at_points(dense, shapes)
        plans.append(
            DevicePlan(device.name, device.target, device.label, device.key, tuple(shapes), loss, at_points, speedups)
        )
    return PlanComparison(str(source), target_speedup, widest(opened.model.transformer.config), tuple(plans))
