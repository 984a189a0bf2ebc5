"""Settings of the frontier, and records of a family: its predictions on dev, and the times of its files."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import msgspec
import numpy as np

from edge.datatypes import Array
from edge.errors import Raw
from export.errors import CheckpointError
from export.finetune import AVERAGED, DATA
from export.finetune.recipe import Distillation, Recipe
from export.finetune.text_tasks import TASKS
from export.models.transformer import LayerShape
from export.papers.experiment import digest
from export.reduce.target import Strategy
from export.training.provenance import Processor, versions
from export.training.recipe import Precision
from export.training.runs import SPLIT, SplitVersion

#: Precisions: of ONNX Runtime, and of the file for TensorRT, which is not timed.
FP32, INT8, STATIC = "fp32", "int8", "static-int8"
#: FP32 of a reduced model before its distillation, by PyTorch. Its file would be as fast as that of FP32.
REDUCED = "fp32-reduced"
#: A run and a precision.
Key: TypeAlias = "tuple[str, str]"
#: The committed settings, frozen before any of the published runs saw dev.
FROZEN = Path(__file__).with_name("settings.json")
DENSE, TEACHER = "dense", "teacher"
#: A dense model that is distilled as long as the reduced ones, and by their recipe.
DENSE_AS_REDUCED = "dense-as-reduced"
#: The dense runs. The baseline is the best of them on the hold-out, of equals the first.
DENSE_RUNS = (DENSE, DENSE_AS_REDUCED, TEACHER)


class TaskSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Training of one task, the same for all its runs.

    Attributes:
        seeds: families of the task.
        teacher_epochs: of the teacher, which all others imitate.
        peak_learning_rate: of the teacher and the first distilled dense model.
        epochs: of that dense model, which starts from the teacher.
        reduced_epochs: of each reduced model, tiers and controls, and of a second distilled dense model.
        controls: strategies beside the search, and how many families have each, the first ones. The published families
            have one shape for all layers, too, ``uniform``, which a training today leaves out.
        calibration: examples for the reduction.
        limit: most training examples; None is all.
    """

    seeds: int
    teacher_epochs: int
    peak_learning_rate: float
    epochs: int
    reduced_epochs: int
    controls: dict[str, int]
    calibration: int
    limit: int | None = None


class FrontierSettings(msgspec.Struct, frozen=True, kw_only=True):
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

    tasks: dict[str, TaskSettings]
    dropout: float
    max_length: int
    tokens: int
    tiers: dict[str, float]
    control_tier: str
    reduced_learning_rate: float
    distillation: Distillation
    precision: Precision = "fp32"

    def teaching(self, task: TaskSettings) -> Recipe:
        """Return the recipe of the teacher."""
        return self._recipe(task.teacher_epochs, task.peak_learning_rate, dropout=self.dropout)

    def imitating(self, task: TaskSettings) -> Recipe:
        """Return the recipe of the first distilled dense model."""
        return self._recipe(task.epochs, task.peak_learning_rate, frozen_embeddings=True)

    def restoring(self, task: TaskSettings) -> Recipe:
        """Return the recipe of reduced models, and of the second distilled dense model."""
        return self._recipe(task.reduced_epochs, self.reduced_learning_rate, distillation=self.distillation)

    def _recipe(self, epochs: int, rate: float, **options: Any) -> Recipe:
        return Recipe(epochs=epochs, peak_learning_rate=rate, precision=self.precision, **options)


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All that the records depend on, with SHA-256 of the Hugging Face directory and of the files of each task.

    Attributes:
        split: how the hold-outs are drawn.
    """

    frontier: FrontierSettings
    model: str
    data: dict[str, str]
    versions: dict[str, str]
    device: Literal["cpu", "cuda"] = "cpu"
    split: SplitVersion = 1


class Family(NamedTuple):
    """The runs of one task and seed, which are trained with the same data and teacher."""

    frontier: FrontierSettings
    task: str
    seed: int
    device: Literal["cpu", "cuda"]

    @property
    def name(self) -> str:
        """Name of its directory, and of its record."""
        return f"{self.task}-seed{self.seed}"

    @property
    def of_task(self) -> TaskSettings:
        """The settings of the task."""
        return self.frontier.tasks[self.task]

    @property
    def controls(self) -> tuple[Strategy, ...]:
        """The strategies beside the search, of which some have fewer seeds."""
        controls = self.of_task.controls
        return tuple(one for one in get_args(Strategy) if self.seed < controls.get(one, 0))

    @property
    def runs(self) -> tuple[str, ...]:
        """The measured runs, by the names of their directories: dense, tiers, controls."""
        return (DENSE, *self.frontier.tiers, *(control_name(self.frontier, one) for one in self.controls))


def control_name(frontier: FrontierSettings, strategy: Strategy) -> str:
    """Return the name of a control's run."""
    return f"{frontier.control_tier}-{strategy}"


def frozen(changes: Mapping[str, Any], tasks: Sequence[str] = ()) -> FrontierSettings:
    """Return the committed settings with some fields of every task replaced, of these tasks or all, in their order."""
    settings = msgspec.json.decode(FROZEN.read_bytes(), type=FrontierSettings)
    kept = [task for task in AVERAGED if task in (tasks or settings.tasks)]
    return msgspec.structs.replace(
        settings, tasks={task: msgspec.structs.replace(settings.tasks[task], **changes) for task in kept}
    )


def settings_of(
    frontier: FrontierSettings, model: Path, data_dir: Path, device: Literal["cpu", "cuda"] = "cpu"
) -> Settings:
    """Return the settings of an experiment; the data of all tasks are read and checked."""
    for task in frontier.tasks:
        for split in ("train", *TASKS[task].dev):
            TASKS[task].read(data_dir, split)
    return Settings(
        frontier=frontier,
        model=digest(model, "*.json", "*.safetensors"),
        data={task: digest(data_dir / DATA[task].directory, "train.tsv", "dev.tsv") for task in frontier.tasks},
        versions=versions(),
        device=device,
        split=SPLIT,
    )


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
