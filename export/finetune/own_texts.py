"""Own texts, or pairs of texts, as a task; and the description of own data of any kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from edge.errors import Raw, UsageError
from edge.files import sha256
from export.data.columns import (
    Columns,
    TextRows,
    check_enough,
    check_learnt,
    class_metrics,
    class_numbers,
    columns_of,
    rows_of,
    targets_of,
    values_of,
)
from export.data.examples import DEV_SEED, DEV_SHARE, TRAIN, Examples, Splits
from export.data.question_tables import is_questions
from export.data.tables import DEV, DataFiles, DataTable, find, read_table
from export.errors import DataError
from export.finetune.image_tasks import describe_images, own_image_task
from export.finetune.questions import describe_questions, own_questions
from export.finetune.task import Task
from export.finetune.text_tasks import SentenceTask, held_rows
from export.training.runs import SPLIT, DataFile, OwnData, SplitVersion


class ColumnChoices(NamedTuple):
    """What a user says about own tables; None and empty for what the data decide.

    Attributes:
        texts: columns, two for pairs.
        regression: False for classes.
    """

    texts: tuple[str, ...] = ()
    label: str | None = None
    labels: tuple[str, ...] = ()
    regression: bool | None = None


class OwnTextTask(SentenceTask, frozen=True, kw_only=True):
    """A user's own texts, with classes or values."""

    own_data: OwnData

    @property
    def origin(self) -> str:
        return self.own_data.origin

    @property
    def description(self) -> str:
        answers = self.labels if len(self.labels) <= 10 else (*self.labels[:10], "…")
        return f"{self.name}: {' or '.join(answers) or f'a value of {self.target}'}"

    def examples(self, data_dir: str | Path) -> Splits:
        """Read the files, which must be those of the training."""
        data = self.own_data.located(data_dir)
        found, tables = _read(data)
        columns = Columns(self.texts, self.target)
        rows = {name: rows_of(name, of_split, columns) for name, of_split in tables.items()}
        self.own_data.check_unchanged(_files(data, found, tables, rows), data.path)
        return _splits(rows, self.target, data.values, self.split)

    def files(self, data_dir: str | Path) -> tuple[DataFile, ...]:
        return self.own_data.files


def own_task(data: OwnData, split: SplitVersion = SPLIT) -> Task:
    """Return the task of described data; ``split`` is that of texts."""
    if data.images:
        return own_image_task(data)
    if data.spans:
        return own_questions(data)
    return OwnTextTask(
        name=data.name,
        texts=data.texts,
        target=data.label,
        labels=data.labels,
        metrics=class_metrics(data.labels) if data.labels else ("pearson", "spearman"),
        headline="macro_f1" if data.labels else "spearman",
        own_data=data,
        split=split,
    )


def describe(
    path: Path,
    dev: Path | None,
    choices: ColumnChoices,
    on_image: Callable[[int, int], None] = lambda done, images: None,
    split: SplitVersion = SPLIT,
) -> OwnData:
    """Return the description of own data after all of them were read and checked for what a training needs.

    Args:
        path: a table, a directory with tables, one that ``datasets`` saved, or a folder of images.
        dev: the same for the published metrics; None for what ``path`` has, or else a part of the training set.
        on_image: called with the number of images done and of all.
        split: how dev and the hold-out of texts are drawn.

    Raises:
        DataError: the data are missing or malformed, or too few.
        UsageError: a choice does not suit the data.
    """
    images = find(path, dev).images
    data = OwnData(path=str(path.resolve()), images=images, dev=None if dev is None else str(dev.resolve()))
    if not images and choices == ColumnChoices() and is_questions(find(path, dev).splits[TRAIN]):
        return describe_questions(data)
    if not images:
        return _describe_texts(data, choices, split)
    if choices != ColumnChoices():
        fix = "Leave --text, --label, --labels, --regression and --classification out."
        expected = "tables with these options; the classes of images are their directories"
        raise UsageError("--data", given=str(path), expected=expected, fix=fix)
    return describe_images(data, on_image)


def _describe_texts(data: OwnData, choices: ColumnChoices, split: SplitVersion) -> OwnData:
    found, tables = _read(data)
    columns = columns_of(tables[TRAIN][0], choices.texts, choices.label)
    rows = {name: rows_of(name, of_split, columns) for name, of_split in tables.items()}
    for name in (TRAIN, DEV[0]) if data.dev else (TRAIN,):  # other splits may have none
        if rows[name].labels is None:
            fix = "Give labelled data, or name another column with --label."
            expected = f"labels in the column {columns.label}"
            raise DataError(f"{tables[name][0].path}", given=Raw("none"), expected=expected, fix=fix)
    known = tables[TRAIN][0].classes.get(columns.label, ())
    targets = targets_of(rows[TRAIN], data.path, columns.label, choices.labels, choices.regression, known)
    splits = _splits(rows, columns.label, targets.values, split)
    if targets.values:
        check_learnt(splits.train.targets, targets.values, data.path)
    check_enough(splits.train.targets, splits.holdout.targets, data.path, distinct=1 if targets.values else 3)
    return msgspec.structs.replace(
        data,
        texts=columns.texts,
        label=columns.label,
        values=targets.values,
        labels=targets.labels,
        files=_files(data, found, tables, rows),
        splits=splits.rows,
    )


def _read(data: OwnData) -> tuple[DataFiles, dict[str, list[DataTable]]]:
    found = find(Path(data.path), None if data.dev is None else Path(data.dev))
    return found, {name: [read_table(path) for path in paths] for name, paths in found.splits.items()}


def _splits(rows: Mapping[str, TextRows], column: str, values: Sequence[str], split: SplitVersion) -> Splits:
    """Return the examples; without labelled rows beside the training set, a part of it becomes dev."""
    examples = {
        name: Examples(one.texts, class_numbers(one, column, values) if values else values_of(one, column))
        for name, one in rows.items()
        if one.labels is not None
    }
    train = examples.pop(TRAIN)
    if not examples:
        held = held_rows(train, split, DEV_SHARE, DEV_SEED)
        train, examples = train.take(~held), {"dev": train.take(held)}
    held = held_rows(train, split)
    return Splits(train.take(~held), train.take(held), examples)


def _files(
    data: OwnData, found: DataFiles, tables: Mapping[str, Sequence[DataTable]], rows: Mapping[str, TextRows]
) -> tuple[DataFile, ...]:
    return tuple(
        DataFile("" if rows[name].labels is None else name, data.name_of(path), table.rows, sha256(path.read_bytes()))
        for name, paths in found.splits.items()
        for path, table in zip(paths, tables[name], strict=True)
    )
