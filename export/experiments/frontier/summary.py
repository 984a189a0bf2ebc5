"""Summary of measured families: speeds, mean scores, and differences with their intervals.

A difference is that of two runs with the same seed on the same items, in points: hundredths of the task's headline
metric. Averages are over all tasks, and over the judged ones, without those on which the dense model is not better than
chance.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import scipy.stats

from edge.datatypes import Array
from export.finetune.predictions import METRICS
from export.finetune.text_tasks import TASKS
from export.papers.frontier.board import Board, board_of
from export.papers.frontier.records import FP32, INT8, REDUCED, STATIC, Family, Key
from export.papers.frontier.settings import DENSE, FrontierSettings
from export.training.intervals import Difference, PairedRuns, average_difference, resampled
from export.training.provenance import described

_DENSE: Key = (DENSE, FP32)


class TaskPoint(msgspec.Struct, frozen=True):
    """A file on one task: its metric times 100, a mean over seeds, and the difference to dense FP32."""

    task: str
    metric: float
    difference: Difference


class Point(msgspec.Struct, frozen=True):
    """A run in one precision, over all tasks and seeds that have it.

    Attributes:
        speedup: over the dense FP32 model at the lengths of dev; the geometric mean over tasks and seeds.
        slowest, fastest: of the families' speed-ups.
        fixed_speedup: the geometric mean at one length.
        int8_speedup: over the dense INT8 model.
        average: the mean metric over the tasks, times 100.
        difference: of the average to the dense FP32 model's.
        judged: the same on the judged tasks.
        own: of the average of judged tasks to that of the same run in FP32; None for FP32.
    """

    run: str
    precision: str
    speedup: float
    slowest: float
    fastest: float
    fixed_speedup: float
    int8_speedup: float
    average: float
    difference: Difference
    judged: Difference
    own: Difference | None
    tasks: tuple[TaskPoint, ...]


class Advantage(msgspec.Struct, frozen=True):
    """The search's advantage over a control, in FP32, on the judged tasks and seeds that have both.

    Attributes:
        speedup, control_speedup: over dense FP32.
    """

    control: str
    seeds: dict[str, int]
    speedup: float
    control_speedup: float
    difference: Difference
    tasks: dict[str, Difference]


class Change(msgspec.Struct, frozen=True):
    """Differences of a run to another, or to itself in another form, on the judged tasks and by task."""

    run: str
    difference: Difference
    tasks: dict[str, Difference]


class Frontier(msgspec.Struct, frozen=True):
    """All points of ONNX Runtime, dense FP32 first, what else was compared, and the conditions.

    Attributes:
        settings: of all families; a family's tasks are a part of them.
        seeds: families of each task.
        chance: the metric of the best constant answer on dev, times 100; 0 for a correlation.
        above_chance: tasks on which the dense model is better than chance, by one-sided tests at 5 %.
        judged: the tasks of the differences and advantages: those above chance, or all if there are none.
        static: static INT8, for TensorRT, against FP32 of the same run.
        undistilled: tiers and controls before their distillation, against dense FP32.
        undistilled_advantages: those before the distillation of both.
        board: predicted latencies on a Jetson.
        processors: of the timing, with their features.
        trained_on: processors with their features, or GPUs.
    """

    settings: FrontierSettings
    seeds: dict[str, int]
    items: dict[str, int]
    mean_tokens: dict[str, float]
    chance: dict[str, float]
    above_chance: tuple[str, ...]
    judged: tuple[str, ...]
    points: tuple[Point, ...]
    static: tuple[Change, ...]
    undistilled: tuple[Change, ...]
    advantages: tuple[Advantage, ...]
    undistilled_advantages: tuple[Advantage, ...]
    board: Board
    processors: tuple[str, ...]
    trained_on: tuple[str, ...]
    versions: dict[str, str]

    def average_of(self, point: Point) -> float | None:
        """Return the average of a file on all tasks; None if a task lacks it, since that of others says nothing."""
        return point.average if len(point.tasks) == len(self.seeds) else None

    def is_judged(self, tasks: Iterable[str]) -> bool:
        """Return whether tasks include all judged ones, so that their average compares with others."""
        return set(tasks) >= set(self.judged)


def frontier_of(families: Sequence[Family], settings: FrontierSettings) -> Frontier:
    """Return the summary of families of one or more tasks; tasks may differ in their number of seeds."""
    groups: dict[str, list[Family]] = {}
    for family in families:
        groups.setdefault(family.answered.settings.task, []).append(family)
    tasks = {task: _Task(task, group, place) for place, (task, group) in enumerate(groups.items())}
    above_chance = tuple(task for task, values in tasks.items() if values.is_above_chance)
    judged = above_chance or tuple(tasks)
    keys = list(dict.fromkeys(key for family in families for key in family.answers))
    tier = settings.control_tier
    controls = [run for run, precision in keys if precision == FP32 and run.startswith(f"{tier}-")]
    return Frontier(
        settings=settings,
        seeds={task: len(group) for task, group in groups.items()},
        items={task: group[0].answered.items for task, group in groups.items()},
        mean_tokens={task: group[0].answered.mean_tokens for task, group in groups.items()},
        chance={task: values.chance for task, values in tasks.items()},
        above_chance=above_chance,
        judged=judged,
        points=tuple(_point(key, tasks, judged) for key in keys if key[1] not in (STATIC, REDUCED)),
        static=tuple(_change(key, (key[0], FP32), tasks, judged) for key in keys if key[1] == STATIC),
        undistilled=tuple(_change(key, _DENSE, tasks, judged) for key in keys if key[1] == REDUCED),
        advantages=tuple(_advantage(tier, control, FP32, tasks, judged) for control in controls),
        undistilled_advantages=tuple(
            _advantage(tier, control, REDUCED, tasks, judged) for control in controls if (control, REDUCED) in keys
        ),
        board=board_of(families),
        processors=described(family.timed.processor for family in families),
        trained_on=tuple(
            sorted({one.gpu or described([one.processor])[0] for one in (family.answered for family in families)})
        ),
        versions=families[0].timed.versions,
    )


class _Task:
    """The metric of every file of a task: by seed, and in resamples of the items, the same for all files."""

    def __init__(self, task: str, families: Sequence[Family], place: int) -> None:
        self.families, self._place = families, place
        self._metric: Any = METRICS[TASKS[task].headline]
        targets = families[0].targets
        self.chance = 0.0
        if TASKS[task].labels:
            constants = [self._metric(np.full_like(targets, label), targets) for label in np.unique(targets)]
            self.chance = 100 * float(max(constants))
        self._resampled: dict[tuple[int, Key], Array] = {}

    def having(self, *keys: Key) -> list[int]:
        """Return the places of the families that have files."""
        return [place for place, family in enumerate(self.families) if all(key in family.answers for key in keys)]

    def values(self, key: Key) -> Array:
        """Return the metric of a file times 100, by seed."""
        return np.array([self._value(place, key) for place in self.having(key)])

    def minus(self, key: Key, other: Key) -> PairedRuns:
        """Return the difference of two files over the seeds that have both."""
        places = self.having(key, other)
        by_seed = np.array([self._value(place, key) - self._value(place, other) for place in places])
        drawn = np.mean([self._drawn(place, key) - self._drawn(place, other) for place in places], axis=0)
        return PairedRuns(by_seed, drawn)

    @property
    def is_above_chance(self) -> bool:
        """Whether the dense model's mean metric is above chance: the lower bound of its one-sided 95 % interval."""
        drawn = np.mean([self._drawn(place, _DENSE) for place in self.having(_DENSE)], axis=0)
        values = self.values(_DENSE)
        error = scipy.stats.t.ppf(0.95, len(values) - 1) * scipy.stats.sem(values) if len(values) > 1 else 0.0
        return bool(values.mean() - np.hypot(values.mean() - np.quantile(drawn, 0.05), error) > self.chance)

    def _value(self, place: int, key: Key) -> float:
        family = self.families[place]
        return 100 * float(self._metric(family.answers[key], family.targets))

    def _drawn(self, place: int, key: Key) -> Array:
        if (place, key) not in self._resampled:
            family, generator = self.families[place], np.random.default_rng(self._place)
            found = resampled(self._metric, family.answers[key], family.targets, generator=generator)
            self._resampled[place, key] = 100 * found
        return self._resampled[place, key]


