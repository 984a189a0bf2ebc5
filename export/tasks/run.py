"""One fine-tuning run on a task of GLUE, from a model and a data directory to a run directory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from edge.manifest import Provenance
from export.checkpoint import PREDICTIONS, TOKENIZER, RunConfig, RunMetrics, save
from export.heads import SequenceClassifier
from export.provenance import provenance
from export.tasks.finetune import Epoch, Step, fine_tune
from export.tasks.glue import TASKS, Task, limited, read, split_holdout
from export.tasks.metrics import METRICS, measures
from export.tasks.models import MODEL, SCORE, Architecture, find, find_tuned, with_head
from export.tasks.predictions import Predictions, encode_predictions, predict
from export.tasks.recipe import Recipe
from export.tasks.tokens import Encoded, encode

HOLDOUT = "holdout"


class Data(msgspec.Struct, frozen=True):
    """A task's data, tokenised: what is learnt from, what choices are made on, and the dev splits by name."""

    train: Encoded
    holdout: Encoded
    dev: dict[str, Encoded]


def prepare(task: Task, data_dir: str | Path, tokenizer: Tokenizer, *, max_length: int, limit: int | None) -> Data:
    """Read and tokenise a task, once for all seeds.

    Args:
        task: of GLUE.
        data_dir: holds ``glue/``.
        tokenizer: of the model.
        max_length: tokens of a row.
        limit: train on so many examples only; None is all. The hold-out is the same for every limit.

    Raises:
        DataError: a file is missing or malformed.
    """
    train, holdout = split_holdout(read(task, data_dir, "train"))
    return Data(
        encode(tokenizer, limited(train, limit), max_length),
        encode(tokenizer, holdout, max_length),
        {split: encode(tokenizer, read(task, data_dir, split), max_length) for split in task.dev},
    )


def finetune_run(
    task: Task,
    source: str | Path,
    data: Data,
    tokenizer: Tokenizer,
    directory: str | Path,
    recipe: Recipe,
    *,
    seed: int,
    max_length: int,
    teacher: str | Path | None = None,
    on_step: Callable[[Step], None] = lambda step: None,
    on_epoch: Callable[[Epoch], None] = lambda epoch: None,
) -> RunMetrics:
    """Fine-tune a model, measure it on hold-out and dev, and write its run directory.

    The state of an unfinished run stands beside it as ``.NAME.state``; the same call goes on from there.

    Args:
        task: of GLUE.
        source: a Hugging Face directory, or a run: one on the same task keeps its head.
        data: of the task, from :func:`prepare`.
        tokenizer: it goes into the run directory.
        directory: where the run shall stand; an earlier run there is replaced.
        recipe: how to train.
        seed: of a new head's weights and of the order of the examples.
        max_length: what the data were cut to.
        teacher: a run on the same task, to be imitated.
        on_step: see :func:`export.tasks.finetune.fine_tune`.
        on_epoch: likewise.

    Raises:
        CheckpointError: a model cannot be read, or the run not written.
        UsageError: the teacher was trained on another task.
        TrainingError: the loss is no longer finite.
    """
    found = find(source)
    architecture = Architecture(
        task=task.name,
        transformer=found.transformer.config,
        labels=task.labels or (SCORE,),
        max_length=max_length,
    )
    model = with_head(found, architecture, seed)
    assert isinstance(model, SequenceClassifier)  # it has labels
    directory = Path(directory)
    state = directory.with_name(f".{directory.name}.state")

    def evaluate() -> float:
        predicted = predict(model, data.holdout)
        return float(METRICS[task.headline](predicted.answers, predicted.targets))

    tuned = fine_tune(
        model,
        data.train,
        recipe,
        seed=seed,
        evaluate=evaluate,
        teacher=find_tuned(teacher, task.name) if teacher else None,
        state=state,
        on_step=on_step,
        on_epoch=on_epoch,
    )
    predictions = predict_splits(model, data)
    how = f"fine-tuned from {Path(source).name}, {len(data.train.tokens)} examples, {recipe}"
    metrics = save_run(
        directory,
        model,
        architecture,
        tokenizer,
        predictions,
        record=provenance(trainer=how, data=f"GLUE {task.name}", seed=seed),
        epochs=recipe.epochs,
        best_epoch=tuned.best_epoch,
        seconds=tuned.seconds,
    )
    state.unlink()
    return metrics


def predict_splits(model: SequenceClassifier, data: Data) -> dict[str, Predictions]:
    """Return what a model says of the hold-out and of each dev split, by name."""
    return {name: predict(model, rows) for name, rows in {HOLDOUT: data.holdout, **data.dev}.items()}


def save_run(
    directory: str | Path,
    model: SequenceClassifier,
    architecture: Architecture,
    tokenizer: Tokenizer,
    predictions: Mapping[str, Predictions],
    *,
    record: Provenance,
    epochs: int,
    best_epoch: int,
    seconds: float,
) -> RunMetrics:
    """Measure a model by its predictions and write its run directory.

    Args:
        directory: where the run shall stand; an earlier run there is replaced.
        model: its weights are written.
        architecture: what rebuilds it; its task tells the metrics.
        tokenizer: it goes into the run directory.
        predictions: from :func:`predict_splits`; they go there too.
        record: where the weights come from.
        epochs: of training.
        best_epoch: the one that was kept.
        seconds: that the making took.

    Raises:
        CheckpointError: the run cannot be written.
    """
    metrics = RunMetrics(
        sum(parameter.numel() for parameter in model.parameters()),
        epochs,
        best_epoch,
        seconds,
        tuple(
            measure
            for name, split in predictions.items()
            for measure in measures(TASKS[architecture.task].metrics, name, split.answers, split.targets)
        ),
    )
    further = {TOKENIZER: tokenizer.to_str().encode(), PREDICTIONS: encode_predictions(predictions)}
    save(directory, model, RunConfig(MODEL, msgspec.to_builtins(architecture), record), metrics, further)
    return metrics
