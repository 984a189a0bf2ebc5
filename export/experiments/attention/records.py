"""Results of each mechanism, on disk as soon as it is finished."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from edge.errors import Literally
from edge.files import replaced_directory, write_durably
from export.adaptive.use import HeadUse
from export.errors import CheckpointError
from export.experiments.attention.ground import Kept
from export.experiments.attention.stopwatch import Speed
from export.processor import Processor
from export.runs import PREDICTIONS
from export.tasks.predictions import Predicted, encode_predictions
from export.tasks.recipe import Recipe

_RECORD = "record.json"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that all mechanisms of a comparison share.

    Attributes:
        task: its name.
        run: the SHA-256 of the dense run's weights.
        recipe: of the training that each mechanism gets.
        limit: train on so many examples only; None is all.
        seeds: of the training.
        distil: whether the dense run is the teacher.
        share: of attention that is left, where a mechanism has a choice.
        target_speedup: of the reduced plan that has one.
        tokens: in the input that is timed, usually as many as the median dev item has.
        long: another length to time.
        calibration: examples.
        calls: of each model in a timing.
        stop_points: scored models stop when the hold-out falls by more than so much below the dense run.
    """

    task: str
    run: str
    recipe: Recipe
    limit: int | None
    seeds: tuple[int, ...]
    distil: bool
    share: float
    target_speedup: float
    tokens: int
    long: int
    calibration: int
    calls: int
    stop_points: float


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One mechanism and seed.

    Attributes:
        name: of the mechanism.
        what: a few words.
        seed: of the training.
        smaller: whether the matrices are smaller; else it was timed as it runs, scorers and masks included.
        parameters: of what was timed.
        scores: on the hold-out, of each epoch.
        seconds: of the training.
        speeds: at each length.
        kept: of each head, the share of its coordinates that is used on the hold-out; None where all are.
        use: of the scores, where there are some.
        processor: that trained and timed it; earlier versions did not record it.
    """

    name: str
    what: str
    seed: int
    smaller: bool
    parameters: int
    scores: tuple[float, ...]
    seconds: float
    speeds: tuple[Speed, ...]
    kept: Kept | None = None
    use: HeadUse | None = None
    processor: Processor | None = None


def save_record(directory: Path, record: Record, predictions: Mapping[str, Predicted]) -> None:
    """Write a record with the predictions that it is compared by, whole or not at all."""
    with replaced_directory(directory) as new:
        write_durably(new / _RECORD, msgspec.json.format(msgspec.json.encode(record), indent=2))
        write_durably(new / PREDICTIONS, encode_predictions(predictions))


def read_record(directory: Path) -> Record | None:
    """Return what :func:`save_record` wrote, or None where there is nothing.

    Raises:
        CheckpointError: it is malformed.
    """
    path = directory / _RECORD
    if not path.exists():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=Record)
    except (msgspec.DecodeError, OSError) as error:
        fix = "Delete the directory to measure the mechanism again."
        raise CheckpointError(f"{path}", given=Literally(error), expected="the fields of Record", fix=fix) from None
