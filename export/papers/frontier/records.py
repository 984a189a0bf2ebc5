"""Settings of the frontier, and records of a family: its predictions on dev, and the times of its files."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np

from edge.datatypes import Array
from edge.errors import Raw, UsageError
from edge.files import sha256
from export.errors import CheckpointError
from export.finetune import AVERAGED, DATA
from export.finetune.models import OpenedModel, open_model, space_of
from export.finetune.recipe import Distillation, FinetuningRecipe
from export.finetune.text_tasks import TASKS
from export.models.transformer import LayerShape
from export.papers.experiment import digest
from export.training.points import Planned
from export.training.provenance import Processor, versions
from export.training.recipe import Precision
from export.training.runs import SPLIT, SplitVersion

#: Precisions: of ONNX Runtime, and of the file for TensorRT, which is not timed.
FP32, INT8, STATIC = "fp32", "int8", "static-int8"
#: A run and a precision.
Key: TypeAlias = "tuple[str, str]"
#: The committed settings, frozen before any of the published runs saw dev.
FROZEN = Path(__file__).with_name("settings.json")
DENSE, TEACHER = "dense", "teacher"
#: The directory of a family's ONNX files, beside its runs.
ONNX_FILES = "onnx"
#: Files of an encoder.
_MODEL = ("*.json", "*.safetensors")
#: The dense runs. The baseline is the best of them on the hold-out, of equals the first.
DENSE_RUNS = (DENSE, TEACHER)


class TaskSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Training of one task, the same for all its runs.

    Attributes:
        seeds: families of the task.
        teacher_epochs, peak_learning_rate: of the teacher, which all others imitate.
        epochs: of the others.
        limit: most training examples; None is all.
    """

    seeds: int
    teacher_epochs: int
    peak_learning_rate: float
    epochs: int
    limit: int | None = None


class FrontierSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of all families.

    Attributes:
        dropout: of the teacher's training.
        learning_rate, average, distillation: of tiers, control and distilled dense model, as a recipe has them.
        transfer_texts: how many are drawn from the file of unlabelled text.
        control_seeds: families of each task that have the control, the first ones.
        precision: of all trainings; ``--precision`` sets it.
    """

    tasks: dict[str, TaskSettings]
    dropout: float
    max_length: int
    learning_rate: float
    average: float | None
    distillation: Distillation
    transfer_texts: int
    control_seeds: int
    precision: Precision = "fp32"

    def teaching(self, task: TaskSettings) -> FinetuningRecipe:
        """Return the recipe of the teacher."""
        return self._recipe(task.teacher_epochs, task.peak_learning_rate, dropout=self.dropout)

    def imitating(self, task: TaskSettings) -> FinetuningRecipe:
        """Return the recipe of all others."""
        return self._recipe(task.epochs, self.learning_rate, average=self.average, distillation=self.distillation)

    def _recipe(self, epochs: int, rate: float, **options: Any) -> FinetuningRecipe:
        return FinetuningRecipe(epochs=epochs, peak_learning_rate=rate, precision=self.precision, **options)


class Tier(msgspec.Struct, frozen=True):
    """A restored encoder: SHA-256 of its run, and what it was planned for."""

    digest: str
    planned: Planned


class ExperimentSettings(msgspec.Struct, frozen=True, kw_only=True):
    """All that the records depend on, with SHA-256 of the dense encoder, the text and the files of each task.

    Attributes:
        tiers: by name, in the order of the command.
        control: the tier whose layers the control has, too, as they are in the dense encoder.
        split: how the hold-outs are drawn.
    """

    frontier: FrontierSettings
    model: str
    tiers: dict[str, Tier]
    control: str
    transfer: str
    data: dict[str, str]
    versions: dict[str, str]
    device: Literal["cpu", "cuda"] = "cpu"
    split: SplitVersion = 1

    @property
    def control_run(self) -> str:
        """The name of the control's run."""
        return f"{self.control}-not-restored"

    @property
    def cut_run(self) -> str:
        """The name of the control's run before its training."""
        return f"{self.control_run}-cut"


