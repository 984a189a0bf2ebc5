"""Files of a run directory, and ``config.json`` and ``metrics.json``, which are read without torch.

A run directory contains ``weights.safetensors``, ``config.json`` and ``metrics.json``; that of a text model also
``tokenizer.json``, that of a fine-tuned one ``predictions.npz``, from which its metrics were computed, and that of a
trained one ``log.jsonl``, the losses on the way. ``README.md`` is its model card, and ``report.html`` what ``fewheads
report`` says of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from edge.bench.layer_latencies import Shape
from edge.bundles.manifest import Measure, Provenance
from edge.errors import Raw
from export.errors import CheckpointError, DataError, listed
from export.training.points import Planned
from export.training.provenance import Processor

WEIGHTS, CONFIG, METRICS = "weights.safetensors", "config.json", "metrics.json"
TOKENIZER, PREDICTIONS, LOG = "tokenizer.json", "predictions.npz", "log.jsonl"
CARD, REPORT = "README.md", "report.html"
TRAIN_AGAIN = "Train the model again."

#: How the hold-out of labelled texts is drawn: by the first text of each row, or as in :mod:`export.data.holdouts`.
SplitVersion = Literal[1, 2]
SPLIT: SplitVersion = 2

StructT = TypeVar("StructT", bound=msgspec.Struct)


class Speedup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Speed relative to the model before reduction, measured with ONNX Runtime, CPU, one thread, batch 1.

    Attributes:
        ratio: time of the original over time of this model.
        tokens: length of the input that was timed, of several the first.
        original: its layers before reduction; empty in runs of earlier versions.
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
        split: how the hold-out of a run on labelled texts was drawn.
        space: of the embeddings, by the weights of the imported model that has made it: those of a run that was reduced
            from that model, or that learnt its answers, can be compared with its own. None for models without
            embeddings, and for runs of earlier versions; :func:`export.finetune.models.space_of` knows better.
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
    split: SplitVersion = 1
    space: str | None = None


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

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits that it was measured on: the hold-out, and dev if the run was final."""
        return tuple(dict.fromkeys(measure.split for measure in self.measures))


def is_run(directory: Path) -> bool:
    """Return whether a directory contains the files of a run and no others."""
    if not directory.is_dir():
        return False
    names = {entry.name for entry in directory.iterdir()}
    return names - {TOKENIZER, PREDICTIONS, LOG, CARD, REPORT} == {WEIGHTS, CONFIG, METRICS}


def read_config(directory: str | Path) -> RunConfig:
    """Read the configuration of a run."""
    directory = Path(directory)
    if not (directory / CONFIG).exists():
        other = f"a directory without {CONFIG}" if directory.is_dir() else "a file"
        given = Raw(other if directory.exists() else "nothing there")
        fix = "Give a directory that 'fewheads train' or 'fewheads finetune' wrote, for example runs/calculator-gate."
        raise CheckpointError(f"run {directory}", given=given, expected="a run directory", fix=fix)
    return decode(directory / CONFIG, RunConfig)


def read_metrics(directory: str | Path) -> RunMetrics:
    """Read the results of a run."""
    return decode(Path(directory) / METRICS, RunMetrics)


def recorded(directory: str | Path) -> RunConfig | None:
    """Return the configuration of a run; None for another directory, such as a Hugging Face model."""
    return read_config(directory) if (Path(directory) / WEIGHTS).exists() else None


def data_dir_of(config: RunConfig | None, given: Path | None) -> Path:
    """Return the data directory of a run: the given one, else the recorded one (a DataError if gone), else ``data``."""
    if given is not None or config is None or config.data_dir is None:
        return given or Path("data")
    return recorded_data(config, "--data-dir")


def recorded_data(config: RunConfig, option: str) -> Path:
    """Return the recorded place of a run's data; raise a DataError if it is gone, with ``option`` as the way out."""
    path = Path(config.data_dir or "")
    if not path.exists():
        given, expected = Raw("nothing there"), "the data that the run was made with"
        raise DataError(f"data in {path}", given=given, expected=expected, fix=f"Give {option}.")
    return path


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


#: In a description; a data set may have hundreds.
_MOST_FILES = 8


class DataFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table, or a folder of images: its split (empty if left out for lack of labels), name, examples and SHA-256.

    The hash of a folder is that of the names and hashes of its images.
    """

    split: str
    name: str
    rows: int
    sha256: str


class SplitRows(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A split, and how many of its texts or images are in the training set, too (None where nobody looked)."""

    name: str
    rows: int
    in_train: int | None = None


class OwnData(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A user's own data, as ``fewheads finetune --data`` read them.

    Attributes:
        path: absolute path of the file or directory.
        images: whether it is a folder of images; otherwise texts in tables.
        dev: absolute path of ``--dev``, if it was given.
        texts: columns of the text, or of both texts.
        label: column of the classes or values.
        spans: whether they are questions, contexts and answers, and ``no_answer`` whether some have none.
        values: the classes as they are in the files, in the order of their numbers; empty for values to predict.
        labels: names of the classes, usually the same.
        image_size: pixels of a side for a new model; 0 for texts.
    """

    path: str
    images: bool = False
    dev: str | None = None
    texts: tuple[str, ...] = ()
    label: str = ""
    spans: bool = False
    no_answer: bool = False
    values: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    image_size: int = 0
    files: tuple[DataFile, ...] = ()
    splits: tuple[SplitRows, ...] = ()

    @property
    def name(self) -> str:
        """The name of the task: that of the file, or of the directory, which gets a slash unless it has an ending."""
        return Path(self.path).name + ("" if Path(self.path).suffix else "/")

    @property
    def origin(self) -> str:
        """The files with their hashes, the first ones of many, for a provenance."""
        return f"own data: {listed([f'{file.name} (SHA-256 {file.sha256})' for file in self.files], _MOST_FILES)}"

    def name_of(self, path: Path) -> str:
        """Return the name of a file or folder of the data: relative to them, or its own if it is not inside of them."""
        root = Path(self.path)
        return str(path.relative_to(root)) if path.is_relative_to(root) and path != root else path.name

    def located(self, data_dir: str | Path) -> OwnData:
        """Return the data where they are now, as recorded or below another directory, or raise a DataError."""
        dev = None if self.dev is None else _located(Path(self.dev), Path(data_dir))
        return msgspec.structs.replace(self, path=_located(Path(self.path), Path(data_dir)), dev=dev)

    def check_unchanged(self, files_now: tuple[DataFile, ...], path: str) -> None:
        """Raise a DataError if files, now in ``path``, differ from the training's: other rows would be held out."""
        recorded, now = ({(file.split, file.name): file for file in files} for files in (self.files, files_now))
        for key in recorded.keys() | now.keys():
            if recorded.get(key) != now.get(key):
                states = (files.get(key) for files in (now, recorded))
                given, expected = (
                    Raw(f"{file.rows} rows with SHA-256 {file.sha256[:16]}…" if file else "no such file")
                    for file in states
                )
                fix = "Put back the files of the training, or fine-tune on the new ones: fewheads finetune --data."
                raise DataError(f"{path} file {key[1]}", given=given, expected=expected, fix=fix)


def _located(recorded: Path, data_dir: Path) -> str:
    if recorded.exists():
        return str(recorded)
    other = data_dir / recorded.name
    if not other.exists():
        given, expected = Raw("nothing there"), "the data that the run was trained with"
        fix = f"Put them back, or give --data-dir with the directory that has {recorded.name} now."
        raise DataError(f"{recorded}", given=given, expected=expected, fix=fix)
    return str(other.resolve())
