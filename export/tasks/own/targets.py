"""Classes or values: what a label column holds, and the targets for training."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from edge.bundles.fields import MOST_CHARACTERS
from edge.datatypes import Array
from edge.errors import Raw, UsageError
from export.data.columns import Rows
from export.errors import DataError, listed

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
    rows: Rows, path: str, column: str, names: Sequence[str], regression: bool | None, known: Sequence[str]
) -> Targets:
    """Decide what a label column holds.

    Numbers are values if one of them is not whole, or if there are more than twenty distinct ones; all else is classes.

    Args:
        path: of the data, for messages.
        names: of the classes in the order of their numbers, as given; for the classes 0, 1, … other names. Empty sorts
            those in the data.
        regression: as given; None decides.
        known: classes in the order of their numbers, as the file names them; empty where it does not.

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
            _refuse_one(f"{path} column {column}", rows)
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


def check_classes(counts: Mapping[str, int], subject: str, places: Mapping[str, str] | None = None) -> None:
    """Raise a DataError for a single class, for too many, or for one with fewer than :data:`_FEWEST` examples.

    Args:
        counts: examples of each class.
        places: where the first example of each class is, if that helps to find it.
    """
    total = sum(counts.values())
    if len(counts) < 2:
        given, expected = Raw(f"the one class {next(iter(counts))!r} in {total} examples"), "two classes or more"
        raise DataError(subject, given=given, expected=expected, fix="Give data with several classes.")
    for name in counts:
        if not 0 < len(name) <= MOST_CHARACTERS:
            given = Raw(f"a class of {len(name):,} characters")
            fix = "Name the column of the classes with --label."
            raise DataError(subject, given=given, expected=f"1 to {MOST_CHARACTERS:,}, as a bundle has", fix=fix)
    rare = sorted((value for value in counts if counts[value] < _FEWEST), key=lambda value: counts[value])
    if len(counts) > _MOST_CLASSES or len(rare) > len(counts) / 2:
        given = Raw(f"{len(counts):,} classes in {total:,} examples")
        expected = f"{_FEWEST} examples or more of each class"
        if len(counts) > _MOST_CLASSES:
            expected = f"at most {_MOST_CLASSES:,} classes"
        column = ", the column of the classes with --label, or --regression for numbers to predict"
        fix = f"Give more examples{column if places else ''}."
        raise DataError(subject, given=given, expected=expected, fix=fix)
    if rare:
        first = {value: f" ({place})" for value, place in (places or {}).items()}
        found = [f"{counts[value]} of {value!r}{first.get(value, '')}" for value in rare]
        given, expected = Raw(listed(found, 5)), f"{_FEWEST} examples or more of each class"
        fix = "Give more examples, leave the class out, or correct the label if it is misspelt."
        raise DataError(subject, given=given, expected=expected, fix=fix)


def check_learnt(targets: Array, values: Sequence[str], path: str) -> None:
    """Raise a DataError for a class of which no example is among the ``targets`` [n] to learn."""
    for value, count in zip(values, np.bincount(targets, minlength=len(values)), strict=True):
        if not count:
            given, expected = Raw("no examples left to train on"), "some beside those that are held out"
            fix = "Give more examples of it that differ: those with equal texts or names are held out together."
            raise DataError(f"{path} class {value!r}", given=given, expected=expected, fix=fix)


def check_enough(learnt: Array, held_out: Array, path: str, distinct: int = 1) -> None:
    """Raise a DataError if too few examples are left to train on, or to measure with.

    Args:
        learnt: targets [n], and those that are held out [m].
        distinct: least number of distinct targets that are held out: a correlation needs three.
    """
    found = len(np.unique(held_out))
    if len(learnt) < _FEWEST or found < distinct:
        given = Raw(f"{len(learnt)} examples to train on, and {found} distinct targets held out")
        fix = "Give more examples that differ: those with equal texts or names are held out together."
        raise DataError(path, given=given, expected=f"{_FEWEST} and {distinct} at least", fix=fix)


def class_metrics(classes: Sequence[str]) -> tuple[str, ...]:
    """Return the metrics of a task with classes."""
    return "accuracy", "macro_f1", *(("matthews",) if len(classes) == 2 else ())


def class_numbers(
    rows: Rows, column: str, values: Sequence[str], way_out: str = "add examples of this class to the training set"
) -> Array:
    """Return the number of each row's class, int64 [n].

    Raises:
        DataError: a label is none of the classes.
    """
    assert rows.labels is not None
    numbers = {value: number for number, value in enumerate(values)}
    for label, place in zip(rows.labels, rows.places, strict=True):
        if label not in numbers:
            fix = f"Correct the label, remove the row, or {way_out}."
            expected = f"one of the {len(values)} classes to learn: {listed(values, 20)}"
            raise DataError(f"{place} column {column}", given=label, expected=expected, fix=fix)
    return np.array([numbers[label] for label in rows.labels], dtype=np.int64)


def values_of(rows: Rows, column: str) -> Array:
    """Return the value of each row, float32 [n].

    Raises:
        DataError: a label is not a number, or is too large.
    """
    assert rows.labels is not None
    found = []
    for label, place in zip(rows.labels, rows.places, strict=True):
        number = _number(label)
        if number is None or abs(number) > _LARGEST:
            expected = "a number" if number is None else f"a number from {-_LARGEST:g} to {_LARGEST:g}"
            fix = f"{'Correct it' if number is None else 'Divide the column by a constant'}, or give --classification."
            raise DataError(f"{place} column {column}", given=label, expected=expected, fix=fix)
        found.append(number)
    return np.array(found, dtype=np.float32)


def _check_names(names: Sequence[str], values: Sequence[str], rows: Rows, column: str) -> None:
    if len(set(names)) < len(names) or len(names) < 2 or not all(0 < len(name) <= MOST_CHARACTERS for name in names):
        expected = f"two names or more that differ, of 1 to {MOST_CHARACTERS:,} characters"
        raise UsageError("--labels", given=list(names), expected=expected, fix="Correct them.")
    class_numbers(rows, column, values, "give --labels all classes as the column has them, or new names for 0, 1, …")


def _refuse_one(subject: str, rows: Rows) -> None:
    assert rows.labels is not None
    given = Raw(f"the one value {rows.labels[0]} in {len(rows.labels)} rows")
    raise DataError(subject, given=given, expected="values that differ", fix="Give another --label.")


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
