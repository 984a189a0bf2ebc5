"""Settings of a comparison, inputs of its mechanisms, and their results on disk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

import msgspec

from edge.errors import Raw
from edge.files import replaced_directory, write_durably
from export.data.tokens import Batch, Encoded, sorted_batches
from export.errors import CheckpointError
from export.finetune.recipe import Recipe
from export.models.heads import SequenceClassifier
from export.papers.adaptive.stopwatch import Speed, Timed
from export.papers.adaptive.term import CostCurve
from export.papers.adaptive.use import HeadUse
from export.reduce.grid import Times
from export.reduce.target import CALIBRATION_EXAMPLES
from export.training.provenance import Processor
from export.training.runs import PREDICTIONS

_RECORD, _BOUNDS = "record.json", "bounds.json"
#: Share of the coordinates of each original head that is left, [layers, H].
Kept: TypeAlias = tuple[tuple[float, ...], ...]
_BATCH = 32


class MeasuredCosts(NamedTuple):
    """Costs of a layer.

    Attributes:
        curve: in units of the dense one, by the share of its heads' coordinates.
        times: of each option of a reduction; None where no mechanism needs them.
    """

    curve: CostCurve
    times: Times | None = None


@dataclass(frozen=True)
class SharedInputs:
    """Common inputs of all mechanisms of a seed.

    Attributes:
        dense: the fine-tuned model; it is not changed.
        score: its score on the hold-out.
        calibration: real inputs, with targets.
        share: of attention to keep, for mechanisms that have a choice.
        target_speedup: of the reduction with feed-forward layers.
        costs: of layers, as measured.
        state: a directory for the state of reductions.
    """

    dense: SequenceClassifier
    score: float
    calibration: Encoded
    seed: int
    share: float
    target_speedup: float
    tokens: int
    costs: MeasuredCosts
    state: Path

    def batches(self) -> list[Batch]:
        """Return the calibration inputs in batches."""
        return [self.calibration.batch(rows) for rows in sorted_batches(self.calibration.lengths, _BATCH)]


class ChangedModel(NamedTuple):
    """A changed model, and the share of its heads that is left if training does not change it."""

    model: SequenceClassifier
    kept: Kept | None = None


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that all mechanisms of a comparison share.

    Attributes:
        run: SHA-256 of the dense run's weights.
        distil: whether the dense run is the teacher.
        share: of attention to keep, for mechanisms that have a choice.
        target_speedup: of the reduction with feed-forward layers.
        stop_points: models with scores stop if the hold-out falls by more points below the dense run.
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
    calls: int
    calibration: int = CALIBRATION_EXAMPLES
    stop_points: float = 0.5


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one mechanism and seed.

    Attributes:
        smaller: whether the timed matrices are smaller; otherwise scorers and masks are timed, too.
        scores: on the hold-out, of each epoch.
        kept: share of the coordinates of each head that is used on the hold-out; None if all are.
        use: of the scores; None without scores.
        speeds: empty until it is timed.
        processor: that timed it, which has also trained it but on a cluster; earlier versions did not record it.
    """

    name: str
    what: str
    seed: int
    smaller: bool
    parameters: int
    scores: tuple[float, ...]
    seconds: float
    speeds: tuple[Speed, ...] = ()
    kept: Kept | None = None
    use: HeadUse | None = None
    processor: Processor | None = None


def save_record(directory: Path, record: Record, predictions: bytes, files: Iterable[Timed] = ()) -> None:
    """Write a record, its encoded predictions, and the files that are still to be timed, whole or not at all."""
    with replaced_directory(directory) as new:
        write_durably(new / _RECORD, msgspec.json.format(msgspec.json.encode(record), indent=2))
        write_durably(new / PREDICTIONS, predictions)
        bounds = {}
        for file in files:
            write_durably(new / _onnx(file.tokens), file.onnx)
            bounds[file.tokens] = file.bound
        if bounds:
            write_durably(new / _BOUNDS, msgspec.json.encode(bounds))


def read_timed(directory: Path) -> Iterator[Timed]:
    """Yield the files that :func:`save_record` wrote to be timed."""
    bounds = msgspec.json.decode((directory / _BOUNDS).read_bytes(), type=dict[int, float | None])
    for tokens, bound in bounds.items():
        yield Timed(tokens, (directory / _onnx(tokens)).read_bytes(), bound)


def _onnx(tokens: int) -> str:
    return f"{tokens}.onnx"


def read_record(directory: Path) -> Record | None:
    """Return a record; None if there is none."""
    path = directory / _RECORD
    if not path.exists():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=Record)
    except (msgspec.DecodeError, OSError) as error:
        fix = "Delete the directory to measure the mechanism again."
        raise CheckpointError(f"{path}", given=Raw(error), expected="the fields of Record", fix=fix) from None
