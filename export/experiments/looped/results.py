"""Results of the experiments, as ``results.json`` has them.

Errors are squared, and divided by the variance of the function class's values. Where several runs differ in their seed,
a value is the mean over them, and its interval resamples prompts and seeds.
"""

from __future__ import annotations

import msgspec

from export.training.intervals import Difference
from export.training.provenance import Processor

Interval = tuple[float, float]


class Settings(msgspec.Struct, frozen=True):
    """Settings of all parts: the number of prompts, and the most loops."""

    prompts: int
    loops: int


class Curve(msgspec.Struct, frozen=True):
    """Mean errors of a method, and the 5th and 95th percentile of 1,000 resamples, as the paper has them."""

    name: str
    x: tuple[int, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


class Run(msgspec.Struct, frozen=True):
    """A run at the last point.

    Attributes:
        loops: after which it is compared, the most that its training ended with; 1 if unlooped.
        error: after ``loops``; the interval covers 95 %.
        longest: the error after the most loops; None if unlooped.
        steps: of its training, all stages together; None if they are not recorded.
    """

    name: str
    group: str
    seed: int
    steps: int | None
    seconds: float
    loops: int
    error: float
    interval: Interval
    longest: float | None


class Group(msgspec.Struct, frozen=True):
    """Runs that differ in their seed, at the last point.

    Attributes:
        parameters: without positions.
        settled: loops until the mean error stays within 5 % of its value after the most loops; None if unlooped.
        as_unlooped: the first loop with the error of the main unlooped group, or less.
    """

    name: str
    looped: bool
    layers: int
    dim: int
    seeds: int
    parameters: int
    loops: int
    error: float
    interval: Interval
    longest: float | None = None
    settled: int | None = None
    as_unlooped: int | None = None


class Against(msgspec.Struct, frozen=True):
    """The main looped group against another method on the same prompts, after all pairs where nothing else is said.

    Attributes:
        difference: of the errors, looped minus the other; the interval covers 95 %.
        ratio: of the errors, looped over the other; None if the other has practically none.
        mean_ratio: of the mean errors over all numbers of pairs, which training minimizes; None for a method that was
            not measured after every number.
    """

    other: str
    error: float
    difference: Difference
    ratio: float | None
    ratio_interval: Interval | None
    mean_ratio: float | None
    mean_ratio_interval: Interval | None


class Shifted(msgspec.Struct, frozen=True):
    """Errors under a shift after a number of pairs.

    Attributes:
        errors: by method: looped, unlooped, least squares, and ridge where there is noise.
        difference: looped minus unlooped; None without one of them.
    """

    shift: str
    pairs: int
    errors: dict[str, float]
    difference: Difference | None


class Probed(msgspec.Struct, frozen=True):
    """Errors of probes, by what they look for, after loops or layers."""

    model: str
    stages: tuple[int, ...]
    errors: dict[str, tuple[float, ...]]


class Stopping(msgspec.Struct, frozen=True):
    """A way to run the loops.

    Attributes:
        method: plain, or Anderson's acceleration.
        tolerance: of the residual, at which a prompt stops; None for a fixed number of loops.
        most: 90 % of the prompts take no more loops.
    """

    method: str
    tolerance: float | None
    mean_loops: float
    most: float
    error: float


class Fewest(msgspec.Struct, frozen=True):
    """The fewest mean loops of a way to run them whose error is within 5 % of the plain one's after all loops."""

    method: str
    stopped: bool
    mean_loops: float | None
    error: float | None


class TaskResult(msgspec.Struct, frozen=True, kw_only=True):
    """All results of a function class and size.

    Attributes:
        by_pairs: of the main groups and the baselines.
        by_loops: of every looped group; the main group's runs, by name, are in ``run_loops``.
        looped, unlooped: names of the main groups.
    """

    name: str
    function: str
    dims: int
    points: int
    looped: str | None
    unlooped: str | None
    groups: tuple[Group, ...]
    runs: tuple[Run, ...]
    by_pairs: tuple[Curve, ...]
    by_loops: tuple[Curve, ...]
    run_loops: tuple[Curve, ...]
    against: tuple[Against, ...]
    shifts: tuple[Shifted, ...] = ()
    probes: tuple[Probed, ...] = ()
    stopping: tuple[Stopping, ...] = ()
    fewest: tuple[Fewest, ...] = ()


class Results(msgspec.Struct, frozen=True):
    """Results of all tasks."""

    settings: Settings
    tasks: tuple[TaskResult, ...]
    processor: Processor
