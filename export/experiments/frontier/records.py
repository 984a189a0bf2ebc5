"""Records of a family: its predictions on dev, and the times of its files. The summary reads nothing else."""

from __future__ import annotations

import io
import zipfile
import zlib
from pathlib import Path
from typing import TypeAlias

import msgspec
import numpy as np

from edge.datatypes import Array
from edge.errors import Raw
from edge.files import write_whole
from export.errors import CheckpointError, listed
from export.models.transformer import LayerShape
from export.papers.experiment import read_part
from export.papers.frontier.settings import FamilySettings
from export.training.provenance import Processor

ANSWERED, TIMED = "answered.json", "timed.json"
_ANSWERS = "answers.npz"

#: Precisions: of ONNX Runtime, and of the file for TensorRT, which is not timed.
FP32, INT8, STATIC = "fp32", "int8", "static-int8"
#: FP32 of a reduced model before its distillation, by PyTorch. Its file would be as fast as that of FP32.
REDUCED = "fp32-reduced"
#: A run and a precision.
Key: TypeAlias = "tuple[str, str]"


class Answered(msgspec.Struct, frozen=True):
    """The trained runs of a family, and the conditions of their training.

    Attributes:
        dense: the run that is the dense baseline, the best one on the hold-out.
        holdout: the headline metric of each run, and of every dense one, on the hold-out.
        mean_tokens: of an item of dev.
        dim: d, the width of a token.
        layers: of each run.
        file_bytes: of each file, by ``run/precision``.
        processor: that computed the answers, and trained where there is no GPU.
        gpu: that trained, by its name.
    """

    settings: FamilySettings
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


class Timed(msgspec.Struct, frozen=True):
    """Times of the files for ONNX Runtime, by ``run/precision``.

    Attributes:
        speedups: the dense FP32 model's time over each file's, for one item: the median over items.
        fixed_speedups: the same for inputs of :data:`export.papers.frontier.timing.FIXED_TOKENS` tokens.
        median_ms: of an item of dev.
        items: of dev that were timed.
    """

    speedups: dict[str, float]
    fixed_speedups: dict[str, float]
    median_ms: dict[str, float]
    items: int
    processor: Processor
    versions: dict[str, str]


class Family(msgspec.Struct, frozen=True):
    """All records of a family.

    Attributes:
        answers: of each run and precision, [n]: classes or scores.
        targets: [n].
    """

    answered: Answered
    timed: Timed
    answers: dict[Key, Array]
    targets: Array


def write_answers(directory: Path, answered: Answered, answers: dict[Key, Array], targets: Array) -> None:
    """Write the predictions of a family, and then the record that marks it as answered."""
    buffer = io.BytesIO()
    arrays = {"/".join(key): _small(values) for key, values in answers.items()}
    np.savez_compressed(buffer, **arrays, targets=_small(targets))  # type: ignore[arg-type]
    write_whole(directory / _ANSWERS, buffer.getvalue())
    write_record(directory / ANSWERED, answered)


def write_record(path: Path, record: msgspec.Struct) -> None:
    """Write a record as JSON."""
    write_whole(path, msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")


def read_family(directory: Path) -> Family:
    """Read the records of a measured family.

    Raises:
        CheckpointError: one is missing or malformed.
    """
    path = directory / _ANSWERS
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as arrays:
            found = {name: array.astype(np.float64) for name, array in arrays.items()}
        targets = found.pop("targets")
        answers = {key_of(name): values for name, values in found.items()}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        fix = f"Delete {ANSWERED} beside it, and give the same command."
        raise CheckpointError(f"{path}", given=Raw(error), expected="answers of a family", fix=fix) from None
    answered, timed = read_part(directory / ANSWERED, Answered), read_part(directory / TIMED, Timed)
    files = {"/".join(key) for key in answers if key[1] in (FP32, INT8)}
    if untimed := files - (timed.speedups.keys() & timed.fixed_speedups.keys()):
        given, fix = Raw(f"no times of {listed(sorted(untimed), 3)}"), "Delete it, and give the same command."
        raise CheckpointError(f"{directory / TIMED}", given=given, expected="times of every file", fix=fix)
    return Family(answered, timed, answers, targets)


def is_measured(directory: Path) -> bool:
    """Return whether a family has all its records."""
    return all((directory / name).exists() for name in (_ANSWERS, ANSWERED, TIMED))


def key_of(name: str) -> Key:
    """Return the key of a name ``run/precision``."""
    run, precision = name.split("/")
    return run, precision


def _small(values: Array) -> Array:
    """Return classes as INT8, and scores as FP32: a hundredth of a point is far above its resolution."""
    whole = values.astype(np.int8)
    return whole if np.array_equal(whole, values) else values.astype(np.float32)
