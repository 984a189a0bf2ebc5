"""GLUE's files in their official TSV layout: no quoting, a header except for CoLA, lines that end at a line feed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from edge.errors import Raw
from export.data.examples import Examples
from export.data.tables import read_tsv
from export.errors import DataError

_FIX = "Get the task's files from gluebenchmark.com/tasks, and name the directory above glue/ with --data-dir."
_LARGEST_SCORE = 5.0


def read_glue(
    path: Path,
    texts: Sequence[str],
    target: str,
    labels: Sequence[str],
    *,
    header: Sequence[str] = (),
    skips_short_rows: bool = False,
) -> Examples:
    """Read one split of a task.

    Args:
        texts: columns of the texts, and ``target`` that of the label.
        labels: as in the files, in the order of their numbers; empty for scores from 0 to 5.
        header: the columns of files without a header; empty if the first line has them.
        skips_short_rows: leave rows out that lack columns; the official QQP has some two dozen.

    Raises:
        DataError: the file is missing, is not UTF-8, or has a malformed line.
    """
    try:
        table = read_tsv(path, header=header, skips_short_rows=skips_short_rows)
    except DataError as error:
        raise DataError(error.subject, given=error.given, expected=error.expected, fix=_FIX) from None
    if not table.columns.keys() >= {*texts, target}:
        expected = f"a header with {', '.join((*texts, target))}"
        raise DataError(f"{path} line 1", given=Raw(", ".join(table.columns)), expected=expected, fix=_FIX)
    rows = zip(*([cell.strip() for cell in table.columns[name]] for name in texts), strict=True)
    targets = [_target(cell, target, labels, table.place(row)) for row, cell in enumerate(table.columns[target])]
    return Examples(tuple(rows), np.array(targets, dtype=np.int64 if labels else np.float32))


def _target(cell: str, target: str, labels: Sequence[str], subject: str) -> float:
    if labels:
        if cell not in labels:
            expected = f"{target} one of {', '.join(labels)}"
            raise DataError(subject, given=cell, expected=expected, fix=_FIX)
        return labels.index(cell)
    return read_score(cell, target, subject, _FIX)


def read_score(cell: str, column: str, subject: str, fix: str) -> float:
    """Return a similarity from 0 to 5; raise a DataError on ``subject`` for another text."""
    try:
        score = float(cell)
    except ValueError:
        score = float("nan")
    if not 0 <= score <= _LARGEST_SCORE:  # false for NaN too
        expected = f"{column} from 0 to {_LARGEST_SCORE:g}"
        raise DataError(subject, given=cell, expected=expected, fix=fix)
    return score
