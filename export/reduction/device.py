"""The device that a plan is for: this machine, a device with a measured latency table, or a Jetson by prediction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from edge.bench.layer_latencies import PREDICTION, Label, LayerLatencies
from edge.errors import UsageError
from export.estimate.devices import DEVICES, BoardMode
from export.estimate.model import RUNTIME
from export.models.heads import Head
from export.models.transformer import LayerShape, TransformerConfig
from export.reduce.board import Counted, Predicted, count_kernels, predict_times
from export.reduce.grid import Grid, Times
from export.reduce.latency import machine_key, measure_times, model_key, table_times
from export.reduce.target import LATENCIES, Target
from export.training.points import THIS, Point, PointTimes


class Device(NamedTuple):
    """Times of the parts of a model on a device.

    Attributes:
        name: for people.
        target: as ``--for`` takes it, or the name of a table's device.
        label: ``measured``, or that it is a prediction.
        times: at each operating point.
        predicted: their parts, of a prediction.
    """

    name: str
    target: str
    label: Label
    key: dict[str, str]
    points: tuple[Point, ...]
    times: tuple[Times, ...]
    predicted: tuple[Predicted, ...] = ()

    @property
    def mean(self) -> Times:
        """The mean of the times by the weights of the points."""
        return Times.mean(self.times, [point.weight for point in self.points])

    def at_points(self, dense: Sequence[LayerShape], shapes: Sequence[LayerShape | None]) -> tuple[PointTimes, ...]:
        """Return what a plan gives at each operating point."""
        found = []
        for number, (point, times) in enumerate(zip(self.points, self.times, strict=True)):
            whole = self.predicted[number].of(shapes) if self.predicted else None
            found.append(
                PointTimes(
                    *(point.tokens, point.batch, point.weight),
                    dense_ms=times.of(dense),
                    milliseconds=times.of(shapes),
                    low_ms=whole.low_ms if whole else None,
                    high_ms=whole.high_ms if whole else None,
                )
            )
        return tuple(found)


def devices_of(
    targets: Sequence[Target],
    model: Head,
    grid: Grid,
    points: Sequence[Point],
    state: Path,
    *,
    precision: str = "fp16",
    on_shape: Callable[[int, int], None] = lambda done, shapes: None,
) -> list[Device]:
    """Return the devices of targets.

    Args:
        state: a directory that keeps the measurements of this machine.
        precision: of predictions, ``fp16`` or ``int8``.

    Raises:
        UsageError: a table cannot be read, is of another model, or lacks shapes or an operating point.
    """
    config, found, counted = model.transformer.config, list[Device](), None
    for target in targets:
        if isinstance(target, BoardMode):
            counted = counted or count_kernels(model, precision, state / f"kernels-{precision}.json")
            found.append(_predicted(target, counted, config, grid, points))
        elif isinstance(target, Path):
            found.append(_tabled(target, config, grid, points))
        else:
            times = measure_times(model, grid, points, cache=state / LATENCIES, on_shape=on_shape)
            table = LayerLatencies(key=machine_key(config))
            found.append(Device(table.name, THIS, table.label, table.key, tuple(points), tuple(times)))
    return found


def _predicted(
    target: BoardMode, counted: Counted, config: TransformerConfig, grid: Grid, points: Sequence[Point]
) -> Device:
    found = predict_times(counted, config, grid, points, target)
    key = {
        "runtime": RUNTIME,
        "runtime_version": "prediction",
        "kernels": counted.how,
        "provider": "GPU",
        "precision": counted.precision,
        "device": DEVICES[target.board].name,
        "power_mode": target.power_mode,
        **model_key(config),
    }
    times = tuple(one.times for one in found)
    name = f"{DEVICES[target.board].name} {target.power_mode} {RUNTIME} {counted.precision}"
    return Device(name, str(target), PREDICTION, key, tuple(points), times, tuple(found))


def _tabled(path: Path, config: TransformerConfig, grid: Grid, points: Sequence[Point]) -> Device:
    table = LayerLatencies.read(path)
    times = table_times(table, config, grid, points, f"latency table {path}")
    words = [table.key[name] for name in ("device", "power_mode") if table.key.get(name)]
    return Device(table.name, " ".join(words) or path.stem, table.label, table.key, tuple(points), tuple(times))


def check_points(config: TransformerConfig, points: Sequence[Point]) -> tuple[Point, ...]:
    """Return the operating points of a model; images have a fixed number of tokens.

    Raises:
        UsageError: an input has more tokens than the model has positions.
    """
    if config.architecture == "vit":
        batches: dict[int, Point] = {}
        for point in points:
            weight = point.weight + (batches[point.batch].weight if point.batch in batches else 0.0)
            batches[point.batch] = Point(config.max_positions, point.batch, weight)
        return tuple(batches.values())
    for point in points:
        if point.tokens > config.max_positions:
            expected = f"at most {config.max_positions}, the positions of the model"
            raise UsageError("--tokens", given=point.tokens, expected=expected, fix="Give shorter inputs.")
    return tuple(points)