def _point(key: Key, tasks: Mapping[str, _Task], judged: Sequence[str]) -> Point:
    run, precision = key
    having = {task: values for task, values in tasks.items() if values.having(key)}
    families = [values.families[place] for values in having.values() for place in values.having(key)]
    speedups = _of(families, key)
    fixed = np.array([family.timed.fixed_speedups["/".join(key)] for family in families])
    differences = {task: values.minus(key, _DENSE) for task, values in having.items()}
    compared = _judged(having, judged)
    own = [having[task].minus(key, (run, FP32)) for task in compared] if precision != FP32 else []
    return Point(
        run,
        precision,
        speedup=_geometric(speedups),
        slowest=float(speedups.min()),
        fastest=float(speedups.max()),
        fixed_speedup=_geometric(fixed),
        int8_speedup=_geometric(speedups / _of(families, (DENSE, INT8))),
        average=float(np.mean([values.values(key).mean() for values in having.values()])),
        difference=average_difference(list(differences.values())),
        judged=average_difference([differences[task] for task in compared]),
        own=average_difference(own) if own else None,
        tasks=tuple(
            TaskPoint(task, float(having[task].values(key).mean()), average_difference([difference]))
            for task, difference in differences.items()
        ),
    )


def _change(ours: Key, theirs: Key, tasks: Mapping[str, _Task], judged: Sequence[str]) -> Change:
    having = {task: values for task, values in tasks.items() if values.having(ours, theirs)}
    differences = {task: values.minus(ours, theirs) for task, values in having.items()}
    return Change(
        ours[0],
        average_difference([differences[task] for task in _judged(having, judged)]),
        {task: average_difference([difference]) for task, difference in differences.items()},
    )


def _advantage(tier: str, control: str, form: str, tasks: Mapping[str, _Task], judged: Sequence[str]) -> Advantage:
    ours, theirs = (tier, form), (control, form)
    both = {task: values for task, values in tasks.items() if values.having(ours, theirs)}
    having = {task: both[task] for task in _judged(both, judged)}
    families = [values.families[place] for values in having.values() for place in values.having(ours, theirs)]
    differences = {task: values.minus(ours, theirs) for task, values in having.items()}
    return Advantage(
        control.removeprefix(f"{tier}-"),
        {task: len(values.having(ours, theirs)) for task, values in having.items()},
        _geometric(_of(families, (tier, FP32))),
        _geometric(_of(families, (control, FP32))),
        average_difference(list(differences.values())),
        {task: average_difference([difference]) for task, difference in differences.items()},
    )


def _judged(having: Mapping[str, _Task], judged: Sequence[str]) -> list[str]:
    """Return the judged tasks among those that have a file, or all of these."""
    return [task for task in judged if task in having] or list(having)


def _of(families: Sequence[Family], key: Key) -> Array:
    return np.array([family.timed.speedups["/".join(key)] for family in families])


def _geometric(ratios: Array) -> float:
    return float(np.exp(np.log(ratios).mean()))
