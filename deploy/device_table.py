"""Markdown tables of what boards measured.

    python deploy/device_table.py RECORD.json...                          prints them
    python deploy/device_table.py --into edge/README.md [RECORD.json...]  replaces those of a document

``fewheads bench --on-device --out FILE`` writes records. Without RECORD, ``deploy/device_records`` has those of the
documents. A record of a run that throttled is refused, and a document takes only a Jetson's.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from edge.errors import FewheadsError
from edge.load.device_table import insert, markdown, read_record

RECORDS = Path(__file__).parent / "device_records"


@click.command()
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path), metavar="[RECORD...]")
@click.option("--into", type=click.Path(path_type=Path, exists=True), help="A document with the marks of a table.")
def table(paths: tuple[Path, ...], into: Path | None) -> None:
    """Print tables of each RECORD, or write them into a document."""
    records = [read_record(path) for path in paths or sorted(RECORDS.glob("*.json"))]
    if into:
        insert(into, records)
    else:
        click.echo(markdown(records))


if __name__ == "__main__":
    try:
        table.main(standalone_mode=True)
    except FewheadsError as error:
        click.echo(f"device_table.py: {error}", err=True)
        sys.exit(error.exit_code)
