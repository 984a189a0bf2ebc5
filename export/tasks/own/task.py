"""A user's own data as a task: described once, when a run begins, and rebuilt from the run's record."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from edge.errors import UsageError
from export.data import images, texts
from export.data.tables import find
from export.finetune.own_texts import Choices
from export.finetune.task import Task
from export.training.runs import OwnData


def describe(
    path: Path, dev: Path | None, choices: Choices, on_image: Callable[[int, int], None] = lambda done, images: None
) -> OwnData:
    """Return the description of own data after all of them were read and checked.

    Args:
        path: a table, a directory with tables, one that ``datasets`` saved, or a folder of images.
        dev: the same for the published metrics; None for what ``path`` has, or else a part of the training set.
        on_image: called with the number of images done and of all.

    Raises:
        DataError: the data are missing or malformed, or too few.
        UsageError: a choice does not suit the data.
    """
    found = find(path, dev)
    data = OwnData(path=str(path.resolve()), images=found.images, dev=None if dev is None else str(dev.resolve()))
    if not data.images:
        return texts.describe(data, choices)
    if choices != Choices():
        fix = "Leave --text, --label, --labels, --regression and --classification out."
        given, expected = str(path), "tables with these options; the classes of images are their directories"
        raise UsageError("--data", given=given, expected=expected, fix=fix)
    return images.describe(data, on_image)


def own_task(data: OwnData) -> Task:
    """Return the task of described data."""
    return images.image_task(data) if data.images else texts.text_task(data)
