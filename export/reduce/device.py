"""The device that a plan is for: this machine, a device with a measured latency table, or a Jetson by prediction."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from edge.bench.layer_latencies import PREDICTION, Label, LayerLatencies
from edge.errors import UsageError
from export.estimate.devices import DEVICES, BoardMode
from export.estimate.model import RUNTIME
from export.models.heads import Head
from export.models.transformer import LayerShape, TransformerConfig
from export.reduce.board import PredictedTimes, count_kernels, predict_times
from export.reduce.grid import Times, grid_of
from export.reduce.latency import machine_key, measure_times, model_key, table_times
from export.reduce.losses import OnProgress, silent
from export.reduce.target import LATENCIES, Target
from export.training.points import THIS, Point, PointTimes


class Device(NamedTuple):
    """Times of the parts of a model on a device.

    Attributes:
        name: for people.
        target: as ``--for`` takes it, or the name of a table's device.
        label: ``measured``, or that it is a prediction.
        times: at each operating point.
        predicted: how a prediction made them.
    """

    name: str
    target: str
    label: Label
    key: dict[str, str]
    points: tuple[Point, ...]
    times: tuple[Times, ...]
    predicted: tuple[PredictedTimes, ...] = ()

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
    points: Sequence[Point],
    state: Path,
    *,
    precision: str = "fp16",
    on_progress: OnProgress = silent,
) -> list[Device]:
    """Return the devices of targets.

    Args:
        state: a directory that keeps the measurements of this machine.
        precision: of predictions, ``fp16`` or ``int8``.

    Raises:
        UsageError: a table cannot be read, is of another model, or lacks shapes or an operating point; or an input has
            more tokens than the model has positions.
    """
    config, found, counted = model.transformer.config, list[Device](), None
    grid, points = grid_of(config), check_points(config, points)
    on_progress("times", 0, len(targets))
    for target in targets:
        if isinstance(target, BoardMode):
            counted = counted or count_kernels(model, precision, state / f"kernels-{precision}.json")
            board = DEVICES[target.board].name
            key = {
                "runtime": RUNTIME,
                "runtime_version": "prediction",
                "kernels": counted.how,
                "provider": "GPU",
                "precision": precision,
                "device": board,
                "power_mode": target.power_mode,
                **model_key(config),
            }
            predicted = tuple(predict_times(counted, config, grid, points, target))
            times = tuple(one.times for one in predicted)
            name = f"{board} {target.power_mode} {RUNTIME} {precision}"
            found.append(Device(name, str(target), PREDICTION, key, tuple(points), times, predicted))
            continue
        if isinstance(target, Path):
            table = LayerLatencies.read(target)
            times = tuple(table_times(table, config, grid, points, f"latency table {target}"))
            words = [table.key[word] for word in ("device", "power_mode") if table.key.get(word)]
            name = " ".join(words) or target.stem
        else:
            on_shape = partial(on_progress, "times")
            times = tuple(measure_times(model, grid, points, cache=state / LATENCIES, on_shape=on_shape))
            table, name = LayerLatencies(key=machine_key(config)), THIS
        found.append(Device(table.name, name, table.label, table.key, tuple(points), times))
    return found


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
