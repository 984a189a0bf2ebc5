"""All mechanisms of paper 002 on one task: the same start, the same training, the same measurements.

A finished mechanism is not trained again; an interrupted one resumes from its last saved step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from edge.errors import Literally, UsageError
from edge.files import sha256, write_whole
from export.experiments.attention.lengths import Length, measure_lengths
from export.experiments.attention.mechanisms import Mechanism
from export.experiments.attention.records import Record, Settings, read_record
from export.experiments.attention.run import INT8, calibration_of, place_of, run_mechanism, shared_inputs
from export.experiments.attention.stopwatch import Stopwatch
from export.experiments.attention.summary import Row, row_of
from export.experiments.settings import keep_settings
from export.heads import SequenceClassifier
from export.reduction.reduce import calibration_batches, check_original
from export.runs import WEIGHTS
from export.tasks.models import open_model
from export.tasks.registry import task_of
from export.tasks.run import prepare
from export.tasks.task import Data, Task
from export.training.observer import SILENT, Observer

FULL = "full"
RESULTS = "results.json"
_LONG_TOKENS = 128


class Result(msgspec.Struct, frozen=True):
    """Result of a comparison: its settings, a row for each mechanism, the speed by length, and the records."""

    settings: Settings
    metric: str
    rows: tuple[Row, ...]
    lengths: tuple[Length, ...]
    records: tuple[Record, ...]


def settings_of(
    run: Path, data_dir: Path, *, limit: int | None, tokens: int | None, **chosen: Any
) -> tuple[Settings, SequenceClassifier, Task, Data]:
    """Return the settings of a comparison, the dense model, its task and the data.

    Args:
        run: of ``fewheads finetune`` with a BERT, on a task with classes or values.
        tokens: in the timed input; None is the median of dev.
        chosen: the other fields of the settings.
    """
    found = open_model(run)
    task = task_of(found, run)
    model, architecture = found.head, found.architecture
    assert architecture is not None
    if not isinstance(model, SequenceClassifier) or model.transformer.config.architecture != "bert":
        given = Literally(f"a run on {task.name} with a {architecture.transformer.architecture}")
        expected = "a BERT with one answer for a text"
        raise UsageError(f"{run}", given=given, expected=expected, fix="Give a run on a task of GLUE.")
    data = prepare(task, data_dir, task.reader(run), max_length=architecture.max_length, limit=limit)
    settings = Settings(
        task=task.name,
        run=sha256((run / WEIGHTS).read_bytes()),
        limit=limit,
        # Of dev, because SST-2's hold-out is phrases like its training set.
        tokens=tokens or int(np.median(next(iter(data.dev.values())).lengths)),
        long=min(_LONG_TOKENS, model.transformer.config.max_positions),
        **chosen,
    )
    return settings, model, task, data


def compare(
    dense: SequenceClassifier,
    task: Task,
    data: Data,
    settings: Settings,
    mechanisms: Sequence[Mechanism],
    directory: Path,
    *,
    lengths: Sequence[int] = (),
    on_mechanism: Callable[[str, int], Observer] = lambda name, seed: SILENT,
) -> Result:
    """Train and measure the missing mechanisms, and return the results of all.

    Args:
        directory: has a subdirectory for each seed, and in it one for each mechanism.
        lengths: numbers of tokens for the timing of single shapes; empty for none.
        on_mechanism: called with name and seed before an unfinished mechanism; returns what observes its training.

    Raises:
        UsageError: the directory belongs to another comparison, or cannot be written.
        ReductionError: the model cannot be reduced, or there are too few examples for calibration.
    """
    if any(mechanism.calibrated for mechanism in mechanisms):  # before the first mechanisms are trained
        check_original(dense)
        calibration_batches(dense, calibration_of(data, settings))
    keep_settings(directory, settings)
    watch = Stopwatch(dense, (settings.tokens, settings.long), settings.calls)
    for seed in settings.seeds:
        shared = None
        for mechanism in mechanisms:
            if read_record(place_of(directory, seed, mechanism.name)):
                continue
            observer = on_mechanism(mechanism.name, seed)
            shared = shared or shared_inputs(dense, task, data, settings, seed, directory)
            run_mechanism(mechanism, shared, task, data, settings, watch, directory, observer)
    config = dense.transformer.config
    if lengths:
        on_mechanism("lengths", 0)
    measured = measure_lengths(config, lengths, settings.calls, directory / "lengths.json") if lengths else ()
    names = [name for one in mechanisms for name in ((one.name, one.name + INT8) if one.int8 else (one.name,))]
    places = {name: [place_of(directory, seed, name) for seed in settings.seeds] for name in names}
    rows = tuple(row_of(places[name], places[FULL], task.headline, tuple(data.measured)) for name in names)
    records = tuple(record for name in names for place in places[name] if (record := read_record(place)))
    result = Result(settings, task.headline, rows, measured, records)
    write_whole(directory / RESULTS, msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
    return result


def read_result(directory: Path) -> Result:
    """Read the results of a finished comparison."""
    try:
        return msgspec.json.decode((directory / RESULTS).read_bytes(), type=Result)
    except (OSError, msgspec.DecodeError) as error:
        fix = "Give a directory that 'fewheads compare' has finished."
        given = Literally(error)
        raise UsageError(f"{directory / RESULTS}", given=given, expected="results", fix=fix) from None
