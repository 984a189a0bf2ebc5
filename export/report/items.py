"""The items that a run was trained and measured on, for people: texts, and names and pixels of images."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from edge.datatypes import Array
from export.data.examples import TRAIN
from export.data.images import ImageFolder, Images, ImageShape
from export.data.tokens import Rows
from export.finetune.models import Architecture
from export.finetune.task import Task
from export.finetune.text_tasks import SentenceTask
from export.training.runs import DataFile, SplitRows


class SplitItems(NamedTuple):
    """Items of a split.

    Attributes:
        targets: classes or values, [n].
        shown: returns the texts of an item, or the name of an image, by its index.
        picture: returns the colours of an image, [size, size, channels] from 0 to 1; None for texts.
    """

    targets: Array
    shown: Callable[[int], tuple[str, ...]]
    picture: Callable[[int], Array] | None = None


class Items(NamedTuple):
    """The labels, targets of the whole training split, items of the measured splits, and where they come from."""

    labels: tuple[str, ...]
    train: Array
    measured: Mapping[str, SplitItems]
    files: tuple[DataFile, ...]
    rows: tuple[SplitRows, ...]


def items_of(task: Task, architecture: Architecture, data_dir: Path) -> Items:
    """Read the data of a run on a task.

    Raises:
        DataError: they are missing, or are not those of the training.
    """
    if isinstance(task, SentenceTask):
        splits = task.examples(data_dir)
        texts = {name: SplitItems(one.targets, one.texts.__getitem__) for name, one in splits.measured.items()}
        return Items(task.class_names, splits.train.targets, texts, task.files(data_dir), splits.rows)
    config = architecture.transformer
    shape = ImageShape(config.image_size, config.channels)
    data = task.prepare(data_dir, shape, max_length=architecture.max_length, limit=None)
    images = {name: _images(rows) for name, rows in data.measured.items()}
    user = task.own_data
    rows = tuple(SplitRows(name, len(one.targets)) for name, one in {TRAIN: data.train, **data.measured}.items())
    return Items(
        data.labels,
        data.train.targets,
        images,
        user.files if user else (),
        user.splits if user else rows,
    )


def _images(rows: Rows) -> SplitItems:
    assert isinstance(rows, Images | ImageFolder)
    keys = rows.keys

    def picture(row: int) -> Array:
        pixels = rows.batch(np.array([row])).inputs[0].numpy()  # [channels, size, size] from -1 to 1
        return np.asarray((pixels.transpose(1, 2, 0) + 1) / 2)

    return SplitItems(rows.targets, lambda row: (keys[row],), picture)
