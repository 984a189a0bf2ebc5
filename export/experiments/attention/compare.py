"""All mechanisms of paper 002 on one task: the same start, the same training, the same measurements.

The trainings are jobs that may run side by side. Models are timed before and after them, one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias

import msgspec

from edge.errors import Raw, UsageError
from edge.files import write_whole
from export.papers.adaptive.inputs import Inputs, calibration_of, measure_costs
from export.papers.adaptive.lengths import Length, measure_lengths
from export.papers.adaptive.mechanisms import Mechanism
from export.papers.adaptive.records import Record, Settings, read_record
from export.papers.adaptive.run import INT8, place_of, time_mechanism, train_mechanism, trained_place
from export.papers.adaptive.stopwatch import Stopwatch
from export.papers.adaptive.summary import Row, row_of
from export.papers.experiment import keep_settings
from export.reduce.reduce import calibration_batches, check_original
from export.training.device import DeviceName
from export.training.jobs import Job

FULL = "full"
RESULTS = "results.json"
OnPart: TypeAlias = Callable[[str, int, int], None]


class Result(msgspec.Struct, frozen=True):
    """Result of a comparison: its settings, a row for each mechanism, the speed by length, and the records."""

    settings: Settings
    metric: str
    rows: tuple[Row, ...]
    lengths: tuple[Length, ...]
    records: tuple[Record, ...]


def unfinished_jobs(
    inputs: Inputs,
    settings: Settings,
    mechanisms: Sequence[Mechanism],
    *,
    run: Path,
    data_dir: Path,
    directory: Path,
    device: DeviceName,
    on_part: OnPart = lambda what, done, parts: None,
) -> list[Job]:
    """Return a training for each mechanism and seed without one, after the timings that mechanisms choose by.

    Args:
        directory: has a subdirectory for each seed, and in it one for each mechanism.
        device: of the trainings.
        on_part: called with what is timed, how many of them are done, and the number of all.

    Raises:
        UsageError: the directory belongs to another comparison, or cannot be written.
        ReductionError: the model cannot be reduced, or there are too few examples for calibration.
    """
    if any(mechanism.calibrated for mechanism in mechanisms):  # before the first mechanisms are trained
        check_original(inputs.dense)
        calibration_batches(inputs.dense, calibration_of(inputs.data, settings))
    keep_settings(directory, settings)
    places = {(one.name, seed): place_of(directory, seed, one.name) for seed in settings.seeds for one in mechanisms}
    missing = {key: place for key, place in places.items() if not (read_record(place) or trained_place(place).exists())}
    if not missing:
        return []
    names = {name for name, _ in missing}
    untrained = [mechanism for mechanism in mechanisms if mechanism.name in names]
    costs = measure_costs(inputs.dense, settings, untrained, directory, partial(on_part, "shapes"))
    jobs = []
    for (name, seed), place in missing.items():
        place.parent.mkdir(parents=True, exist_ok=True)
        arguments = (name, seed, run, data_dir, settings, costs, directory, device)
        jobs.append(Job(f"{name}-seed{seed}", train_mechanism, arguments))
    return jobs


def time_and_sum_up(
    inputs: Inputs,
    settings: Settings,
    mechanisms: Sequence[Mechanism],
    directory: Path,
    *,
    lengths: Sequence[int] = (),
    on_part: OnPart = lambda what, done, parts: None,
) -> Result:
    """Time all trained mechanisms, and return the results of all; nothing else should run meanwhile.

    Args:
        lengths: numbers of tokens for the timing of single shapes; empty for none.
        on_part: see :func:`unfinished_jobs`.
    """
    names = [name for one in mechanisms for name in ((one.name, one.name + INT8) if one.int8 else (one.name,))]
    places = {name: [place_of(directory, seed, name) for seed in settings.seeds] for name in names}
    untimed = [place for group in places.values() for place in group if trained_place(place).exists()]
    watch = Stopwatch(inputs.dense, settings.calls)
    for number, place in enumerate(untimed):
        on_part("models", number, len(untimed))
        time_mechanism(place, watch)
    config, path = inputs.dense.transformer.config, directory / "lengths.json"
    measured = measure_lengths(config, lengths, settings.calls, path, partial(on_part, "lengths"))
    task = inputs.task
    rows = tuple(row_of(places[name], places[FULL], task.headline, tuple(inputs.data.measured)) for name in names)
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
        given = Raw(error)
        raise UsageError(f"{directory / RESULTS}", given=given, expected="results", fix=fix) from None
