"""Plans of one model for several devices, side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from export.reduction.reduce import Progress, measure_losses
from export.reduction.run import Device, measured_device, open_source, state_of, tabled_device, tokens_of
from export.reduction.search import choose_shapes, grid_of, time_of, widest
from export.transformer import LayerShape


class DevicePlan(msgspec.Struct, frozen=True):
    """The plan for one device.

    Attributes:
        label: whether its times are measured or predicted.
        loss: sum of the layers' losses, a divergence of the outputs.
        speedups: of this plan on each device, in the order of the plans.
    """

    device: str
    label: str
    key: dict[str, str]
    layers: tuple[LayerShape, ...]
    loss: float
    speedups: tuple[float, ...]


class PlanComparison(msgspec.Struct, frozen=True):
    """Plans of one model for the same target on several devices."""

    run: str
    tokens: int
    target_speedup: float
    dense: LayerShape
    plans: tuple[DevicePlan, ...]


def compare_plans(
    source: str | Path,
    data_dir: str | Path,
    target_speedup: float,
    tables: Sequence[Path],
    *,
    tokens: int,
    examples: int,
    on_shape: Callable[[int, int], None] = lambda done, shapes: None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> PlanComparison:
    """Plan a model for this machine's processor and for the devices of latency tables, without reducing it.

    Timings and losses are kept where :func:`export.reduction.run.reduce_run` finds them.

    Raises:
        ReductionError: there are too few examples.
    """
    source = Path(source)
    opened = open_source(source, data_dir, examples)
    model, config = opened.model, opened.model.transformer.config
    tokens = tokens_of(config, tokens)
    grid, state = grid_of(config), state_of(source, source)
    devices: list[Device] = [tabled_device(path, config, grid, tokens) for path in tables]
    devices.insert(0, measured_device(model, grid, tokens, state, on_shape))
    losses = measure_losses(model, opened.data.train, grid, state=state, on_progress=on_progress)
    plans = []
    for device in devices:
        subject = f"target speed-up on {device.name}"
        shapes = choose_shapes(config.layers, grid, losses, device.times, device.rest, target_speedup, subject)
        loss = sum(
            layer.attention[a] + layer.feed_forward[f]
            for layer, (a, f) in zip(losses, map(grid.find, shapes), strict=True)
        )
        speedups = tuple(
            time_of(config.layers, grid, other.times, other.rest) / time_of(shapes, grid, other.times, other.rest)
            for other in devices
        )
        plans.append(DevicePlan(device.name, device.label, device.key, tuple(shapes), loss, speedups))
    return PlanComparison(str(source), tokens, target_speedup, widest(config), tuple(plans))
