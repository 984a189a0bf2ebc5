"""Tasks to fine-tune on: GLUE, SQuAD and images with their official metrics, and a user's own data (``own``).

Data are not part of the project. :data:`DATA` has the files of each task below ``--data-dir``, and their sources. If
the training file is missing, dev is a quarter of XQuAD's articles for SQuAD, and a fifth of ``t10k`` for MNIST.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from edge.errors import Raw, UsageError
from export.training.runs import RunConfig, data_dir_of, recorded_data


class Files(NamedTuple):
    """Files of a task: their directory below ``--data-dir``, their names, and where to get them."""

    directory: str
    names: str
    source: str


_GLUE = ("SST-2", "CoLA", "STS-B", "MRPC", "RTE", "WNLI", "QNLI", "MNLI", "QQP")
#: Files by the name of the task; the digits are part of scikit-learn.
DATA = {
    **{task: Files(f"glue/{task}", "train.tsv and dev.tsv", "gluebenchmark.com/tasks") for task in _GLUE},
    "MNLI": Files("glue/MNLI", "train.tsv, dev_matched.tsv and dev_mismatched.tsv", "gluebenchmark.com/tasks"),
    "SQuAD": Files(
        "squad", "train-v1.1.json and dev-v1.1.json, or xquad.en.json", "rajpurkar.github.io/SQuAD-explorer"
    ),
    "MNIST": Files("mnist", "train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz and those of t10k", "MNIST's site"),
    "ImageNet": Files("imagenet", "train/ and val/ with a directory of images for each class", "image-net.org"),
}
#: Names of the tasks of :mod:`export.finetune.run`, for command lines without NumPy and torch.
NAMES = (*_GLUE, "SQuAD", "MNIST", "digits", "ImageNet")
#: The task of models that embed sentences.
EMBEDDING = "sentence-embedding"
#: Tasks of models that ``fewheads import`` read, which have no data of their own.
IMPORTED = ("text-classification", "token-classification", "question-answering", EMBEDDING, "image-classification")


def data_directory(task: str, data_dir: Path) -> Path | None:
    """Return the place that a task reads; None for a task that reads no files."""
    if task in IMPORTED:
        return data_dir
    return data_dir / DATA[task].directory if task in DATA else None


def data_inputs(config: RunConfig | None, data_dir: Path) -> dict[str, Path]:
    """Return the data of a run for :mod:`export.bundle.outputs`; empty if its task reads no files, or is unknown.

    Own data are file and ``--dev``: where the run recorded them and, if they are not there, below ``data_dir``.
    """
    if config is None:
        return {}
    paths = [data_directory(config.arguments.get("task", ""), data_dir)]
    if config.own_data:
        recorded = [Path(path) for path in (config.own_data.path, config.own_data.dev) if path]
        paths = [*recorded, *(data_dir / path.name for path in recorded if not path.exists())]
    return {f"the data in {path}": path for path in paths if path}


def is_imported(config: RunConfig | None) -> bool:
    """Return whether a run is an imported model, or was made of one."""
    return config is not None and config.own_data is None and config.arguments.get("task") in IMPORTED


def place_of_data(config: RunConfig | None, data_dir: Path | None, data: Path | None) -> Path | None:
    """Return what the task of a run reads: ``data``, texts or images, for an imported model, else ``data_dir``.

    Returns:
        None for an imported model if none are given or recorded.

    Raises:
        UsageError: ``--data`` is given for another run.
        DataError: the recorded place does not exist any more.
    """
    if is_imported(config):
        return data or (recorded_data(config, "--data") if config and config.data_dir else None)
    if data is not None:
        fix = "Leave --data out; --data-dir has the files of a task."
        raise UsageError("--data", given=Raw(str(data)), expected="a run of an imported model", fix=fix)
    return data_dir_of(config, data_dir)


def needed_data(config: RunConfig | None, data_dir: Path | None, data: Path | None) -> Path:
    """Return the same as :func:`place_of_data`; raise a UsageError if there is none."""
    path = place_of_data(config, data_dir, data)
    if path is None:
        expected = "a file with a text in each line, or a directory of images"
        fix = "Give texts or images like those that the model will get; some hundred suffice."
        raise UsageError("--data", given=Raw("nothing"), expected=expected, fix=fix)
    return path


def scored_data(config: RunConfig | None, data_dir: Path | None) -> Path:
    """Return the same as :func:`labelled_data`, and of a model that embeds sentences where the pairs of STS-B are."""
    if config is not None and config.own_data is None and config.arguments.get("task") == EMBEDDING:
        return data_dir or Path("data")
    return labelled_data(config, data_dir)


def labelled_data(config: RunConfig | None, data_dir: Path | None) -> Path:
    """Return the data directory of a run on labels; a UsageError refuses imported models, a DataError a lost one."""
    if is_imported(config):
        fix = "Its measures are in metrics.json; to train it on labels, give it to 'fewheads finetune' as --model."
        expected = "a run of 'fewheads finetune' on data with labels, or one that was reduced from it"
        raise UsageError("RUN", given=Raw("an imported model"), expected=expected, fix=fix)
    return data_dir_of(config, data_dir)


#: The tasks whose headline metrics are averaged. WNLI is left out because its dev set contradicts its training set, so
#: that models that learn are worse than chance. The others are too large for a quick training.
AVERAGED = ("SST-2", "CoLA", "STS-B", "MRPC", "RTE")
