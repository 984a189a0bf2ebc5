"""The runs of one task and seed: a teacher, two dense models that imitate it, leaner tiers, and controls.

Tiers and controls are reduced from the teacher and imitate it, all by one recipe, for the same epochs, on the same
examples; so is one of the dense models. The dense baseline is the best of teacher and dense models on the hold-out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from edge.bench.layer_latencies import LayerLatencies
from edge.errors import UsageError
from edge.files import write_whole
from export.commands.reduce_options import LATENCIES
from export.data.tokens import load_tokenizer
from export.finetune.models import open_model, open_tuned
from export.finetune.predictions import read_predictions
from export.finetune.recipe import Recipe
from export.finetune.run import finetune_run, prepare
from export.finetune.task import HOLDOUT, Data, Reader, Task
from export.finetune.teacher import Teacher
from export.finetune.text_tasks import TASKS
from export.models.heads import SequenceClassifier
from export.papers.frontier.settings import (
    DENSE,
    DENSE_AS_REDUCED,
    DENSE_RUNS,
    TEACHER,
    FamilySettings,
    control_name,
)
from export.reduce.grid import grid_of
from export.reduce.latency import measure_times
from export.reduce.run import reduce_run
from export.reduce.strategy import Strategy
from export.training.device import device_of
from export.training.points import Point
from export.training.runs import PREDICTIONS, WEIGHTS
from export.training.watch import Watch


class FamilyInputs(NamedTuple):
    """Inputs of a family: the initial model, and the data in its tokens."""

    task: Task
    model: Path
    reader: Reader
    data_dir: Path
    data: Data


def family_inputs(family: FamilySettings, model: Path, data_dir: Path) -> FamilyInputs:
    """Read the inputs of a family."""
    task, reader = TASKS[family.task], load_tokenizer(model)
    data = prepare(task, data_dir, reader, max_length=family.frontier.max_length, limit=family.own.limit)
    return FamilyInputs(task, model, reader, data_dir, data)


def time_shapes(model: Path, out: Path, tokens: int, on_shape: Callable[[int, int], None]) -> None:
    """Time the shapes of layers that reductions choose from, before anything else runs; one table serves all families.

    Args:
        out: the directory of the families. A complete table that is there stays, also one of another machine: all
            families are reduced by the same times.
    """
    with suppress(UsageError):  # missing or broken
        if LayerLatencies.read(out / LATENCIES).find_rest(tokens):  # timed last
            return
    head = SequenceClassifier(open_model(model).transformer, labels=2).eval()
    measure_times(head, grid_of(head.transformer.config), [Point(tokens)], cache=out / LATENCIES, on_shape=on_shape)


def family_directory(out: Path, task: str, seed: int) -> Path:
    """Return the directory of a family's runs."""
    return out / f"{task}-seed{seed}"


def reduced_name(run: str) -> str:
    """Return the name of a tier or control before its distillation."""
    return f"{run}-reduced"


class Stage(NamedTuple):
    """A missing run of a family: its name, and the function that makes it."""

    name: str
    make: Callable[[Watch], object]


def stages(family: FamilySettings, inputs: FamilyInputs, directory: Path) -> Iterator[Stage]:
    """Yield the missing runs of a family, in order; each must be made before the next is taken.

    A finished run is left out, and an unfinished one resumes.
    """
    frontier, teaching = family.frontier, _Teaching(family, inputs, directory)

    def missing(name: str) -> bool:
        return not (directory / name / WEIGHTS).exists()

    if missing(TEACHER):
        recipe = frontier.teaching(family.own)
        yield Stage(TEACHER, partial(teaching.tune, TEACHER, inputs.model, recipe, None))
    if missing(DENSE):
        imitating = frontier.imitating(family.own)
        yield Stage(DENSE, partial(teaching.imitate, DENSE, TEACHER, imitating))
    restoring = frontier.restoring(family.own)
    if missing(DENSE_AS_REDUCED):
        yield Stage(DENSE_AS_REDUCED, partial(teaching.imitate, DENSE_AS_REDUCED, TEACHER, restoring))
    lean = [_Lean(tier, speedup, "search") for tier, speedup in frontier.tiers.items()]
    speedup = frontier.tiers[frontier.control_tier]
    lean += [_Lean(control_name(frontier, control), speedup, control) for control in family.controls]
    for run in lean:
        if not missing(run.name):
            continue
        reduced = reduced_name(run.name)
        if missing(reduced):
            yield Stage(reduced, partial(_reduce, family, inputs, directory, run))
        yield Stage(run.name, partial(teaching.imitate, run.name, reduced, restoring))
        for path in (directory / reduced).iterdir():  # half of a family's bytes
            if path.name != PREDICTIONS:
                path.unlink()


class _Lean(NamedTuple):
    """A tier or control: how it is reduced from the teacher."""

    name: str
    speedup: float
    strategy: Strategy


def best_dense(task: Task, directory: Path) -> str:
    """Return the best dense run on the hold-out."""
    return max(DENSE_RUNS, key=lambda name: read_predictions(directory / name, HOLDOUT).score(task.headline))


class _Teaching:
    """The trainings of a family; the outputs of its teacher are computed once."""

    def __init__(self, family: FamilySettings, inputs: FamilyInputs, directory: Path) -> None:
        self._family, self._inputs, self._directory = family, inputs, directory
        self._teacher: Teacher | None = None

    def imitate(self, name: str, source: str, recipe: Recipe, watch: Watch) -> None:
        if self._teacher is None:
            model = open_tuned(self._directory / TEACHER, self._inputs.task.name).to(device_of(self._family.device))
            layers = range(len(model.transformer.layers))
            self._teacher = Teacher(model, self._inputs.data.train, layers, self._family.frontier.precision)
        self.tune(name, self._directory / source, recipe, self._teacher, watch)

    def tune(self, name: str, source: Path, recipe: Recipe, teacher: Teacher | None, watch: Watch) -> None:
        inputs = self._inputs
        finetune_run(
            inputs.task,
            source,
            inputs.data,
            inputs.reader,
            self._directory / name,
            recipe,
            seed=self._family.seed,
            max_length=self._family.frontier.max_length,
            data_dir=inputs.data_dir,
            teacher=teacher,
            device=self._family.device,
            observer=watch,
        )


def _reduce(family: FamilySettings, inputs: FamilyInputs, directory: Path, run: _Lean, watch: Watch) -> None:
    reduced = directory / reduced_name(run.name)
    report = reduce_run(
        directory / TEACHER,
        inputs.data_dir,
        reduced,
        run.speedup,
        points=[Point(family.frontier.tokens)],
        examples=family.own.calibration,
        target=directory.parent / LATENCIES,
        strategy=run.strategy,
        seed=family.seed,
        on_progress=lambda progress: watch.on_part(progress.stage, progress.done, progress.layers),
    )
    write_whole(directory / f"{reduced.name}.json", msgspec.json.format(msgspec.json.encode(report), indent=1))
