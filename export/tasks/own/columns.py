"""The columns of a user's table: recognised by common names, or given; and their cells."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from edge.errors import Raw, printable
from export.data.tables import Table
from export.errors import DataError, listed

_TEXTS = ("text", "sentence", "review", "comment", "content", "message", "document", "body", "tweet", "headline")
_PAIRS = (
    ("text_a", "text_b"),
    ("text1", "text2"),
    ("text", "text_pair"),
    ("sentence1", "sentence2"),
    ("sentence_a", "sentence_b"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("premise", "hypothesis"),
)
_LABELS = ("label", "target", "score", "class", "category", "sentiment", "rating", "stars")
#: Labels, in small letters, that programs write for a missing one. "None" and "NA" are not among them: they also name
#: classes. Classes that a data set declares may have these names: nan is a language, for example.
_MISSING = ("nan", "<na>", "#n/a", "null")
#: Splits that have labels.
_LABELLED = ("train", "dev", "validation", "valid", "val")


class Columns(NamedTuple):
    """Names of the columns of the text or both texts, and of the label."""

    texts: tuple[str, ...]
    label: str


class Rows(NamedTuple):
    """Rows of a split.

    Attributes:
        labels: as text; None if no row has one.
        places: where each row is, for messages.
    """

    texts: tuple[tuple[str, ...], ...]
    labels: list[str] | None
    places: list[str]


def columns_of(table: Table, texts: Sequence[str], label: str | None) -> Columns:
    """Return the columns to read.

    Args:
        texts: those that were given, one or two; empty to recognise them.
        label: the one that was given; None to recognise it.

    Raises:
        DataError: a column is missing, or none or several have a name that is recognised.
    """
    for option, name in (*(("--text", name) for name in texts), *((("--label", label),) if label else ())):
        if name not in table.columns:
            raise _wrong(table, option, f"no column {name}", "one of its columns")
    lower = {name.lower(): name for name in table.columns}
    if not label:
        found = [lower[name] for name in _LABELS if name in lower and lower[name] not in texts]
        label = _only(table, "--label", found, _LABELS)
    if not texts:
        pairs = [pair for pair in _PAIRS if all(name in lower and lower[name] != label for name in pair)]
        if len(pairs) == 1:
            return Columns(tuple(lower[name] for name in pairs[0]), label)
        found = [lower[name] for name in _TEXTS if name in lower and lower[name] != label]
        texts = (_only(table, "--text", found, _TEXTS),)
    if label in texts or len(set(texts)) < len(texts):
        raise _wrong(table, "--text", f"{', '.join(texts)} with the label {label}", "columns that differ")
    return Columns(tuple(texts), label)


def rows_of(split: str, tables: Sequence[Table], columns: Columns) -> Rows:
    """Return the rows of a split's tables.

    Raises:
        DataError: a column is missing, though a test split needs no labels; a cell is empty or no text; or labels are
            text in some rows and numbers in others.
    """
    texts: list[tuple[str, ...]] = []
    labels: list[str] = []
    numbers: list[bool] = []
    places: list[str] = []
    unlabelled = all(_unlabelled(table, columns.label) for table in tables)
    without = [table for table in tables if columns.label not in table.columns]
    if without and (split in _LABELLED or not unlabelled):
        there = Raw(f"the columns {_names(without[0])}")
        expected = f"the label column {columns.label}, as in the training set"
        fix = f"Rename the column that holds the labels to {columns.label}."
        if split in _LABELLED[1:]:
            fix += " A split without labels is called test."
        raise DataError(f"{without[0].path}", given=there, expected=expected, fix=fix)
    for table in tables:
        for name in columns.texts:
            if name not in table.columns:
                raise _wrong(table, "--text", f"no column {name}", "the columns of the training set")
        cells = zip(*(table.values(name) for name in columns.texts), strict=True)
        for row, cell in enumerate(cells):
            places.append(table.place(row))
            texts.append(tuple(_text(*one, places[-1]) for one in zip(cell, columns.texts, strict=True)))
        if unlabelled:
            continue
        classes, first = table.classes.get(columns.label), len(labels)
        for row, value in enumerate(table.values(columns.label), first):
            labels.append(_label(value, classes, columns.label, places[row]))
            numbers.append(isinstance(value, int | float) and not isinstance(value, bool) and classes is None)
            if numbers[-1] != numbers[0]:
                given, expected = ("a number", "text") if numbers[-1] else ("text", "a number")
                fix = "Write all labels as text, or all as numbers."
                raise DataError(
                    f"{places[row]} column {columns.label}",
                    given=Raw(f"{given}, {labels[-1]}"),
                    expected=f"{expected}, as in {places[0]}",
                    fix=fix,
                )
    return Rows(tuple(texts), None if unlabelled else labels, places)


def _only(table: Table, option: str, found: Sequence[str], known: Sequence[str]) -> str:
    if len(found) == 1:
        return found[0]
    given = f"{' and '.join(found)}, which could all be it" if found else "no column with a common name"
    raise _wrong(table, option, given, f"one of {', '.join(known)}")


def _wrong(table: Table, option: str, given: str, expected: str) -> DataError:
    pair = " (twice for pairs)" if option == "--text" else ""
    fix = f"It has the columns {_names(table)}: name one with {option}{pair}."
    return DataError(f"{table.path} {option}", given=Raw(given), expected=expected, fix=fix)


def _names(table: Table) -> str:
    return printable(listed(list(table.columns), 20))


def _empty(value: Any) -> bool:
    missing = value is None or (isinstance(value, float) and math.isnan(value))  # pandas writes NaN for nothing
    return missing or (isinstance(value, str) and not value.strip())


def _unknown(label: Any) -> bool:
    """Return whether a label is missing, as programs write that."""
    return _empty(label) or (isinstance(label, str) and label.strip().lower() in _MISSING)


def _unlabelled(table: Table, column: str) -> bool:
    """Return whether no row has a label; data sets for competitions have -1 in their test split."""
    if column not in table.columns:
        return True
    values = table.values(column)
    return all(map(_unknown, values)) or (column in table.classes and all(value == -1 for value in values))


def _text(value: Any, column: str, place: str) -> str:
    if _empty(value) or not isinstance(value, str):
        given: object = Raw("an empty cell") if _empty(value) else value
        fix = "Fill the cell, or remove the row." if _empty(value) else "Give another column with --text."
        raise DataError(f"{place} column {column}", given=given, expected="text", fix=fix)
    return value.strip()


def _label(value: Any, classes: Sequence[str] | None, column: str, place: str) -> str:
    subject, expected, fix = f"{place} column {column}", "a label", "Fill the cell, or remove the row."
    if _empty(value):
        raise DataError(subject, given=Raw("an empty cell"), expected=expected, fix=fix)
    if classes is not None:
        if not isinstance(value, int) or not 0 <= value < len(classes):
            raise DataError(subject, given=value, expected=f"the number of a class, 0 to {len(classes) - 1}", fix=fix)
        return classes[value]
    if _unknown(value):
        fix = "Correct it, or remove the row. A class of this name needs another one."
        raise DataError(subject, given=value, expected=expected, fix=fix)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and math.isinf(value):
        raise DataError(subject, given=value, expected="a finite number", fix="Correct it, or remove the row.")
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, str | int | float):
        return str(value).strip()
    raise DataError(subject, given=value, expected="text or a number", fix="Give another column with --label.")
