"""Training and measurement of one mechanism."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path

import msgspec

from export.adaptive.budget import measured_curve
from export.adaptive.term import adaptive_term
from export.adaptive.use import head_use
from export.experiments.attention.mechanisms import Mechanism
from export.experiments.attention.records import Record, Settings, SharedInputs, save_record
from export.experiments.attention.stopwatch import Stopwatch, predict_int8
from export.heads import SequenceClassifier
from export.processor import processor
from export.tasks.finetune import TaskObjective
from export.tasks.predictions import Predicted
from export.tasks.task import HOLDOUT, Data, Task
from export.tasks.tokens import Encoded
from export.training.observer import Observer
from export.training.trainer import train

#: Suffix of the records of mechanisms in INT8.
INT8 = "+int8"


def shared_inputs(
    dense: SequenceClassifier, task: Task, data: Data, settings: Settings, seed: int, directory: Path
) -> SharedInputs:
    """Return the common inputs of all mechanisms of a seed; latencies are measured once for all seeds."""
    first = calibration_of(data, settings)
    config = dense.transformer.config
    curve = measured_curve(config, settings.tokens, cache=directory / "curve.json", calls=settings.calls)
    state = directory / ".reduction"
    score = task.predict(dense, data.holdout).score(task.headline)
    return SharedInputs(
        dense, score, first, seed, settings.share, settings.target_speedup, settings.tokens, curve, state
    )


def calibration_of(data: Data, settings: Settings) -> Encoded:
    """Return the calibration examples of the training set."""
    assert isinstance(data.train, Encoded)
    train, number = data.train, settings.calibration
    return Encoded(train.tokens[:number], train.segments[:number], train.targets[:number])


def run_mechanism(
    mechanism: Mechanism,
    shared: SharedInputs,
    task: Task,
    data: Data,
    settings: Settings,
    watch: Stopwatch,
    directory: Path,
    observer: Observer,
) -> None:
    """Make, train and measure a mechanism, and write its record; an unfinished training resumes."""
    place = place_of(directory, shared.seed, mechanism.name)
    place.parent.mkdir(parents=True, exist_ok=True)
    made = mechanism.make(shared)
    model, how = made.model, mechanism.train(shared)
    predicted: list[Predicted] = []

    def evaluate() -> float:
        predicted.append(task.predict(model, data.holdout))
        return predicted[-1].score(task.headline)

    state = place.with_name(f".{mechanism.name}.state")
    with adaptive_term(model, how) if how else nullcontext() as term:
        objective = TaskObjective(
            model,
            data.train,
            settings.recipe,
            seed=shared.seed,
            evaluate=evaluate,
            teacher=copy.deepcopy(shared.dense) if settings.distil else None,
            extra=term,
        )
        floor = shared.score - settings.stop_points / 100 if how else None
        tuned = train(objective, settings.recipe, seed=shared.seed, stop_below=floor, state=state, observer=observer)
    # A run that was interrupted after its last epoch has no new predictions for the hold-out.
    known = {HOLDOUT: predicted[tuned.best_epoch - 1]} if len(predicted) == len(tuned.scores) else {}
    predictions = {name: known.get(name) or task.predict(model, rows) for name, rows in data.measured.items()}
    use = head_use(model, data.dev[next(iter(data.dev))])
    small = mechanism.shrink(model) if mechanism.shrink else model
    record = Record(
        name=mechanism.name,
        what=mechanism.what,
        seed=shared.seed,
        smaller=mechanism.shrink is not None,
        parameters=sum(parameter.numel() for parameter in small.parameters()),
        scores=tuned.scores,
        seconds=tuned.seconds,
        speeds=watch.speeds(small),
        kept=use.kept if use else made.kept,
        use=use,
        processor=processor(),
    )
    if mechanism.int8:
        answers = {name: predict_int8(small, rows) for name, rows in data.measured.items()}
        quantised = msgspec.structs.replace(
            record, name=mechanism.name + INT8, what="dynamic INT8 on top", speeds=watch.speeds(small, int8=True)
        )
        save_record(place_of(directory, shared.seed, quantised.name), quantised, answers)
    save_record(place, record, predictions)
    state.unlink(missing_ok=True)


def place_of(directory: Path, seed: int, name: str) -> Path:
    """Return the directory of a mechanism's record."""
    return directory / f"seed{seed}" / name
