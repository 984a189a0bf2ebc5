"""Texts and labels in a user's tables: the columns, their cells, and whether labels are classes or values."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from edge.bundles.fields import MOST_CHARACTERS
from edge.datatypes import Array
from edge.errors import Raw, UsageError, printable
from export.data.tables import DataTable
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
_EQUAL = "that differ: those with equal texts or names are held out together."
_FILL = "Fill the cell, or remove the row."


class Columns(NamedTuple):
    """Names of the columns of the text or both texts, and of the label."""

    texts: tuple[str, ...]
    label: str


class TextRows(NamedTuple):
    """Texts of a split, their labels as text (None if no row has one), and where each row is, for messages."""

    texts: tuple[tuple[str, ...], ...]
    labels: list[str] | None
    places: list[str]


def columns_of(table: DataTable, texts: Sequence[str], label: str | None) -> Columns:
    """Return the columns to read, as given, or recognised by their names where ``texts`` is empty or ``label`` None.

    Raises:
        DataError: a column is missing, or none or several have a name that is recognised.
    """
    for option, name in (*(("--text", name) for name in texts), *((("--label", label),) if label else ())):
        if name not in table.columns:
            raise _wrong(table, option, f"no column {name}", "one of its columns")
    lower = {name.lower(): name for name in table.columns}
    label = label or _only(table, "--label", lower, _LABELS, texts)
    if not texts:
        pairs = [pair for pair in _PAIRS if all(name in lower and lower[name] != label for name in pair)]
        if len(pairs) == 1:
            return Columns(tuple(lower[name] for name in pairs[0]), label)
        texts = (_only(table, "--text", lower, _TEXTS, (label,)),)
    if label in texts or len(set(texts)) < len(texts):
        raise _wrong(table, "--text", f"{', '.join(texts)} with the label {label}", "columns that differ")
    return Columns(tuple(texts), label)


def rows_of(split: str, tables: Sequence[DataTable], columns: Columns) -> TextRows:
    """Return the rows of a split's tables.

    Raises:
        DataError: a column is missing, though a test split needs no labels; a cell is empty or no text; or labels are
            text in some rows and numbers in others.
    """
    texts: list[tuple[str, ...]] = []
    labels: list[str] = []
    numbers: list[bool] = []
    locations: list[str] = []
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
            locations.append(table.place(row))
            texts.append(tuple(_text(*one, locations[-1]) for one in zip(cell, columns.texts, strict=True)))
        if unlabelled:
            continue
        classes, first = table.classes.get(columns.label), len(labels)
        for row, value in enumerate(table.values(columns.label), first):
            labels.append(_label(value, classes, columns.label, locations[row]))
            numbers.append(isinstance(value, int | float) and not isinstance(value, bool) and classes is None)
            if numbers[-1] != numbers[0]:
                kind, other = ("a number", "text") if numbers[-1] else ("text", "a number")
                given, expected = Raw(f"{kind}, {labels[-1]}"), f"{other}, as in {locations[0]}"
                fix = "Write all labels as text, or all as numbers."
                raise DataError(f"{locations[row]} column {columns.label}", given=given, expected=expected, fix=fix)
    return TextRows(tuple(texts), None if unlabelled else labels, locations)


def _only(table: DataTable, option: str, lower: Mapping[str, str], known: Sequence[str], used: Sequence[str]) -> str:
    """Return the only column with one of the known names; ``lower`` has the columns by their names in small letters."""
    columns = [lower[name] for name in known if name in lower and lower[name] not in used]
    if len(columns) == 1:
        return columns[0]
    given = f"{' and '.join(columns)}, which could all be it" if columns else "no column with a common name"
    raise _wrong(table, option, given, f"one of {', '.join(known)}")


def _wrong(table: DataTable, option: str, given: str, expected: str) -> DataError:
    pair = " (twice for pairs)" if option == "--text" else ""
    fix = f"It has the columns {_names(table)}: name one with {option}{pair}."
    return DataError(f"{table.path} {option}", given=Raw(given), expected=expected, fix=fix)


def _names(table: DataTable) -> str:
    return printable(listed(list(table.columns), 20))


def _empty(value: Any) -> bool:
    missing = value is None or (isinstance(value, float) and math.isnan(value))  # pandas writes NaN for nothing
    return missing or (isinstance(value, str) and not value.strip())


def _unknown(label: Any) -> bool:
    """Return whether a label is missing, as programs write that."""
    return _empty(label) or (isinstance(label, str) and label.strip().lower() in _MISSING)


def _unlabelled(table: DataTable, column: str) -> bool:
    """Return whether no row has a label; data sets for competitions have -1 in their test split."""
    if column not in table.columns:
        return True
    values = table.values(column)
    return all(map(_unknown, values)) or (column in table.classes and all(value == -1 for value in values))


def _text(value: Any, column: str, location: str) -> str:
    subject = f"{location} column {column}"
    if _empty(value):
        raise DataError(subject, given=Raw("an empty cell"), expected="text", fix=_FILL)
    if not isinstance(value, str):
        raise DataError(subject, given=value, expected="text", fix="Give another column with --text.")
    return value.strip()


def _label(value: Any, classes: Sequence[str] | None, column: str, location: str) -> str:
    subject, correct = f"{location} column {column}", "Correct it, or remove the row."
    if _empty(value):
        raise DataError(subject, given=Raw("an empty cell"), expected="a label", fix=_FILL)
    if classes is not None:
        if not isinstance(value, int) or not 0 <= value < len(classes):
            raise DataError(
                subject, given=value, expected=f"the number of a class, 0 to {len(classes) - 1}", fix=correct
            )
        return classes[value]
    if _unknown(value):
        fix = f"{correct} A class of this name needs another one."
        raise DataError(subject, given=value, expected="a label", fix=fix)
    if not isinstance(value, str | int | float):
        raise DataError(subject, given=value, expected="text or a number", fix="Give another column with --label.")
    if isinstance(value, float) and math.isinf(value):
        raise DataError(subject, given=value, expected="a finite number", fix=correct)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value).lower() if isinstance(value, bool) else str(value).strip()


#: Numbers with more distinct values than this are values to predict, not classes.
_MOST_NUMBERS = 20
#: As many as a bundle can name.
_MOST_CLASSES = 4096
#: Least examples of a class: a part of them is held out.
_FEWEST = 5
#: Values that a new head learns at usual learning rates.
_LARGEST = 10.0


class Targets(NamedTuple):
    """What to predict: classes by their text in the files, with their names; none for values."""

    values: tuple[str, ...]
    labels: tuple[str, ...]


def targets_of(
    rows: TextRows, path: str, column: str, names: Sequence[str], regression: bool | None, known: Sequence[str]
) -> Targets:
    """Decide what a label column holds.

    Numbers are values if one of them is not whole, or if there are more than twenty distinct ones; all else is classes.

    Args:
        path: of the data, for messages.
        names: of the classes in the order of their numbers, as given; for the classes 0, 1, … other names. Empty sorts
            those in the data.
        regression: as given; None decides.
        known: classes as the file names them, in the order of their numbers; empty where it does not.

    Raises:
        DataError: numbers and text are mixed, there is one class, or a class has too few examples.
        UsageError: names are not those of the data.
    """
    assert rows.labels is not None
    counts = Counter(rows.labels)
    numbers = {value: number for value in counts if (number := _number(value)) is not None}
    if regression is None:
        whole = all(number.is_integer() for number in numbers.values())
        many = bool(numbers) and (len(numbers) > _MOST_NUMBERS or not whole)
        regression = not names and not known and many and len(numbers) > len(counts) // 2
    if regression:
        if names:
            fix = "Leave one of them out."
            raise UsageError("--labels", given=list(names), expected="no names with --regression", fix=fix)
        values_of(rows, column)
        if len(counts) < 2:
            given = Raw(f"the one value {rows.labels[0]} in {len(rows.labels)} rows")
            subject, expected = f"{path} column {column}", "values that differ"
            raise DataError(subject, given=given, expected=expected, fix="Give another --label.")
        return Targets((), ())
    ordered = known or sorted(counts, key=lambda value: (numbers.get(value, math.inf), value))
    values = tuple(value for value in ordered if value in counts)
    labels = tuple(names) or values
    if names:
        numbered = values == tuple(map(str, range(len(names)))) and not set(names) & set(values)
        values = values if numbered else labels
        _check_names(names, values, rows, column)
    first = dict(zip(reversed(rows.labels), reversed(rows.places), strict=True))
    check_classes({value: counts[value] for value in values}, f"{path} column {column}", first)
    return Targets(values, labels)


def check_classes(counts: Mapping[str, int], subject: str, locations: Mapping[str, str] | None = None) -> None:
    """Raise a DataError for a single class, for too many, or for one with fewer than :data:`_FEWEST` examples.

    Args:
        counts: examples of each class.
        locations: where the first example of each class is, if that helps to find it.
    """
    total = sum(counts.values())
    if len(counts) < 2:
        given, expected = Raw(f"the one class {next(iter(counts))!r} in {total} examples"), "two classes or more"
        raise DataError(subject, given=given, expected=expected, fix="Give data with several classes.")
    for name in counts:
        if not 0 < len(name) <= MOST_CHARACTERS:
            given, expected = (
                Raw(f"a class of {len(name):,} characters"),
                f"1 to {MOST_CHARACTERS:,}, as a bundle has",
            )
            raise DataError(subject, given=given, expected=expected, fix="Name the column of the classes with --label.")
    rare = sorted((value for value in counts if counts[value] < _FEWEST), key=lambda value: counts[value])
    if len(counts) > _MOST_CLASSES or len(rare) > len(counts) / 2:
        given = Raw(f"{len(counts):,} classes in {total:,} examples")
        expected = f"{_FEWEST} examples or more of each class"
        if len(counts) > _MOST_CLASSES:
            expected = f"at most {_MOST_CLASSES:,} classes"
        column = ", the column of the classes with --label, or --regression for numbers to predict"
        fix = f"Give more examples{column if locations else ''}."
        raise DataError(subject, given=given, expected=expected, fix=fix)
    if rare:
        first = {value: f" ({location})" for value, location in (locations or {}).items()}
        counted = [f"{counts[value]} of {value!r}{first.get(value, '')}" for value in rare]
        given, expected = Raw(listed(counted, 5)), f"{_FEWEST} examples or more of each class"
        fix = "Give more examples, leave the class out, or correct the label if it is misspelt."
        raise DataError(subject, given=given, expected=expected, fix=fix)


def check_learnt(targets: Array, values: Sequence[str], path: str) -> None:
    """Raise a DataError for a class of which no example is among the ``targets`` [n] to learn."""
    for value, count in zip(values, np.bincount(targets, minlength=len(values)), strict=True):
        if not count:
            given, expected = Raw("no examples left to train on"), "some beside those that are held out"
            raise DataError(
                f"{path} class {value!r}", given=given, expected=expected, fix=f"Give more examples of it {_EQUAL}"
            )


def check_enough(learnt: Array, held_out: Array, path: str, distinct: int = 1) -> None:
    """Raise a DataError if too few targets [n] are left to train on, or distinct ones [m] to measure with.

    A correlation needs three that are distinct.
    """
    number = len(np.unique(held_out))
    if len(learnt) < _FEWEST or number < distinct:
        given = Raw(f"{len(learnt)} examples to train on, and {number} distinct targets held out")
        expected = f"{_FEWEST} and {distinct} at least"
        raise DataError(path, given=given, expected=expected, fix=f"Give more examples {_EQUAL}")


def class_metrics(classes: Sequence[str]) -> tuple[str, ...]:
    """Return the metrics of a task with classes."""
    return "accuracy", "macro_f1", *(("matthews",) if len(classes) == 2 else ())


def class_numbers(
    rows: TextRows, column: str, values: Sequence[str], way_out: str = "add examples of this class to the training set"
) -> Array:
    """Return the number of each row's class, int64 [n]; raise a DataError for a label that is none of the classes."""
    assert rows.labels is not None
    numbers = {value: number for number, value in enumerate(values)}
    for label, location in zip(rows.labels, rows.places, strict=True):
        if label not in numbers:
            fix = f"Correct the label, remove the row, or {way_out}."
            expected = f"one of the {len(values)} classes to learn: {listed(values, 20)}"
            raise DataError(f"{location} column {column}", given=label, expected=expected, fix=fix)
    return np.array([numbers[label] for label in rows.labels], dtype=np.int64)


def values_of(rows: TextRows, column: str) -> Array:
    """Return the value of each row, float32 [n]; raise a DataError for a label that is no number, or too large."""
    assert rows.labels is not None
    values = []
    for label, location in zip(rows.labels, rows.places, strict=True):
        number = _number(label)
        if number is None or abs(number) > _LARGEST:
            expected = "a number" if number is None else f"a number from {-_LARGEST:g} to {_LARGEST:g}"
            fix = f"{'Correct it' if number is None else 'Divide the column by a constant'}, or give --classification."
            raise DataError(f"{location} column {column}", given=label, expected=expected, fix=fix)
        values.append(number)
    return np.array(values, dtype=np.float32)


def _check_names(names: Sequence[str], values: Sequence[str], rows: TextRows, column: str) -> None:
    if len(set(names)) < len(names) or len(names) < 2 or not all(0 < len(name) <= MOST_CHARACTERS for name in names):
        expected = f"two names or more that differ, of 1 to {MOST_CHARACTERS:,} characters"
        raise UsageError("--labels", given=list(names), expected=expected, fix="Correct them.")
    class_numbers(rows, column, values, "give --labels all classes as the column has them, or new names for 0, 1, …")


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
