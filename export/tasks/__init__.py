"""Tasks to fine-tune on: GLUE, SQuAD and images with their official metrics, and a user's own data (``own``).

Data are not part of the project. :data:`DATA` has the files of each task below ``--data-dir``, and their sources. If
the training file is missing, dev is a quarter of XQuAD's articles for SQuAD, and a fifth of ``t10k`` for MNIST.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from export.runs import RunConfig


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
#: Names of the tasks of :mod:`export.tasks.registry`, for command lines without NumPy and torch.
NAMES = (*_GLUE, "SQuAD", "MNIST", "digits", "ImageNet")


def data_directory(task: str, data_dir: Path) -> Path | None:
    """Return the directory that a task reads; None for a task that reads no files."""
    return data_dir / DATA[task].directory if task in DATA else None


def data_of(config: RunConfig | None, data_dir: Path) -> Path | None:
    """Return the path of the data of a run; None if its task reads no files, or is unknown."""
    if config and config.own_data:
        return Path(config.own_data.path)
    return data_directory(config.arguments.get("task", ""), data_dir) if config else None


#: The tasks whose headline metrics are averaged. WNLI is left out because its dev set contradicts its training set, so
#: that models that learn are worse than chance. The others are too large for a quick training.
AVERAGED = ("SST-2", "CoLA", "STS-B", "MRPC", "RTE")
