"""Output of all commands: tables for people, JSON for programs, and progress on stderr."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from operator import attrgetter
from typing import Any, TypeVar

import click
import msgspec
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column, Table
from rich.text import Text

from edge.errors import printable

F = TypeVar("F", bound=Callable[..., Any])

#: Interval of the lines of progress where stderr is not a terminal.
LINE_SECONDS = 30.0
#: For progress and remarks, so that stdout holds only the result.
stderr = Console(stderr=True)
#: Pipes and files get a fixed, wide format: 80 columns would fold the tables.
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


def print_fields(title: str, fields: Sequence[str], objects: Iterable[object]) -> None:
    """Print attributes of objects, given as two or more dotted names; the headings are their last parts."""
    print_table(title, [heading(field) for field in fields], map(attrgetter(*fields), objects))


def heading(field: str) -> str:
    """Return the heading of a field: ``p99.9 ms`` for ``latency.p99_9_ms``."""
    return field.rpartition(".")[2].replace("99_9", "99.9").replace("_", " ")


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Return a table; numbers are right-aligned, None is an empty cell, and a dict is listed by key."""
    rows = [list(row) for row in rows]
    made = Table()
    for index, column in enumerate(columns):
        numeric = bool(rows) and all(isinstance(row[index], int | float | None) for row in rows)
        made.add_column(Text(printable(column)), justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        made.add_row(*(Text(_cell(value)) for value in row))  # a str would be markup
    return made


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, dict):
        value = ", ".join(f"{key} {count}" for key, count in sorted(value.items()))
    return f"{value:.4g}" if isinstance(value, float) else printable(str(value))


def remark(text: str) -> None:
    """Print a line on stderr, above a progress bar if there is one."""
    stderr.print(text, markup=False, highlight=False, soft_wrap=True)


def progress() -> Progress:
    """Return a progress bar on stderr: description, position, elapsed and remaining time, and the field ``note``.

    Where stderr is not a terminal, it prints a line every :data:`LINE_SECONDS` and its end.
    """
    return _Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}", table_column=Column()),  # wraps: it must not displace the bar
        console=stderr,
    )


@contextmanager
def working(what: str, steps: int | None = 1) -> Iterator[Callable[..., None]]:
    """Show a bar during the block, None for steps of unknown number; the function sets those done, all, and a note."""
    with progress() as bar:
        task = bar.add_task(what, total=steps, note="")
        yield lambda done, steps, note="": bar.update(task, completed=done, total=steps, note=note)
        bar.update(task, completed=bar.tasks[0].total, note="")


class _Progress(Progress):
    """Bar that prints lines where stderr is not a terminal, on a thread of its own, however long a step takes."""

    _lines: threading.Thread | None = None

    def start(self) -> None:
        super().start()
        if not self.console.is_terminal and self._lines is None:
            self._ended = threading.Event()
            self._lines = threading.Thread(target=self._print_lines, name="progress", daemon=True)
            self._lines.start()

    def stop(self) -> None:
        if self._lines is not None:
            self._ended.set()
            self._lines.join()
            self._lines = None
        super().stop()

    def _print_lines(self) -> None:
        while not self._ended.wait(LINE_SECONDS):
            shown = [task for task in self.tasks if task.visible]
            unfinished = [task for task in shown if not task.finished]
            begun = [task for task in unfinished if task.completed]
            for task in begun[-1:] or unfinished[:1] or shown[-1:]:
                remark(_line(task))


def _line(task: Task) -> str:
    position = f"{task.completed:.0f} of {task.total:.0f}" if task.total is not None else ""
    elapsed = str(timedelta(seconds=round(task.elapsed or 0)))
    left = "" if task.time_remaining is None else f"about {timedelta(seconds=round(task.time_remaining))} left"
    return f"{task.description}: {', '.join(filter(None, (position, task.fields['note'], elapsed, left)))}"
