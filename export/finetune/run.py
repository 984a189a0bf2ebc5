"""One fine-tuning run, from a model and a data directory to a run directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from edge.bundles.manifest import Provenance
from edge.errors import Raw, UsageError
from export.data.examples import HOLDOUT
from export.errors import DataError
from export.finetune import IMPORTED, data_directory, text_tasks
from export.finetune.image_tasks import DIGITS, IMAGENET, MNIST
from export.finetune.imported import ImportedTask
from export.finetune.models import (
    MODEL,
    Architecture,
    OpenedModel,
    Source,
    open_or_new,
    open_tuned,
    space_of,
    with_head,
)
from export.finetune.objectives import TaskObjective, Teacher
from export.finetune.own_texts import own_task
from export.finetune.predictions import Predicted, encode_predictions
from export.finetune.questions import SQUAD
from export.finetune.recipe import FinetuningRecipe
from export.finetune.task import Data, Reader, Task
from export.finetune.text_tasks import SentenceTask
from export.finetune.transfer import TransferObjective
from export.models.heads import Head
from export.models.transformer import TransformerConfig
from export.training.checkpoint import save
from export.training.device import DeviceName, device_of
from export.training.log import RunFiles
from export.training.objective import SILENT, Observer
from export.training.points import Planned
from export.training.provenance import processor, provenance
from export.training.recipe import Precision
from export.training.runs import (
    PREDICTIONS,
    TOKENIZER,
    RunConfig,
    RunMetrics,
    Speedup,
    SplitVersion,
    read_config,
    recorded,
)
from export.training.trainer import Trained, train

#: Fewest items of a split that a model is measured on: a share of fewer is hardly known better than a guess.
LEAST_MEASURED = 4


def prepare(
    task: Task, data_dir: str | Path, reader: Reader, *, max_length: int, limit: int | None, **options: Any
) -> Data:
    """Read a task's data for a model, once for all seeds.

    Args:
        data_dir: in the layout of :mod:`export.finetune`.
        max_length: tokens of a row; ignored for images.
        limit: most examples to train on; None is all. The hold-out is the same for every limit.
        options: of :meth:`export.finetune.imported.ImportedTask.prepare`.

    Raises:
        DataError: a file is missing or malformed, or there is too little for a training set, a hold-out or dev.
        UsageError: the task cannot be read in rows of this length, or the model reads other images.
    """
    data = task.prepare(data_dir, reader, max_length=max_length, limit=limit, **options)
    for name, rows in {"training set": data.train, **data.measured}.items():
        least = 1 if rows is data.train else LEAST_MEASURED
        if len(rows.targets) < least:
            expected = f"{least} or more examples"
            fix = "Give more that differ; without a dev of its own, a training set needs about 40."
            raise DataError(f"{task.name} {name}", given=len(rows.targets), expected=expected, fix=fix)
    return data


def finetune_run(
    task: Task,
    source: Source,
    data: Data,
    reader: Reader,
    directory: str | Path,
    recipe: FinetuningRecipe,
    *,
    seed: int,
    max_length: int,
    data_dir: str | Path | None = None,
    teacher: str | Path | Teacher | None = None,
    transfer_teacher: Teacher | None = None,
    device: DeviceName = "cpu",
    tensorboard: Path | None = None,
    final: bool = False,
    observer: Observer = SILENT,
) -> RunMetrics:
    """Fine-tune a model, measure it on the hold-out, and write its run directory.

    The state of an unfinished run is kept beside it as ``.NAME.state``; the same call resumes from it.

    Args:
        source: a Hugging Face directory; a run, which keeps its head if it is on the same task; or a new model's shape.
        directory: path of the new run; an earlier run there is replaced when this one is done.
        seed: of new weights and of the order of the examples.
        data_dir: recorded in the run, so that later commands find the data.
        teacher: a run on the same task, for distillation; or its outputs on the same data, for several students.
        transfer_teacher: its outputs on the unlabelled text; None computes those of each batch.
        tensorboard: a directory for TensorBoard's events.
        final: whether dev is measured, too, after the choices for which the hold-out is there.

    Raises:
        UsageError: there is no such device, a row is too long for the model, or the teacher is of another task, reads
            other inputs, or has another width, while its hidden states are imitated.
    """
    place = device_of(device)
    found = open_or_new(source, seed)
    config, planned = found.transformer.config, found.config.planned if found.config else None
    _check_lengths(data, config)
    # A server cuts texts there, also those that are longer than all in the data.
    architecture = task.architecture(config, data.labels, min(max_length, config.max_positions))
    model = with_head(found, architecture, seed).to(place)
    model.transformer.set_dropout(recipe.dropout)
    model.transformer.embeddings.requires_grad_(not recipe.frozen_embeddings)
    files = RunFiles(Path(directory), tensorboard)
    extra: dict[str, Any] = {}
    if data.transfer is not None:
        extra = {"transfer": data.transfer, "transfer_teacher": transfer_teacher}
    objective = (TransferObjective if extra else TaskObjective)(
        model,
        data.train,
        recipe,
        seed=seed,
        evaluate=lambda: task.predict(model, data.holdout).score(task.headline),
        metric=task.headline,
        teacher=_teacher(task, teacher, model, data.labels).to(place) if isinstance(teacher, (str, Path)) else teacher,
        planned=planned,
        **extra,
    )
    tuned = train(objective, recipe, seed=seed, state=files.state, log=files.log, observer=observer)
    predictions = predict_splits(task, model, data, final=final)
    start = "random weights" if isinstance(source, TransformerConfig) else Path(source).name
    metrics = save_run(
        task,
        directory,
        model.cpu(),
        architecture,
        reader,
        predictions,
        record=provenance(
            trainer=f"fine-tuned from {start}, {len(data.train.targets)} examples, {recipe}",
            data=" and ".join(filter(None, (task.origin, data.transfer_origin))),
            seed=seed,
        ),
        tuned=tuned,
        data_dir=data_dir,
        speedup=found.config.speedup if found.config else None,  # training leaves the shape as it is
        planned=planned,
        precision=recipe.precision,
        trained_on=len(data.train.targets),
        further=files.finished(),
    )
    files.remove()
    return metrics


def predict_splits(task: Task, model: Head, data: Data, *, final: bool) -> dict[str, Predicted]:
    """Return the predictions for the hold-out and, if they are final, for each dev split, by name."""
    measured = data.measured if final else {HOLDOUT: data.holdout}
    return {name: task.predict(model, rows) for name, rows in measured.items()}


def save_run(
    task: Task,
    directory: str | Path,
    model: Head,
    architecture: Architecture,
    reader: Reader,
    predictions: Mapping[str, Predicted],
    *,
    record: Provenance,
    tuned: Trained,
    data_dir: str | Path | None = None,
    speedup: Speedup | None = None,
    planned: Planned | None = None,
    precision: Precision | None = None,
    trained_on: int | None = None,
    further: Mapping[str, bytes] | None = None,
    name: str = MODEL,
) -> RunMetrics:
    """Measure a model by its predictions and write its run.

    Args:
        data_dir: recorded if the task reads files.
        name: of the model, by which ``others`` of :func:`export.finetune.models.open_model` are found.
    """
    measures = tuple(measure for name, split in predictions.items() for measure in split.measures(task.metrics, name))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    metrics = msgspec.structs.replace(tuned.metrics(parameters, measures), trained_on=trained_on)
    contents = {PREDICTIONS: encode_predictions(predictions), **(further or {})}
    if isinstance(reader, Tokenizer):
        contents[TOKENIZER] = reader.to_str().encode()
    place = str(Path(data_dir).resolve()) if data_dir and data_directory(task.name, Path(data_dir)) else None
    arguments = msgspec.to_builtins(architecture)
    space = task.space if isinstance(task, ImportedTask) else None
    history = speedup, precision, processor(), task.own_data, planned, task.split, space
    config = RunConfig(name, arguments, record, place, *history)
    save(directory, model, config, metrics, contents)
    return metrics


def _check_lengths(data: Data, config: TransformerConfig) -> None:
    longest = max(int(rows.lengths.max()) for rows in (data.train, *data.measured.values()))
    if longest > config.max_positions:
        expected = f"rows of {config.max_positions} tokens at most, as the model reads"
        fix = f"Give --max-length {config.max_positions} or less."
        raise UsageError("--max-length", given=Raw(f"a row of {longest} tokens"), expected=expected, fix=fix)


def _teacher(task: Task, directory: str | Path, student: Head, labels: Sequence[str]) -> Head:
    teacher = open_tuned(directory, task.name)
    theirs, ours = _reads(teacher, read_config(directory).arguments.get("labels", ())), _reads(student, labels)
    if theirs != ours:
        fix = "Give a teacher that was trained on the same inputs and classes."
        raise UsageError(f"--teacher {directory}", given=Raw(theirs), expected=ours, fix=fix)
    return teacher


def _reads(model: Head, labels: Sequence[str]) -> str:
    """Return a description of the inputs and outputs that a teacher and its student must share."""
    config = model.transformer.config
    inputs = f"a vocabulary of {config.vocab_size}"
    if config.architecture == "vit":
        inputs = f"{config.image_size} pixels of {config.channels} colours in patches of {config.patch_size}"
    return f"{inputs} and {model.width} outputs: {', '.join(labels) or 'first and last token'}"


TASKS: Mapping[str, Task] = {**text_tasks.TASKS, **{task.name: task for task in (SQUAD, MNIST, DIGITS, IMAGENET)}}


def task_of(found: OpenedModel, directory: object) -> Task:
    """Return the task that a model in ``directory`` was fine-tuned on; of an imported model, to answer as it does."""
    if found.config is not None and found.config.own_data is not None:
        return own_task(found.config.own_data, found.config.split)
    if found.architecture is not None and found.architecture.task in IMPORTED:
        assert found.head is not None, "a run has a head"
        return ImportedTask(found.architecture, found.head, space_of(found))
    if found.architecture is None or found.architecture.task not in TASKS:
        fix = "Fine-tune the model first: fewheads finetune TASK --model MODEL."
        given = Raw("a model without a task")
        raise UsageError(
            f"{directory}", given=given, expected=f"a run on one of {', '.join(TASKS)}, or on own data", fix=fix
        )
    task = TASKS[found.architecture.task]
    if isinstance(task, SentenceTask) and found.config is not None:
        return msgspec.structs.replace(task, split=found.config.split)
    return task


def split_of(task: str, runs: Mapping[str, Path | None]) -> SplitVersion | None:
    """Return how the hold-out of runs was drawn, which one that starts from them or imitates them must share.

    Args:
        task: its name; runs on others know nothing of its rows.
        runs: by the option that gave them; other directories are ignored.

    Raises:
        UsageError: they differ, so that one has learnt rows that another one holds out.
    """
    found = dict[str, SplitVersion]()
    for option, run in runs.items():
        config = recorded(run) if run else None
        if config is not None and task in (config.arguments.get("task"), config.own_data and config.own_data.name):
            found[option] = config.split
    if len(set(found.values())) > 1:
        given = Raw(" and ".join(f"{name} with version {split}" for name, split in found.items()))
        fix = "Fine-tune the one with version 1 again."
        raise UsageError("hold-outs of the runs", given=given, expected="one version", fix=fix)
    return next(iter(found.values()), None)
