"""Settings of the frontier: the committed ones, and what a family's results depend on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from edge.errors import Raw, UsageError
from export.finetune import AVERAGED, DATA
from export.finetune.recipe import Distillation, Recipe
from export.finetune.text_tasks import TASKS, read
from export.papers.experiment import digest
from export.reduce.strategy import Strategy
from export.training.provenance import versions
from export.training.recipe import Precision

#: The committed settings, frozen before any of the published runs saw dev.
FROZEN = Path(__file__).with_name("settings.json")
DENSE, TEACHER = "dense", "teacher"
#: A dense model that is distilled as long as the reduced ones, and by their recipe.
DENSE_AS_REDUCED = "dense-as-reduced"
#: The dense runs. The baseline is the best of them on the hold-out, of equals the first.
DENSE_RUNS = (DENSE, DENSE_AS_REDUCED, TEACHER)

_Positive: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]
_Rate: TypeAlias = Annotated[float, msgspec.Meta(gt=0)]


class TaskSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Training of one task, the same for all its runs.

    Attributes:
        seeds: families of the task.
        teacher_epochs: of the teacher, which all others imitate.
        peak_learning_rate: of the teacher and the first distilled dense model.
        epochs: of that dense model, which starts from the teacher.
        reduced_epochs: of each reduced model, tiers and controls, and of a second distilled dense model.
        controls: strategies beside the search, and how many families have each, the first ones.
        calibration: examples for the reduction.
        limit: most training examples; None is all.
    """

    seeds: _Positive
    teacher_epochs: _Positive
    peak_learning_rate: _Rate
    epochs: _Positive
    reduced_epochs: _Positive
    controls: dict[Strategy, int]
    calibration: _Positive
    limit: _Positive | None = None


class FrontierSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of all families.

    Attributes:
        dropout: of the teacher's training.
        precision: of all trainings; ``--precision`` sets it.
        tokens: the length of the input that reductions plan for.
        tiers: target speed-ups at that length; at the lengths of dev, leaner tiers are faster.
        control_tier: the tier whose speed the controls share.
        reduced_learning_rate: the peak, for reduced models and the second distilled dense model.
        distillation: of the same; the first distilled dense model has the defaults.
    """

    tasks: Annotated[dict[str, TaskSettings], msgspec.Meta(min_length=1)]
    dropout: Annotated[float, msgspec.Meta(ge=0, lt=1)]
    max_length: _Positive
    tokens: _Positive
    tiers: dict[str, Annotated[float, msgspec.Meta(gt=1)]]
    control_tier: str
    reduced_learning_rate: _Rate
    distillation: Distillation
    precision: Precision = "fp32"

    def teaching(self, task: TaskSettings) -> Recipe:
        """Return the recipe of the teacher."""
        return Recipe(
            epochs=task.teacher_epochs,
            peak_learning_rate=task.peak_learning_rate,
            precision=self.precision,
            dropout=self.dropout,
        )

    def imitating(self, task: TaskSettings) -> Recipe:
        """Return the recipe of the first distilled dense model."""
        return Recipe(
            epochs=task.epochs,
            peak_learning_rate=task.peak_learning_rate,
            precision=self.precision,
            frozen_embeddings=True,
        )

    def restoring(self, task: TaskSettings) -> Recipe:
        """Return the recipe of reduced models, and of the second distilled dense model."""
        return Recipe(
            epochs=task.reduced_epochs,
            peak_learning_rate=self.reduced_learning_rate,
            precision=self.precision,
            distillation=self.distillation,
        )


class FamilySettings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings that the results of a family depend on; other settings need another directory.

    Attributes:
        frontier: of all families, with this task alone.
        model: SHA-256 of the Hugging Face directory.
        data: SHA-256 of the task's files.
        versions: of the packages that train and convert.
        device: of the trainings, ``cpu`` or ``cuda``.
    """

    task: str
    seed: int
    controls: tuple[Strategy, ...]
    frontier: FrontierSettings
    model: str
    data: str
    versions: dict[str, str]
    device: Literal["cpu", "cuda"] = "cpu"

    @property
    def own(self) -> TaskSettings:
        """The settings of the task."""
        return self.frontier.tasks[self.task]

    @property
    def counts(self) -> tuple[str, ...]:
        """How the names of settings begin that only say how many families there are."""
        return tuple(f"frontier.tasks.{self.task}.{name}" for name in ("seeds", "controls"))

    @property
    def runs(self) -> tuple[str, ...]:
        """The measured runs, by the names of their directories: dense, tiers, controls."""
        return (DENSE, *self.frontier.tiers, *(control_name(self.frontier, one) for one in self.controls))


def control_name(frontier: FrontierSettings, strategy: Strategy) -> str:
    """Return the name of a control's run."""
    return f"{frontier.control_tier}-{strategy}"


def read_settings(path: Path, changes: Mapping[str, Any], tasks: Sequence[str] = ()) -> FrontierSettings:
    """Read the settings of a frontier.

    Args:
        changes: fields of every task to replace.
        tasks: those to keep; empty for all.

    Returns:
        The settings, with the tasks in the order of :data:`export.finetune.AVERAGED`.

    Raises:
        UsageError: the file is malformed, lacks a task, or has settings that contradict each other.
    """
    subject, fix = f"--settings {path}", f"Compare it with {FROZEN.name} in the package, or leave the option out."
    try:
        found = msgspec.json.decode(path.read_bytes(), type=FrontierSettings)
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(subject, given=Raw(error), expected="settings", fix=fix) from None
    if not set(tasks) <= set(found.tasks) <= set(AVERAGED):
        given, wanted = Raw(f"tasks {', '.join(found.tasks)}"), f", with {', '.join(tasks)}" if tasks else ""
        raise UsageError(subject, given=given, expected=f"tasks out of {', '.join(AVERAGED)}{wanted}", fix=fix)
    if found.control_tier not in found.tiers:
        given, expected = Raw(f"controls at {found.control_tier}"), f"one of {', '.join(found.tiers)}"
        raise UsageError(subject, given=given, expected=expected, fix=fix)
    for name, used, taken in (
        ("tiers", found.tiers, DENSE_RUNS),
        ("controls", [one for task in found.tasks.values() for one in task.controls], ("search",)),
    ):
        if both := sorted({*used} & {*taken}):
            given, expected = Raw(f"{name} {', '.join(both)}"), f"{name} other than {', '.join(taken)}"
            raise UsageError(subject, given=given, expected=expected, fix=fix)
    kept = [task for task in AVERAGED if task in (tasks or found.tasks)]
    changed = {task: msgspec.structs.replace(found.tasks[task], **changes) for task in kept}
    return msgspec.structs.replace(found, tasks=changed)


def families_of(
    frontier: FrontierSettings, model: Path, data_dir: Path, device: Literal["cpu", "cuda"] = "cpu"
) -> list[FamilySettings]:
    """Return the settings of every family, seed by seed; the data of all tasks are read and checked."""
    start, found = digest(model, "*.json", "*.safetensors"), []
    for task, settings in frontier.tasks.items():
        for split in ("train", *TASKS[task].dev):
            read(TASKS[task], data_dir, split)
        data = digest(data_dir / DATA[task].directory, "train.tsv", "dev.tsv")
        found += [
            FamilySettings(
                task=task,
                seed=seed,
                controls=tuple(control for control, seeds in settings.controls.items() if seed < seeds),
                frontier=msgspec.structs.replace(frontier, tasks={task: settings}),
                model=start,
                data=data,
                versions=versions(),
                device=device,
            )
            for seed in range(settings.seeds)
        ]
    return sorted(found, key=lambda family: family.seed)
