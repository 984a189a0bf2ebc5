"""What all experiments do alike: compute parts, read them from the disk, and write tables in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from edge.cli.output import remark
from edge.errors import Raw
from export.errors import CheckpointError
from export.training.watch import Watch, watching_each

T = TypeVar("T")
#: Called with the name of a part that has to be computed; what it returns observes that.
Before = Callable[[str], Watch]


def each_part(parts: Callable[[Before], Iterator[T]], number: int) -> Iterator[list[T]]:
    """Yield all parts so far after each of ``number``, under a progress bar; a line names each that is computed."""
    found: list[T] = []
    with watching_each("computing") as watch:

        def before(name: str) -> Watch:
            remark(f"{len(found) + 1} of {number}: {name}")
            return watch(name)

        for part in parts(before):
            found.append(part)
            yield found


def read_part(path: Path, kind: type[T]) -> T:
    """Read a part of an experiment; a CheckpointError says that it is malformed."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError) as error:
        fix = "Delete it, and give the same command."
        raise CheckpointError(f"{path}", given=Raw(error), expected="a part", fix=fix) from None


def markdown_table(heads: Sequence[object], rows: Sequence[Sequence[object]], *, texts: int) -> list[str]:
    """Return the lines of a table whose first ``texts`` columns are texts, and whose others are numbers."""
    cells = [heads, ["---"] * texts + ["---:"] * (len(heads) - texts), *rows]
    return ["| " + " | ".join("" if cell is None else str(cell) for cell in row) + " |" for row in cells]
