"""Summary of measured families: speeds, mean scores, and differences with their intervals.

A difference is that of two runs with the same seed on the same items, in points: hundredths of the task's headline
metric. Averages are over all tasks, or over the judged ones, without those on which the dense model is not better than
chance.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from edge.datatypes import Array
from export.finetune.predictions import METRICS
from export.finetune.text_tasks import TASKS
from export.papers.frontier.records import DENSE, FP32, ExperimentSettings, Key, Measured
from export.training.intervals import Difference, Sample, average

#: The model that all others are compared with.
BASELINE: Key = (DENSE, FP32)


class Summary:
    """The families of one or more tasks, which may differ in their number of seeds.

    Attributes:
        tasks: by name, in the order of the families.
        keys: all runs and precisions.
        above_chance: tasks on which the dense model is better than chance, by one-sided tests at 5 %.
        judged: these, or all tasks if there are none.
    """

    def __init__(self, families: Sequence[Measured], settings: ExperimentSettings) -> None:
        self.families, self.settings = families, settings
        groups: dict[str, list[Measured]] = {}
        for family in families:
            groups.setdefault(family.answered.task, []).append(family)
        self.tasks = {task: TaskSummary(task, group, number) for number, (task, group) in enumerate(groups.items())}
        self.keys = list(dict.fromkeys(key for family in families for key in family.answers))
        self.above_chance = [name for name, task in self.tasks.items() if task.is_above_chance()]
        self.judged = self.above_chance or list(self.tasks)

    def tasks_of(self, *keys: Key, judged: bool = False) -> list[str]:
        """Return the tasks that have all these files; with ``judged`` those among them, or all if there are none."""
        names = [name for name, task in self.tasks.items() if task.having(*keys)]
        return [name for name in names if not judged or name in self.judged] or names

    def is_complete(self, *keys: Key) -> bool:
        """Return whether all judged tasks have these files, so that an average compares with others."""
        return set(self.tasks_of(*keys)) >= set(self.judged)

    def difference(self, key: Key, other: Key = BASELINE, tasks: Iterable[str] | None = None) -> Difference:
        """Return the mean difference of two files over tasks, by default the judged ones that have both."""
        names = self.tasks_of(key, other, judged=True) if tasks is None else tasks
        return average([self.tasks[name].minus(key, other) for name in names])

    def by_task(self, key: Key, other: Key = BASELINE) -> dict[str, Difference]:
        """Return the difference on each task that has both files."""
        return {name: self.difference(key, other, [name]) for name in self.tasks_of(key, other)}

    def speedups(self, key: Key, *others: Key, judged: bool = False, fixed: bool = False) -> Array:
        """Return the speed-up of a file over dense FP32 in each family that has it and the others.

        Args:
            judged: see :meth:`tasks_of`.
            fixed: at one length of all tasks, not at the lengths of dev.
        """
        families = [
            task.families[number]
            for name in self.tasks_of(key, *others, judged=judged)
            for task in [self.tasks[name]]
            for number in task.having(key, *others)
        ]
        times = [one.timed.fixed_speedups if fixed else one.timed.speedups for one in families]
        return np.array([of_family["/".join(key)] for of_family in times])


class TaskSummary:
    """The metric of every file of a task: by seed, and in resamples of the items, the same for all files.

    Attributes:
        chance: the metric of the best constant answer on dev, times 100; 0 for a correlation.
    """

    def __init__(self, task: str, families: Sequence[Measured], seed: int) -> None:
        self.families, self._seed = families, seed
        self._metric: Any = METRICS[TASKS[task].headline]
        self.chance, targets = 0.0, families[0].targets
        if TASKS[task].labels:
            constants = [self._metric(np.full_like(targets, label), targets) for label in np.unique(targets)]
            self.chance = 100 * float(max(constants))
        self._samples: dict[tuple[Key, tuple[int, ...]], Sample] = {}

    def having(self, *keys: Key) -> list[int]:
        """Return the numbers of the families that have files."""
        return [number for number, family in enumerate(self.families) if all(key in family.answers for key in keys)]

    def values(self, key: Key) -> Array:
        """Return the metric of a file times 100, by seed."""
        return self._sample(key).by_seed

    def minus(self, key: Key, other: Key) -> Sample:
        """Return the difference of two files over the seeds that have both."""
        return self._sample(key, other).paired(self._sample(other, key))

    def is_above_chance(self) -> bool:
        """Return whether the lower bound of the dense model's one-sided 95 % interval is above chance."""
        return self._sample(BASELINE).is_above(self.chance)

    def _sample(self, key: Key, *others: Key) -> Sample:
        """Return the metric of a file times 100, over the seeds that have it and others."""
        numbers = tuple(self.having(key, *others))
        if (key, numbers) not in self._samples:
            answers = [self.families[number].answers[key] for number in numbers]
            metric, targets = lambda *arrays: 100 * self._metric(*arrays), self.families[0].targets
            self._samples[key, numbers] = Sample.of_answers(metric, answers, targets, self._seed)
        return self._samples[key, numbers]


def geometric(ratios: Array) -> float:
    """Return the geometric mean."""
    return float(np.exp(np.log(ratios).mean()))