class Sources(NamedTuple):
    """Where everything comes from: the dense encoder, the restored ones by name, unlabelled text, and the data."""

    model: Path
    tiers: Mapping[str, Path]
    transfer: Path
    data_dir: Path


class Family(NamedTuple):
    """The runs of one task and seed, which are trained with the same data and teacher."""

    settings: ExperimentSettings
    task: str
    seed: int

    @property
    def name(self) -> str:
        """Name of its directory, and of its record."""
        return f"{self.task}-seed{self.seed}"

    @property
    def of_task(self) -> TaskSettings:
        """The settings of the task."""
        return self.settings.frontier.tasks[self.task]

    @property
    def controls(self) -> tuple[str, ...]:
        """The control, which only the first families have."""
        return (self.settings.control_run,) if self.seed < self.settings.frontier.control_seeds else ()

    @property
    def runs(self) -> tuple[str, ...]:
        """The measured runs, by the names of their directories: dense, tiers, control."""
        return (DENSE, *self.settings.tiers, *self.controls)


def frozen(changes: Mapping[str, Any], tasks: Sequence[str] = ()) -> FrontierSettings:
    """Return the committed settings with some fields of every task replaced, of these tasks or all, in their order."""
    settings = msgspec.json.decode(FROZEN.read_bytes(), type=FrontierSettings)
    kept = [task for task in AVERAGED if task in (tasks or settings.tasks)]
    return msgspec.structs.replace(
        settings, tasks={task: msgspec.structs.replace(settings.tasks[task], **changes) for task in kept}
    )


def settings_of(
    frontier: FrontierSettings, sources: Sources, control: str | None = None, device: Literal["cpu", "cuda"] = "cpu"
) -> ExperimentSettings:
    """Return the settings of an experiment; tiers and the data of all tasks are read and checked.

    Args:
        control: name of a tier; None is the second one, or the only one.

    Raises:
        UsageError: a tier was not restored from the dense encoder, or has the name of another run; tiers are planned
            for several devices; or the control is none of them.
    """
    for task in frontier.tasks:
        for split in ("train", *TASKS[task].dev):
            TASKS[task].read(sources.data_dir, split)
    names = list(sources.tiers)
    control = control or names[:2][-1]
    if control not in names:
        expected = f"one of {', '.join(names)}"
        raise UsageError("--control", given=control, expected=expected, fix="Name a directory of --tier.")
    dense = open_model(sources.model)
    tiers = {name: Tier(digest(run, *_MODEL), _planned(run, dense)) for name, run in sources.tiers.items()}
    devices = sorted({f"{tier.planned.device} ({tier.planned.label})" for tier in tiers.values()})
    if len(devices) > 1:
        fix = "Give runs of one family, or reduce again with the same --for."
        raise UsageError("--tier", given=Raw(f"plans for {' and '.join(devices)}"), expected="one device", fix=fix)
    settings = ExperimentSettings(
        frontier=frontier,
        model=digest(sources.model, *_MODEL),
        tiers=tiers,
        control=control,
        transfer=sha256(sources.transfer.read_bytes()),
        data={task: digest(sources.data_dir / DATA[task].directory, "train.tsv", "dev.tsv") for task in frontier.tasks},
        versions=versions(),
        device=device,
        split=SPLIT,
    )
    taken = {DENSE, TEACHER, ONNX_FILES, settings.control_run, settings.cut_run}
    if reserved := sorted(taken & tiers.keys()):
        expected = f"none of {', '.join(sorted(taken))}, which are names of other runs"
        raise UsageError("--tier", given=reserved[0], expected=expected, fix="Rename its directory, which names it.")
    return settings


