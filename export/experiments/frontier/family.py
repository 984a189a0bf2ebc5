"""The runs of one task and seed: a teacher, and models that imitate it: a dense one, leaner tiers, and controls.

All imitations have the same number of epochs, on the same examples. The dense baseline is the better of teacher and
dense model on the hold-out.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from edge.files import write_whole
from export.experiments.frontier.settings import DENSE, TEACHER, FamilySettings, control_name
from export.reduction.controls import Strategy
from export.reduction.run import reduce_run
from export.runs import WEIGHTS
from export.tasks.glue import TASKS
from export.tasks.models import open_tuned
from export.tasks.predictions import read_predictions
from export.tasks.recipe import Recipe
from export.tasks.run import finetune_run, prepare
from export.tasks.task import HOLDOUT, Data, Reader, Task
from export.tasks.teacher import Teacher
from export.tasks.tokens import load_tokenizer
from export.training.watch import Watch

_LATENCIES = "latency.json"


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


def family_directory(out: Path, task: str, seed: int) -> Path:
    """Return the directory of a family's runs."""
    return out / f"{task}-seed{seed}"


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
        yield Stage(DENSE, partial(teaching.imitate, DENSE, directory / TEACHER))
    lean: dict[str, tuple[float, Strategy]] = {tier: (speedup, "search") for tier, speedup in frontier.tiers.items()}
    target = frontier.tiers[frontier.control_tier]
    lean |= {control_name(frontier, control): (target, control) for control in family.controls}
    for name, (speedup, strategy) in lean.items():
        if not missing(name):
            continue
        reduced = directory / f"{name}-reduced"
        if missing(reduced.name):
            yield Stage(reduced.name, partial(_reduce, family, inputs, directory / TEACHER, reduced, speedup, strategy))
        yield Stage(name, partial(teaching.imitate, name, reduced))
        shutil.rmtree(reduced)  # half of a family's bytes, and nothing reads it again


def better_dense(task: Task, directory: Path) -> str:
    """Return the better dense run on the hold-out, the teacher or the distilled model, which wins a tie."""
    scores = {name: read_predictions(directory / name, HOLDOUT).score(task.headline) for name in (DENSE, TEACHER)}
    return max(scores, key=lambda name: scores[name])


class _Teaching:
    """The trainings of a family; the outputs of its teacher are computed once."""

    def __init__(self, family: FamilySettings, inputs: FamilyInputs, directory: Path) -> None:
        self._family, self._inputs, self._directory = family, inputs, directory
        self._teacher: Teacher | None = None

    def imitate(self, name: str, source: Path, watch: Watch) -> None:
        if self._teacher is None:
            model = open_tuned(self._directory / TEACHER, self._inputs.task.name)
            layers = range(len(model.transformer.layers))
            self._teacher = Teacher(model, self._inputs.data.train, layers, self._family.frontier.precision)
        self.tune(name, source, self._family.frontier.imitating(self._family.own), self._teacher, watch)

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
            observer=watch,
        )


def _reduce(
    family: FamilySettings,
    inputs: FamilyInputs,
    teacher: Path,
    reduced: Path,
    speedup: float,
    strategy: Strategy,
    watch: Watch,
) -> None:
    # The time of a layer does not depend on the task, so that one table serves all families.
    shared = reduced.parent.parent / _LATENCIES
    own = reduced.parent / f".{teacher.name}.reduction" / _LATENCIES
    if shared.exists() and not own.exists():
        own.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(shared, own)
    report = reduce_run(
        teacher,
        inputs.data_dir,
        reduced,
        speedup,
        tokens=family.frontier.tokens,
        examples=family.own.calibration,
        strategy=strategy,
        seed=family.seed,
        on_shape=lambda done, shapes: watch.on_part("shapes timed", done, shapes),
        on_progress=lambda progress: watch.on_part(progress.stage, progress.done, progress.layers),
    )
    write_whole(reduced.with_suffix(".json"), msgspec.json.format(msgspec.json.encode(report), indent=1))
