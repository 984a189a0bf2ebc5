"""The one writer of tables: on the terminal, in Markdown, and behind their markers in documents."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from edge.cli.output import print_table
from edge.files import write_whole

if TYPE_CHECKING:
    from export.training.runs import RunMetrics

#: Behind a marker: a note of one line, if the table has one, and the rows.
_BODY = r"\n(?:[^|\n].*\n\n)?(?:\|.*\n)+"


class Table(NamedTuple):
    """A table of a report: on the terminal, in Markdown and as JSON.

    Attributes:
        rows: floats are written with four digits; what has ``value`` and ``interval`` with both, with two digits of
            half the interval, but at most four of its middle, and differences (which
            :class:`export.training.intervals.Difference` are) with a sign.
        texts: the first columns, which are texts; the others are numbers, at the right in Markdown.
        note: a paragraph before it.
    """

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[object]]
    texts: int = 1
    note: str = ""

    def markdown(self) -> list[str]:
        """Return the lines of the table with its note, without its title."""
        rule = ["---"] * self.texts + ["---:"] * (len(self.heads) - self.texts)
        rows = [self.heads, rule, *([cell_text(cell) for cell in row] for row in self.rows)]
        return [*((self.note, "") if self.note else ()), *("| " + " | ".join(row) + " |" for row in rows)]

    def print(self) -> None:
        """Print the table on stdout."""
        is_plain = (int, float, type(None))
        rows = [[cell if isinstance(cell, is_plain) else cell_text(cell) for cell in row] for row in self.rows]
        print_table(self.title, self.heads, rows)


def cell_text(cell: object) -> str:
    """Return the text of a cell of a :class:`Table`."""
    if isinstance(cell, float):
        return f"{cell:.4g}"
    if hasattr(cell, "value") and hasattr(cell, "interval"):
        from export.training.intervals import Difference, with_interval

        sign = "+" if isinstance(cell, Difference) else ""
        if not cell.interval or (half := (cell.interval[1] - cell.interval[0]) / 2) <= 0:
            return with_interval(cell.value, cell.interval, lambda number: f"{round(number, 9) + 0:{sign}.4g}")
        size = max(half, abs(sum(cell.interval)) / 2)
        digits = min(max(0, 1 - math.floor(math.log10(half))), 3 - math.floor(math.log10(size)))
        form = f".{digits}f" if 1e-4 <= size < 1e4 else ".4g"
        return with_interval(cell.value, cell.interval, lambda number: f"{round(number, digits) + 0:{sign}{form}}")
    return "" if cell is None else str(cell)


def with_tables(page: str, command: str, tables: Mapping[str, Table]) -> str:
    """Return a document with each table anew behind its marker, ``<!-- table: RECORD by COMMAND -->``.

    Args:
        tables: by record, relative to the repository; of several tables from one record, each has a name behind a #.

    Raises:
        ValueError: the document has no such marker with a table, or several, or another one of the command.
    """
    marked = re.findall(rf"^<!-- table: (.+) by {re.escape(command)} -->$", page, re.MULTILINE)
    if others := sorted({*marked} - tables.keys()):
        raise ValueError(f"the document has a table behind {others[0]} by {command}, which makes none")
    for record, table in tables.items():
        marker = f"<!-- table: {record} by {command} -->"
        around = re.split(re.escape(f"{marker}\n") + _BODY, page)
        if len(around) != 2:
            raise ValueError(f"the document has {len(around) - 1} tables behind {marker}")
        page = "\n".join([marker, "", *table.markdown(), ""]).join(around)
    return page


def write_pages(pages: Mapping[Path, str]) -> None:
    """Write documents, each whole or not at all."""
    for path, page in pages.items():
        write_whole(path, page.encode())


def print_measures(name: str, runs: str, metrics: RunMetrics) -> None:
    """Print the measures of a model, and the directories of its runs."""
    from export.training.intervals import bounds_of

    rows = [
        (one.split, one.metric.replace("_", " "), one.value, bounds_of(one.interval, "{:.4g}".format), one.n)
        for one in metrics.measures
    ]
    title = f"{name}: {metrics.parameters:,} parameters, {metrics.epochs} epochs, {metrics.seconds:.0f} s, in {runs}"
    print_table(title, ("split", "metric", "value", "95 % interval", "items"), rows)
