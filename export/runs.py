"""Files of a run directory, and ``config.json`` and ``metrics.json``, which are read without torch.

A run directory contains ``weights.safetensors``, ``config.json`` and ``metrics.json``; that of a text model also
``tokenizer.json``, that of a fine-tuned one ``predictions.npz``, from which its metrics were computed, and that of a
trained one ``log.jsonl``, the losses on the way. ``report.html`` is what ``fewheads report`` says of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from edge.bench.layer_latencies import Shape
from edge.bundles.manifest import Measure, Provenance
from edge.errors import Raw
from export.errors import CheckpointError, DataError
from export.training.points import Planned
from export.training.provenance import Processor
from export.training.runs import OwnData

WEIGHTS, CONFIG, METRICS = "weights.safetensors", "config.json", "metrics.json"
TOKENIZER, PREDICTIONS, LOG, REPORT = "tokenizer.json", "predictions.npz", "log.jsonl", "report.html"
TRAIN_AGAIN = "Train the model again."

StructT = TypeVar("StructT", bound=msgspec.Struct)


class Speedup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Measured speed relative to the model before reduction: ONNX Runtime, CPU, one thread, batch 1.

    Attributes:
        ratio: time of the original over time of this model.
        tokens: length of the input that was timed, of several the first.
        original: the layers of the model before reduction; empty in runs of earlier versions.
    """

    ratio: float
    tokens: int
    original: tuple[Shape, ...] = ()


class RunConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Configuration of a run: how to rebuild its model, and the origin of its weights.

    Attributes:
        data_dir: absolute path of the ``--data-dir`` that the run was trained with, or of the ``--data`` of an imported
            model; None where it used none.
        speedup: over the model that it was reduced from; None for a model that was never reduced.
        precision: ``fp32`` or ``bf16``, which the multiplications in training really had; None without training.
        processor: that trained or reduced it. Runs of earlier versions record neither.
        own_data: the data of ``--data``; None for a task of Fewheads.
        planned: what a reduced model was planned for; None for others, and for runs of earlier versions.
    """

    model: str
    arguments: dict[str, Any]
    provenance: Provenance
    data_dir: str | None = None
    speedup: Speedup | None = None
    precision: str | None = None
    processor: Processor | None = None
    own_data: OwnData | None = None
    planned: Planned | None = None


class RunMetrics(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Results of a run.

    Attributes:
        losses: mean loss of each epoch of a fine-tuning.
        scores: on the hold-out, of each epoch of a fine-tuning.
        trained_on: examples of a fine-tuning.
    """

    parameters: int
    epochs: int
    best_epoch: int
    seconds: float
    measures: tuple[Measure, ...]
    losses: tuple[float, ...] = ()
    scores: tuple[float, ...] = ()
    trained_on: int | None = None


def is_run(directory: Path) -> bool:
    """Return whether a directory contains the files of a run and no others."""
    if not directory.is_dir():
        return False
    found = {entry.name for entry in directory.iterdir()}
    return found - {TOKENIZER, PREDICTIONS, LOG, REPORT} == {WEIGHTS, CONFIG, METRICS}


def read_config(directory: str | Path) -> RunConfig:
    """Read the configuration of a run."""
    directory = Path(directory)
    if not (directory / CONFIG).exists():
        other = f"a directory without {CONFIG}" if directory.is_dir() else "a file"
        given = Raw(other if directory.exists() else "nothing there")
        fix = "Give a directory that 'fewheads train' or 'fewheads finetune' wrote, for example runs/calculator-gate."
        raise CheckpointError(f"run {directory}", given=given, expected="a run directory", fix=fix)
    return decode(directory / CONFIG, RunConfig)


def recorded(directory: str | Path) -> RunConfig | None:
    """Return the configuration of a run; None for another directory, such as a Hugging Face model."""
    return read_config(directory) if (Path(directory) / WEIGHTS).exists() else None


def data_dir_of(config: RunConfig | None, given: Path | None) -> Path:
    """Return the data directory of a run: the given one, else the recorded one, else ``data``.

    Raises:
        DataError: the recorded directory does not exist any more.
    """
    if given is not None or config is None or config.data_dir is None:
        return given or Path("data")
    return recorded_data(config, "--data-dir")


def recorded_data(config: RunConfig, option: str) -> Path:
    """Return the recorded place of a run's data; ``option`` gives another one.

    Raises:
        DataError: it does not exist any more.
    """
    found = Path(config.data_dir or "")
    if not found.exists():
        expected = "the data that the run was made with"
        fix = f"Give {option}."
        raise DataError(f"data in {found}", given=Raw("nothing there"), expected=expected, fix=fix)
    return found


def decode(path: Path, kind: type[StructT]) -> StructT:
    """Decode one of the JSON files."""
    try:
        return msgspec.json.decode(read(path), type=kind)
    except msgspec.DecodeError as error:  # ValidationError is one too
        expected = f"the fields of {kind.__name__}"
        raise CheckpointError(f"{path}", given=Raw(error), expected=expected, fix=TRAIN_AGAIN) from None


def read(path: Path) -> bytes:
    """Return the contents of a file of a run."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}", given=Raw(error.strerror), expected="a file", fix=TRAIN_AGAIN) from None
