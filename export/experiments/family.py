"""A family of runs on one task and seed: a teacher, a dense model, and leaner tiers distilled from the teacher.

All have the same total of epochs: the teacher's, then the same number of distillation for each tier and the dense
model. The dense baseline is the better of teacher and distilled dense model on the hold-out.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from edge.files import write_whole
from export.experiments.settings import digest, machine
from export.reduction.run import reduce_run
from export.runs import WEIGHTS
from export.tasks import DATA
from export.tasks.glue import TASKS, read
from export.tasks.recipe import Recipe
from export.tasks.run import finetune_run, prepare
from export.tasks.task import Data, Reader, Task
from export.tasks.tokens import load_tokenizer
from export.training.recipe import Precision
from export.training.watch import Watch

TEACHER, DENSE = "teacher", "dense"
#: Target speed-ups at one length. At the lengths of dev, leaner tiers are faster: 4.2 gave 4.6.
TIERS = {"half": 2.03, "third": 2.95, "quarter": 3.75}
_LATENCIES = "latency.json"


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """Epochs and examples of a task's training.

    Attributes:
        calibration: examples for the reduction: some thousand tokens.
    """

    teacher_epochs: int
    epochs: int
    calibration: int
    limit: int | None = None


#: Of the five tasks in the headline.
BUDGETS = {
    "SST-2": Budget(teacher_epochs=1, epochs=1, calibration=256, limit=24_000),
    "CoLA": Budget(teacher_epochs=3, epochs=6, calibration=256),
    "STS-B": Budget(teacher_epochs=2, epochs=3, calibration=128),
    "MRPC": Budget(teacher_epochs=3, epochs=3, calibration=96),
    "RTE": Budget(teacher_epochs=4, epochs=3, calibration=64),
}


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that all runs of an experiment share; the rates were chosen on SST-2's and RTE's hold-outs."""

    peak_learning_rate: float = 1e-4
    precision: Precision = "bf16"
    max_length: int = 128
    tokens: int = 32


class FamilySettings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings that the results of a family depend on; other settings need another directory.

    Attributes:
        model: SHA-256 of the Hugging Face directory.
        data: SHA-256 of the task's files.
        machine: from :func:`export.experiments.settings.machine`.
    """

    task: str
    seed: int
    budget: Budget
    settings: Settings
    model: str
    data: str
    machine: dict[str, str]


class FamilyInputs(NamedTuple):
    """Inputs of all families of a task: the initial model, and the data in its tokens."""

    task: Task
    model: Path
    reader: Reader
    data_dir: Path
    data: Data


def settings_of(
    tasks: Sequence[str],
    seeds: Iterable[int],
    model: Path,
    data_dir: Path,
    settings: Settings,
    changes: Mapping[str, int],
) -> list[FamilySettings]:
    """Return the settings of every family, seed by seed; the data of all tasks are read and checked.

    Args:
        changes: fields of every task's budget to replace.
    """
    start, digests = digest(model, "*.json", "*.safetensors"), {}
    for task in tasks:
        for split in ("train", *TASKS[task].dev):
            read(TASKS[task], data_dir, split)
        digests[task] = digest(data_dir / DATA[task].directory, "train.tsv", "dev.tsv")
    return [
        FamilySettings(
            task=task,
            seed=seed,
            budget=msgspec.structs.replace(BUDGETS[task], **changes),
            settings=settings,
            model=start,
            data=digests[task],
            machine=machine(),
        )
        for seed in seeds
        for task in tasks
    ]


def family_inputs(task: Task, model: Path, data_dir: Path, *, budget: Budget, settings: Settings) -> FamilyInputs:
    """Read the inputs of a task's families."""
    reader = load_tokenizer(model)
    data = prepare(task, data_dir, reader, max_length=settings.max_length, limit=budget.limit)
    return FamilyInputs(task, model, reader, data_dir, data)


class Stage(NamedTuple):
    """A missing run of a family: its name, and the function that makes it."""

    name: str
    make: Callable[[Watch], object]


def stages(inputs: FamilyInputs, directory: Path, *, seed: int, budget: Budget, settings: Settings) -> Iterator[Stage]:
    """Yield the missing runs of a family, in order; each must be made before the next is taken.

    A finished run is left out, and an unfinished one resumes.
    """

    def tune(name: str, source: Path, epochs: int, teacher: Path | None, watch: Watch) -> None:
        rate, precision = settings.peak_learning_rate, settings.precision
        finetune_run(
            inputs.task,
            source,
            inputs.data,
            inputs.reader,
            directory / name,
            Recipe(epochs=epochs, peak_learning_rate=rate, precision=precision),
            seed=seed,
            max_length=settings.max_length,
            data_dir=inputs.data_dir,
            teacher=teacher,
            observer=watch,
        )

    teacher = directory / TEACHER
    wanted = [
        Stage(TEACHER, partial(tune, TEACHER, inputs.model, budget.teacher_epochs, None)),
        Stage(DENSE, partial(tune, DENSE, teacher, budget.epochs, teacher)),
    ]
    for tier, speedup in TIERS.items():
        reduced = directory / f"{tier}-reduced"
        wanted.append(
            Stage(
                reduced.name, partial(_reduce, teacher, inputs.data_dir, reduced, speedup, budget.calibration, settings)
            )
        )
        wanted.append(Stage(tier, partial(tune, tier, reduced, budget.epochs, teacher)))
    yield from (stage for stage in wanted if not (directory / stage.name / WEIGHTS).exists())


def family_directory(out: Path, task: str, seed: int) -> Path:
    """Return the directory of a family's runs."""
    return out / f"{task}-seed{seed}"


def _reduce(
    teacher: Path, data_dir: Path, reduced: Path, speedup: float, examples: int, settings: Settings, watch: Watch
) -> None:
    # The time of a layer does not depend on the task, so that one table serves all families.
    shared = reduced.parent.parent / _LATENCIES
    own = reduced.parent / f".{teacher.name}.reduction" / _LATENCIES
    if shared.exists() and not own.exists():
        own.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(shared, own)
    report = reduce_run(
        teacher,
        data_dir,
        reduced,
        speedup,
        tokens=settings.tokens,
        examples=examples,
        on_shape=lambda done, shapes: watch.on_part("shapes timed", done, shapes),
        on_progress=lambda progress: watch.on_part(progress.stage, progress.done, progress.layers),
    )
    write_whole(reduced.with_suffix(".json"), msgspec.json.format(msgspec.json.encode(report), indent=1))
    shutil.copyfile(own, shared)
