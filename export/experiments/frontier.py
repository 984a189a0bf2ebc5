"""Speed against accuracy over tasks and seeds: summary and figure of all measured families.

A difference is relative to the dense FP32 model of the same seed on the same items. Its interval resamples the items of
every task, the same for all models and seeds, and the seeds of every task. Three seeds are a small sample, so the
interval is, if anything, too narrow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from edge.datatypes import Array
from export.experiments.family import DENSE, family_directory
from export.experiments.measure import PRECISIONS, MeasuredFamily, read_answers
from export.figures import new_figure, write_figure
from export.intervals import RESAMPLES, Difference, middle, resampled
from export.processor import described
from export.tasks.glue import TASKS
from export.tasks.metrics import METRICS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_Key = tuple[str, str]


class TaskPoint(msgspec.Struct, frozen=True):
    """A file on one task: its headline metric times 100, a mean over seeds, and the difference to dense FP32."""

    task: str
    metric: float
    difference: Difference


class Point(msgspec.Struct, frozen=True):
    """A tier in one precision, over all tasks and seeds.

    Attributes:
        speedup: over the dense FP32 model at the lengths of dev; the geometric mean over tasks and seeds.
        slowest, fastest: of the families' speed-ups.
        fixed_speedup: the geometric mean at one length.
        int8_speedup: over the dense INT8 model.
        average: the mean headline metric over the tasks, times 100.
        difference: of the average to the dense FP32 model's, in points.
    """

    tier: str
    precision: str
    speedup: float
    slowest: float
    fastest: float
    fixed_speedup: float
    int8_speedup: float
    average: float
    difference: Difference
    tasks: tuple[TaskPoint, ...]


class Frontier(msgspec.Struct, frozen=True):
    """All points, dense FP32 first, and the conditions of the measurement.

    Attributes:
        seeds: families of each task.
        processors: with their features, on which INT8 speeds depend.
    """

    seeds: dict[str, int]
    items: dict[str, int]
    mean_tokens: dict[str, float]
    points: tuple[Point, ...]
    processors: tuple[str, ...]


def frontier_of(families: Sequence[MeasuredFamily], out: Path) -> Frontier:
    """Return the summary of families.

    Args:
        families: complete; tasks may differ in their number of seeds.
    """
    tasks: dict[str, list[MeasuredFamily]] = {}
    for family in families:
        tasks.setdefault(family.task, []).append(family)
    values = {
        task: _Task(task, [read_answers(family_directory(out, task, family.seed)) for family in group])
        for task, group in tasks.items()
    }
    keys = [(file.tier, file.precision) for file in families[0].files]
    return Frontier(
        {task: len(group) for task, group in tasks.items()},
        {task: group[0].items for task, group in tasks.items()},
        {task: group[0].mean_tokens for task, group in tasks.items()},
        tuple(_point(key, families, values) for key in keys),
        described(family.processor for family in families),
    )


class _Task:
    """The metric of every file of a task, times 100: by seed, [seeds], and by resample, [seeds, resamples]."""

    def __init__(self, task: str, answers: Sequence[tuple[dict[_Key, Array], Array]]) -> None:
        metric = METRICS[TASKS[task].headline]
        self.values: dict[_Key, Array] = {}
        self.resampled: dict[_Key, Array] = {}
        for key in answers[0][0]:
            self.values[key] = np.array([100 * metric(found[key], targets) for found, targets in answers])
            self.resampled[key] = np.array([100 * resampled(metric, found[key], targets) for found, targets in answers])
        random = np.random.default_rng(1)
        seeds = len(answers)
        #: Weight of each seed in each resample, [seeds, resamples].
        self.weights = random.multinomial(seeds, [1 / seeds] * seeds, size=RESAMPLES).T / seeds

    def difference(self, key: _Key) -> tuple[float, Array]:
        """Return the mean difference to the dense FP32 model, and that of each resample."""
        dense = DENSE, "fp32"
        drawn = ((self.resampled[key] - self.resampled[dense]) * self.weights).sum(axis=0)
        return float((self.values[key] - self.values[dense]).mean()), drawn


def _point(key: _Key, families: Sequence[MeasuredFamily], values: Mapping[str, _Task]) -> Point:
    files, int8 = ([family.file(*which) for family in families] for which in (key, (DENSE, "int8")))
    speedups = np.array([file.speedup for file in files])
    differences = {task: of_task.difference(key) for task, of_task in values.items()}
    points = tuple(
        TaskPoint(task, float(values[task].values[key].mean()), _with_interval(*difference))
        for task, difference in differences.items()
    )
    mean = float(np.mean([value for value, _ in differences.values()]))
    return Point(
        *key,
        speedup=_geometric(speedups),
        slowest=float(speedups.min()),
        fastest=float(speedups.max()),
        fixed_speedup=_geometric([file.fixed_speedup for file in files]),
        int8_speedup=_geometric([one.speedup / other.speedup for one, other in zip(files, int8, strict=True)]),
        average=float(np.mean([point.metric for point in points])),
        difference=_with_interval(mean, np.mean([drawn for _, drawn in differences.values()], axis=0)),
        tasks=points,
    )


def _with_interval(value: float, drawn: Array) -> Difference:
    return Difference(value, middle(drawn))


def _geometric(ratios: Sequence[float] | Array) -> float:
    return float(np.exp(np.log(ratios).mean()))


_WITHOUT = "give --no-plots"
#: Claims of paper 002 for the average of GLUE: speed-up and points.
PAPER = {"fp32": (1.76, -0.2), "int8": (2.3, -0.5)}


def draw(frontier: Frontier, path: str | Path) -> None:
    """Draw the differences to dense FP32 over the speed-ups; bars are 95 % intervals, thin lines are tasks."""
    figure = new_figure(6.0 * len(PRECISIONS), 4.5, without=_WITHOUT)
    panels = figure.subplots(1, len(PRECISIONS), squeeze=False, sharey=True)[0]
    for axes, precision in zip(panels, PRECISIONS, strict=True):
        _panel(axes, frontier, precision)
    panels[0].set_ylabel("points lost or won against dense FP32")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center")
    tasks = ", ".join(f"{task} ({seeds})" for task, seeds in frontier.seeds.items())
    figure.suptitle(f"Tasks (seeds): {tasks}; ONNX Runtime, one thread, batch 1, {', '.join(frontier.processors)}")
    write_figure(figure, path)


def _panel(axes: Axes, frontier: Frontier, precision: str) -> None:
    points = [point for point in frontier.points if point.precision == precision]
    speeds = [point.speedup for point in points]
    for number, task in enumerate(frontier.seeds):
        values = [point.tasks[number].difference.value for point in points]
        axes.plot(speeds, values, ".-", linewidth=0.8, alpha=0.5, label=task)
    values = [point.difference.value for point in points]
    bars = [
        [point.difference.value - point.difference.interval[0] for point in points],
        [point.difference.interval[1] - point.difference.value for point in points],
    ]
    axes.errorbar(speeds, values, yerr=bars, fmt="o-", color="black", capsize=3, label="average")
    for point in points:
        axes.annotate(point.tier, (point.speedup, point.difference.value), xytext=(6, 6), textcoords="offset points")
    axes.plot(*PAPER[precision], "x", color="C3", markersize=9, label="paper 002 claims")
    axes.axhline(0, color="0.7", linewidth=0.8)
    axes.set(title=precision.upper(), xlabel="times as fast as dense FP32, dev as it is")
    axes.grid(alpha=0.3)
