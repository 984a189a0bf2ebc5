"""What all commands share: a table for people or JSON for programs, and a bar while something takes long."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from edge.errors import printable

F = TypeVar("F", bound=Callable[..., Any])

#: Progress and remarks go to stderr, so that stdout holds nothing but the result.
stderr = Console(stderr=True)
#: Into a pipe or file goes a fixed, wide format: 80 columns would fold the tables.
stdout = Console(width=None if sys.stdout.isatty() else 160)


def json_option(command: F) -> F:
    """Add ``--json`` to a command, as the argument ``as_json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of a table.")(command)


def print_json(result: object) -> None:
    """Print a result (msgspec structs, dicts, lists, numbers) as indented JSON."""
    click.echo(msgspec.json.format(msgspec.json.encode(result), indent=2))


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table; numbers are right-aligned."""
    stdout.print(Text(printable(title), style="bold"))
    stdout.print(table(columns, rows))


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Return a table; numbers are right-aligned, and None is an empty cell among them."""
    rows = [list(row) for row in rows]
    made = Table()
    for index, column in enumerate(columns):
        numeric = bool(rows) and all(isinstance(row[index], int | float | None) for row in rows)
        made.add_column(Text(printable(column)), justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        # Text, not str: a name in brackets is no markup.
        made.add_row(*(Text(_cell(value)) for value in row))
    return made


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else printable(str(value))


def progress() -> Progress:
    """Return a progress bar on stderr: what, how far, how long. Where stderr is no terminal it prints only its end."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
        console=stderr,
    )
