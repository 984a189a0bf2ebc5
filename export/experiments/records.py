"""What all experiments write and read alike: parts on disk, and tables in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from edge.errors import Literally
from export.errors import CheckpointError

T = TypeVar("T")


def read_part(path: Path, kind: type[T]) -> T:
    """Read a part of an experiment; a CheckpointError says that it is malformed."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError) as error:
        fix = "Delete it, and give the same command."
        raise CheckpointError(f"{path}", given=Literally(error), expected="a part", fix=fix) from None


def markdown_table(heads: Sequence[object], rows: Sequence[Sequence[object]], *, texts: int) -> list[str]:
    """Return the lines of a table whose first ``texts`` columns are texts, and whose others are numbers."""
    cells = [heads, ["---"] * texts + ["---:"] * (len(heads) - texts), *rows]
    return ["| " + " | ".join("" if cell is None else str(cell) for cell in row) + " |" for row in cells]
