"""One mechanism: its training, a job beside others, and its timing, while nothing else runs."""

from __future__ import annotations

import copy
import shutil
from contextlib import nullcontext
from pathlib import Path

import msgspec

from export.finetune.finetune import TaskObjective
from export.finetune.predictions import Predicted, encode_predictions
from export.finetune.task import HOLDOUT
from export.papers.adaptive.inputs import read_inputs, shared_inputs
from export.papers.adaptive.mechanisms import ABLATIONS, MECHANISMS
from export.papers.adaptive.records import (
    MeasuredCosts,
    Record,
    Settings,
    read_record,
    read_timed,
    save_record,
)
from export.papers.adaptive.stopwatch import Stopwatch, predict_int8, timed_files
from export.papers.adaptive.term import adaptive_term
from export.papers.adaptive.use import head_use
from export.training.device import DeviceName, device_of
from export.training.provenance import processor
from export.training.runs import PREDICTIONS
from export.training.trainer import train
from export.training.watch import watching

#: Suffix of the records of mechanisms in INT8.
INT8 = "+int8"


def train_mechanism(
    name: str,
    seed: int,
    run: Path,
    data_dir: Path,
    settings: Settings,
    costs: MeasuredCosts,
    directory: Path,
    device: DeviceName,
) -> None:
    """Make, train and export a mechanism, and store all of its results but its speed; an unfinished training resumes.

    Args:
        run: the dense run, whose data are in ``data_dir``.
        directory: of the comparison; the results go to :func:`trained_place`.
        device: of the training; the processor does the rest.
    """
    mechanism, inputs = (MECHANISMS | ABLATIONS)[name], read_inputs(run, data_dir, settings.limit)
    dense, task, data = inputs
    shared = shared_inputs(inputs, settings, costs, seed, directory)
    place = place_of(directory, seed, name)
    made = mechanism.make(shared)
    place_to_train = device_of(device)
    model, how = made.model.to(place_to_train), mechanism.train(shared)
    predicted: list[Predicted] = []

    def evaluate() -> float:
        predicted.append(task.predict(model, data.holdout))
        return predicted[-1].score(task.headline)

    state = place.with_name(f".{name}.state")
    with adaptive_term(model, how) if how else nullcontext() as term, watching(f"{name}, seed {seed}") as watch:
        objective = TaskObjective(
            model,
            data.train,
            settings.recipe,
            seed=seed,
            evaluate=evaluate,
            teacher=copy.deepcopy(dense).to(place_to_train) if settings.distil else None,
            extra=term,
        )
        floor = shared.score - settings.stop_points / 100 if how else None
        tuned = train(objective, settings.recipe, seed=seed, stop_below=floor, state=state, observer=watch)
    # A run that was interrupted after its last epoch has no new predictions for the hold-out.
    known = {HOLDOUT: predicted[tuned.best_epoch - 1]} if len(predicted) == len(tuned.scores) else {}
    predictions = {split: known.get(split) or task.predict(model, rows) for split, rows in data.measured.items()}
    model = model.cpu()
    use = head_use(model, data.dev[next(iter(data.dev))])
    small = mechanism.shrink(model) if mechanism.shrink else model
    record = Record(
        name=name,
        what=mechanism.what,
        seed=seed,
        smaller=mechanism.shrink is not None,
        parameters=sum(parameter.numel() for parameter in small.parameters()),
        scores=tuned.scores,
        seconds=tuned.seconds,
        kept=use.kept if use else made.kept,
        use=use,
    )
    lengths = (settings.tokens, settings.long)
    if mechanism.int8:
        answers = {split: predict_int8(small, rows) for split, rows in data.measured.items()}
        quantised = msgspec.structs.replace(record, name=name + INT8, what="dynamic INT8 on top")
        trained = trained_place(place_of(directory, seed, quantised.name))
        files = timed_files(dense, small, lengths, int8=True)
        save_record(trained, quantised, encode_predictions(answers), files)
    # Last, because it marks the job as finished.
    save_record(trained_place(place), record, encode_predictions(predictions), timed_files(dense, small, lengths))
    state.unlink(missing_ok=True)


def time_mechanism(place: Path, watch: Stopwatch) -> None:
    """Time a trained mechanism, and make its record complete."""
    trained = trained_place(place)
    record = read_record(trained)
    assert record is not None
    timed = msgspec.structs.replace(record, speeds=watch.speeds(read_timed(trained)), processor=processor())
    save_record(place, timed, (trained / PREDICTIONS).read_bytes())
    shutil.rmtree(trained)


def place_of(directory: Path, seed: int, name: str) -> Path:
    """Return the directory of a mechanism's record."""
    return directory / f"seed{seed}" / name


def trained_place(place: Path) -> Path:
    """Return the directory of a mechanism that is trained and not timed yet."""
    return place.with_name(f".{place.name}.trained")
