"""Every mechanism of paper 002 on one task: the same start, the same training, the same measurements.

A mechanism that is finished is never trained again; an interrupted one resumes from its last saved step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from edge.errors import Literally, UsageError
from edge.files import write_whole
from export.experiments.attention.lengths import Length, measure_lengths
from export.experiments.attention.mechanisms import Mechanism
from export.experiments.attention.records import Record, Settings, read_record
from export.experiments.attention.run import INT8, calibration_of, ground_of, place_of, run_mechanism
from export.experiments.attention.stopwatch import Stopwatch
from export.experiments.attention.summary import Row, row_of
from export.experiments.settings import keep_settings
from export.heads import SequenceClassifier
from export.reduction.reduce import calibration_batches, check_model
from export.tasks.finetune import Step
from export.tasks.task import Data, Task

FULL = "full"
RESULTS = "results.json"


class Result(msgspec.Struct, frozen=True):
    """All of a comparison: its settings, a row for each mechanism, the speed by length, and the records."""

    settings: Settings
    metric: str
    rows: tuple[Row, ...]
    lengths: tuple[Length, ...]
    records: tuple[Record, ...]


def compare(
    dense: SequenceClassifier,
    task: Task,
    data: Data,
    settings: Settings,
    mechanisms: Sequence[Mechanism],
    directory: Path,
    *,
    lengths: Sequence[int] = (),
    on_mechanism: Callable[[str, int], Callable[[Step], None]] = lambda name, seed: lambda step: None,
) -> Result:
    """Train and measure what is missing, and return all of it.

    Args:
        mechanisms: with ``full`` among them, which the others are compared with.
        directory: for everything; a subdirectory for each seed, and there one for each mechanism.
        lengths: numbers of tokens to time single shapes at; none leaves that out.
        on_mechanism: called with name and seed before a mechanism that is not finished; what it returns is called after
            each step of its training.

    Raises:
        UsageError: the directory belongs to another comparison, or cannot be written.
        ReductionError: the model cannot be reduced, or there are too few examples to calibrate with.
        CheckpointError: a record there is malformed.
        TrainingError: a loss is no longer finite.
    """
    if any(mechanism.calibrated for mechanism in mechanisms):  # before the mechanisms that come first are trained
        check_model(dense)
        calibration_batches(dense, calibration_of(data, settings))
    keep_settings(directory, settings)
    watch = Stopwatch(dense, (settings.tokens, settings.long), settings.calls)
    for seed in settings.seeds:
        ground = None
        for mechanism in mechanisms:
            if read_record(place_of(directory, seed, mechanism.name)):
                continue
            on_step = on_mechanism(mechanism.name, seed)
            ground = ground or ground_of(dense, task, data, settings, seed, directory)
            run_mechanism(mechanism, ground, task, data, settings, watch, directory, on_step)
    config = dense.transformer.config
    if lengths:
        on_mechanism("lengths", 0)
    measured = measure_lengths(config, lengths, settings.calls, directory / "lengths.json") if lengths else ()
    return _result(task, data, settings, mechanisms, measured, directory)


def _result(
    task: Task,
    data: Data,
    settings: Settings,
    mechanisms: Sequence[Mechanism],
    lengths: tuple[Length, ...],
    directory: Path,
) -> Result:
    names = [name for one in mechanisms for name in ((one.name, one.name + INT8) if one.int8 else (one.name,))]
    places = {name: [place_of(directory, seed, name) for seed in settings.seeds] for name in names}
    rows = tuple(row_of(places[name], places[FULL], task.headline, tuple(data.measured)) for name in names)
    records = tuple(record for name in names for place in places[name] if (record := read_record(place)))
    result = Result(settings, task.headline, rows, lengths, records)
    write_whole(directory / RESULTS, msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
    return result


def read_result(directory: Path) -> Result:
    """Read the results of a finished comparison.

    Raises:
        UsageError: there are none, or they are malformed.
    """
    try:
        return msgspec.json.decode((directory / RESULTS).read_bytes(), type=Result)
    except (OSError, msgspec.DecodeError) as error:
        fix = "Give a directory that 'fewheads compare' has finished."
        given = Literally(error)
        raise UsageError(f"{directory / RESULTS}", given=given, expected="results", fix=fix) from None
