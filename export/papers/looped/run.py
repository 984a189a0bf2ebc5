"""The experiments of paper 003, "Looped Transformers are Better at Learning Learning Algorithms"."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from edge.errors import Raw, UsageError
from edge.files import sha256
from export.papers.experiment import Experiment, Part
from export.papers.looped.figures import draw
from export.papers.looped.measure import FunctionTask, Stopping, TaskResult, TrainedRun, measure
from export.papers.looped.model import PromptConfig
from export.papers.looped.prompts import FUNCTION_CLASSES
from export.papers.looped.train import load_run
from export.report.table import Table
from export.training.intervals import RESAMPLES
from export.training.runs import WEIGHTS
from export.training.watch import Watch

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Of the columns of a table.
_SHOWN_LOOPS = (1, 2, 4, 6, 8, 10, 12, 16, 20, 30, 40, 60, 80, 120, 200, 500)
#: Numbers of pairs in a table of curves, at most.
_COLUMNS = 11
#: Errors below this are of the arithmetic.
_ROUNDING = 1e-6
#: Loops of a model whose training is not recorded.
_LOOPS = 30


class LoopedSettings(msgspec.Struct, frozen=True):
    """Number of prompts, the most loops, and the digests of the runs by name."""

    prompts: int
    loops: int
    runs: dict[str, str]


class Looped(Experiment[TaskResult]):
    """The errors of looped and unlooped runs beside those of baselines."""

    title = "Looped transformers on function classes"
    record = TaskResult
    settings: LoopedSettings

    def __init__(self, settings: LoopedSettings, parts: Sequence[Part], paths: Sequence[Path] = ()) -> None:
        self.settings, self._parts, self._paths = settings, parts, paths

    @classmethod
    def of_runs(cls, paths: Sequence[Path], *, prompts: int, loops: int) -> Looped:
        """Return the experiment of some runs, with a part for each function class and size."""
        runs = open_runs(paths)
        parts = [Part(f"{task.function}-d{task.dims}", task[:3]) for task in tasks_of(runs)]
        return cls(LoopedSettings(prompts, loops, {run.name: run.digest for run in runs}), parts, paths)

    def parts(self) -> Sequence[Part]:
        """Return all parts."""
        return self._parts

    def compute(self, part: Part, watch: Watch) -> TaskResult:
        """Measure all runs of a function class and size."""
        task = next(task for task in tasks_of(open_runs(self._paths)) if task[:3] == part.arguments)
        return measure(task, self.settings.prompts, self.settings.loops)

    def text(self, records: Mapping[str, TaskResult]) -> str:
        """Return how errors were measured."""
        where = sorted({f"{one.processor.name} ({one.processor.described})" for one in records.values()})
        return (
            f"Errors are squared and divided by the variance of the values, on {self.settings.prompts:,} prompts, the "
            f"same for all methods. Intervals are of 95 %, over prompts, by {RESAMPLES:,} resamples, and over seeds, "
            "by Student or Welch, where a model has several; one seed has no spread. Computed on "
            f"{', '.join(where)}."
        )

    def tables(self, records: Mapping[str, TaskResult]) -> Sequence[Table]:
        """Return the tables of all tasks."""
        return [table for result in records.values() for table in tables_of(result)]

    def figures(self, records: Mapping[str, TaskResult]) -> Mapping[str, Figure]:
        """Return two figures of each task, by pairs and by loops."""
        return {f"{name}-{kind}": figure for name, one in records.items() for kind, figure in draw(one).items()}


def tables_of(task: TaskResult) -> list[Table]:
    """Return the tables of a function class and size."""
    name = f"{task.function}, d = {task.dims}, {task.points - 1} pairs"
    groups = [
        (
            one.name,
            seeds_of(len(one.by_seed)),
            f"{one.parameters:,}",
            one.loops,
            one.error,
            _number(one.longest),
            ", ".join(map(_number, one.by_seed.values())),
        )
        for one in task.groups
    ]
    heads = ("model", "seeds", "parameters", "loops", "error", "after most loops", "by seed")
    common = sorted(set(range(1, task.points)).intersection(*task.by_pairs.values()))
    pairs = common[:: len(common) // -_COLUMNS][::-1]  # the last one, and even steps before it
    columns = [loops for loops in _SHOWN_LOOPS if all(loops <= len(curve) for curve in task.by_loops.values())]
    tables = [
        Table(f"{name}: models, after all pairs", heads, groups, 2),
        Table(
            f"{name}: error by number of pairs",
            ("pairs", *map(str, pairs)),
            [(method, *(_number(curve.get(at)) for at in pairs)) for method, curve in task.by_pairs.items()],
        ),
        Table(
            f"{name}: error by loops",
            ("loops", *map(str, columns)),
            [(model, *(_number(curve[at - 1]) for at in columns)) for model, curve in task.by_loops.items()],
        ),
        equal_table(f"{name}: loops to equal models that run once", task),
        Table(
            f"{name}: {task.looped} over the others",
            ("other", "seeds", "ratio after all pairs", f"ratio of means from {task.dims} pairs on"),
            [(one.other, seeds_of(*one.seeds), one.after_all, task.known_ratio(one)) for one in task.ratios],
            2,
        ),
        _stopping_table(f"{name}: loops that stop by their residual", task.stopping),
        _stopping_table(f"{name}: the same with Anderson acceleration", task.accelerated),
    ]
    return [table for table in tables if table.rows]


def _stopping_table(title: str, stopping: Sequence[Stopping]) -> Table:
    heads = ("tolerance", "mean loops", "90th percentile", "error")
    rows = [(one.tolerance, f"{one.mean_loops:.1f}", f"{one.most:.0f}", _number(one.error)) for one in stopping]
    return Table(title, heads, rows, 0)


def equal_table(title: str, task: TaskResult) -> Table:
    """Return how many loops each looped model needs for the error of each unlooped one; without these, no rows."""
    unlooped = [one for one in task.groups if one.name not in task.by_loops]
    looped = [one for one in task.groups if one.name in task.by_loops and unlooped]
    heads = ("model", "parameters", *(f"{one.name}: {_number(one.error.value)}" for one in unlooped))
    rows = [
        (one.name, f"{one.parameters:,}", *(_loops_to(of.error.value, task.by_loops[one.name]) for of in unlooped))
        for one in looped
    ]
    return Table(title, heads, rows)


def _loops_to(error: float, curve: Sequence[float]) -> str:
    """Return the first number of loops whose error is at most another one, for people."""
    reached = next((loops for loops, one in enumerate(curve, 1) if one <= error), None)
    return f"not in {len(curve)}" if reached is None else str(reached)


def seeds_of(*numbers: int) -> str:
    """Return numbers of seeds for people, and whether an interval is over prompts alone."""
    words = " / ".join(str(number) if number else "–" for number in numbers)
    return words if max(numbers) > 1 else f"{words}, prompts alone"


def _number(value: float | None) -> str:
    if value is not None and 0 < abs(value) < _ROUNDING:
        return f"<{_ROUNDING:g}"
    return "" if value is None else f"{value:.3g}"


def open_runs(paths: Iterable[Path]) -> list[TrainedRun]:
    """Return runs in the order given.

    Raises:
        CheckpointError: a path is not a run of a transformer for prompts.
        UsageError: two runs have the same name or are the same model, or a run's function class is unknown.
    """
    runs, known = [], dict[str, Path]()
    for path in paths:
        run = _open(path)
        for key in (run.name, run.digest):
            if key in known:
                expected = f"runs with names and weights of their own, unlike {known[key]}"
                raise UsageError("RUN", given=str(path), expected=expected, fix="Leave one of them out, or rename it.")
            known[key] = path
        runs.append(run)
    return runs


def tasks_of(runs: Iterable[TrainedRun]) -> list[FunctionTask]:
    """Return the runs of each function class and size by shape and training."""
    tasks: dict[tuple[str, int, int], FunctionTask] = {}
    trainings: dict[tuple[object, ...], list[str]] = {}
    for run in runs:
        config = run.model.config
        key = run.function, config.dims, config.points
        name = group_name(config)
        trained = trainings.setdefault((*key, name), [])
        if run.training not in trained:
            trained.append(run.training)
        number = trained.index(run.training) + 1
        groups = tasks.setdefault(key, FunctionTask(*key, {})).groups
        groups.setdefault(name if number == 1 else f"{name}, training {number}", []).append(run)
    return list(tasks.values())


def group_name(config: PromptConfig) -> str:
    """Return the name of the group of a model: its shape, and its injection unless that is ``add``."""
    first = config.shapes[0]
    words = ["unlooped" if config.injection is None else "looped", f"L={len(config.shapes)}", f"D={config.dim}"]
    if first.num_heads * first.head_dim != config.dim or first.ffn_dim != 4 * config.dim:
        words.append(f"{first.num_heads} heads of {first.head_dim}, {first.ffn_dim} units")
    if config.injection not in (None, "add"):
        words.append("no injection" if config.injection == "none" else f"{config.injection} injection")
    return ", ".join(words)


def _open(path: Path) -> TrainedRun:
    model, config, _ = load_run(path)
    function = config.arguments.get("function")
    if function not in FUNCTION_CLASSES:
        expected, fix = f"one of {', '.join(FUNCTION_CLASSES)}", "Train it again."
        raise UsageError(f"{path} function", given=Raw(function), expected=expected, fix=fix)
    loops, trainer = 1, config.provenance.trainer
    if model.config.injection is not None:
        # The stages' curricula are a part of the record; the last number is that of the last stage.
        recorded = re.findall(r"loops=Rising\(start=\d+, end=(\d+)", trainer)
        loops = int(recorded[-1]) if recorded else _LOOPS
    digest = sha256((path / WEIGHTS).read_bytes() + msgspec.json.encode(config.arguments))
    return TrainedRun(path.resolve().name, function, model, loops, trainer, digest)