def _planned(run: Path, dense: OpenedModel) -> Planned:
    """Return what a tier was planned for; raise a UsageError unless it was restored from the dense encoder.

    A restoration leaves the embeddings as they are, and records the precision of its multiplications.
    """
    subject, fix = f"--tier {run}", "Give a run that 'fewheads reduce MODEL --distil TEXTS' has made."
    tier = open_model(run)
    if tier.config is None or tier.config.planned is None or tier.config.precision is None:
        given = Raw("an encoder that was not restored")
        raise UsageError(subject, given=given, expected="one that was reduced and restored on text", fix=fix)
    both = (one.transformer.embeddings.state_dict() for one in (dense, tier))
    (ours, theirs), spaces = both, {space for one in (dense, tier) if (space := space_of(one))}
    same = ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in ours)
    planned = tier.config.planned
    if not same or len(spaces) > 1 or planned.original_layers != len(dense.transformer.config.layers):
        given = Raw("one that was restored from another encoder")
        raise UsageError(subject, given=given, expected="one that was restored from --model", fix=fix)
    return planned


class Answered(msgspec.Struct, frozen=True, kw_only=True):
    """The trained runs of a family, and what their files answer to every item of dev.

    Attributes:
        dense: the run that is the dense baseline, the best one on the hold-out.
        holdout: the headline metric of each run, and of every dense one, on the hold-out.
        items, mean_tokens: of dev; the mean of an item.
        dim: d, the width of a token.
        file_bytes: of each file, by ``run/precision``.
        processor, gpu: that computed the answers, and trained; the processor did where there is no GPU.
        answers: classes or scores by ``run/precision``, and the targets, as an ``.npz`` file.
    """

    task: str
    seed: int
    dense: str
    holdout: dict[str, float]
    holdout_items: int
    items: int
    mean_tokens: float
    dim: int
    layers: dict[str, tuple[LayerShape, ...]]
    file_bytes: dict[str, int]
    processor: Processor
    gpu: str | None = None
    answers: bytes


class Timed(msgspec.Struct, frozen=True):
    """Times of the files for ONNX Runtime, by ``run/precision``.

    Attributes:
        speedups: the dense FP32 model's time over each file's, for one item: the median over items.
        fixed_speedups: the same for inputs of :data:`export.papers.frontier.family.FIXED_TOKENS` tokens.
        median_ms: of an item of dev.
        items: of dev that were timed.
    """

    speedups: dict[str, float]
    fixed_speedups: dict[str, float]
    median_ms: dict[str, float]
    items: int
    processor: Processor


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one part has computed."""

    answered: Answered | None = None
    timed: Timed | None = None


class Measured(NamedTuple):
    """Both records of a family, with its answers [n] by key and the targets [n]."""

    answered: Answered
    timed: Timed
    answers: Mapping[Key, Array]
    targets: Array


def encoded(answers: Mapping[Key, Array], targets: Array) -> bytes:
    """Return answers as a record has them: classes as INT8, scores as FP32."""
    buffer, arrays = io.BytesIO(), {"/".join(key): values for key, values in answers.items()} | {"targets": targets}
    small = {
        name: array.astype(np.int8 if np.array_equal(array.astype(np.int8), array) else np.float32)
        for name, array in arrays.items()
    }
    np.savez_compressed(buffer, **small)  # type: ignore[arg-type]
    return buffer.getvalue()


def measured(answered: Answered, timed: Timed) -> Measured:
    """Return the records of a family with its answers decoded.

    Raises:
        CheckpointError: the answers are malformed, or a file has no times.
    """
    subject, fix = f"records of {answered.task}-seed{answered.seed}", "Delete its lines, and give the same command."
    try:
        with np.load(io.BytesIO(answered.answers), allow_pickle=False) as arrays:
            found = {name: array.astype(np.float64) for name, array in arrays.items()}
        targets = found.pop("targets")
        answers = {key_of(name): values for name, values in found.items()}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise CheckpointError(subject, given=Raw(error), expected="answers of a family", fix=fix) from None
    files = {"/".join(key) for key in answers if key[1] in (FP32, INT8)}
    if untimed := files - (timed.speedups.keys() & timed.fixed_speedups.keys()):
        given = Raw(f"no times of {min(untimed)}")
        raise CheckpointError(subject, given=given, expected="times of every file", fix=fix)
    return Measured(answered, timed, answers, targets)


def key_of(name: str) -> Key:
    """Return the key of a name ``run/precision``."""
    run, precision = name.split("/")
    return run, precision
