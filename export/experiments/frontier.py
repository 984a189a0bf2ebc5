"""Speed against accuracy over tasks and seeds: summary of all measured families.

A difference is that to the dense FP32 model of the same seed on the same items. Its interval comes from drawing items
anew within every task, the same for all models and seeds, and seeds anew within every task; three seeds say little of
how seeds vary, so the interval is, if anything, too narrow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from edge.datatypes import Array
from export.experiments.family import DENSE, family_directory
from export.experiments.measure import MeasuredFamily, read_answers
from export.processor import described
from export.tasks.glue import TASKS
from export.tasks.metrics import METRICS, RESAMPLES, Difference, middle, resampled

_Key = tuple[str, str]


class TaskPoint(msgspec.Struct, frozen=True):
    """A file on one task: its headline metric times 100, a mean over seeds, and the difference to dense FP32."""

    task: str
    metric: float
    difference: Difference


class Point(msgspec.Struct, frozen=True):
    """A tier in one precision, over all tasks and seeds.

    Attributes:
        tier: of the families.
        precision: ``fp32`` or ``int8``.
        speedup: of the dense FP32 model, over dev as it is; the geometric mean over tasks and seeds.
        slowest, fastest: of the families' speed-ups.
        fixed_speedup: likewise, at one length.
        int8_speedup: of the dense INT8 model.
        average: the mean headline metric over the tasks, times 100.
        difference: of the average to the dense FP32 model's, in points.
        tasks: each alone.
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
    """All points, dense FP32 first, with what they were measured on.

    Attributes:
        seeds: families of each task.
        items: of each task.
        mean_tokens: of an item of each task.
        points: in order.
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
        families: all tiers of each are there; a task may have more seeds than another.

    Raises:
        CheckpointError: the answers of a family are missing.
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
    """The metric of every file of a task, times 100: by seed, [seeds], and under resampling, [seeds, resamples]."""

    def __init__(self, task: str, answers: Sequence[tuple[dict[_Key, Array], Array]]) -> None:
        metric = METRICS[TASKS[task].headline]
        self.values: dict[_Key, Array] = {}
        self.resampled: dict[_Key, Array] = {}
        for key in answers[0][0]:
            self.values[key] = np.array([100 * metric(found[key], targets) for found, targets in answers])
            self.resampled[key] = np.array([100 * resampled(metric, found[key], targets) for found, targets in answers])
        random = np.random.default_rng(1)
        seeds = len(answers)
        #: For each resample, how often each seed is drawn, over the number of seeds: [seeds, resamples].
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
