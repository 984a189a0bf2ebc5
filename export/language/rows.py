"""Rows of data files in text, JSONL or Parquet, each with its place, such as ``line 3``, which errors name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from edge.errors import Raw
from export.errors import DataError

Row = TypeVar("Row", bound=msgspec.Struct)


def lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the lines of a file in UTF-8, without their ends and without a byte order mark.

    Raises:
        DataError: the file cannot be read, or is not in UTF-8.
    """
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                place = f"line {number}"
                yield place, _text(path, place, line, "utf-8-sig" if number == 1 else "utf-8")
    except OSError as error:
        fix = "Correct the path or its permissions."
        raise DataError(f"{path}", given=Raw(error.strerror), expected="a file to read", fix=fix) from None


def json_lines(path: Path, kind: type[Row]) -> Iterator[tuple[str, Row]]:
    """Yield the objects of a file, one a line; blank lines have none.

    Raises:
        DataError: as of :func:`lines`, or a line is no such object.
    """
    for place, line in lines(path):
        if line.strip():
            try:
                row = msgspec.json.decode(line, type=kind)
            except msgspec.DecodeError as error:  # ValidationError is one
                raise malformed(path, place, Raw(error), _fields(kind)) from None
            yield place, row


def parquet_rows(path: Path, kind: type[Row]) -> Iterator[tuple[str, Row]]:
    """Yield the rows of a file, of which only the fields of ``kind`` are read.

    Raises:
        DataError: the file cannot be read, a row is no such object, or pyarrow is not installed.
    """
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError:
        fix = "Install it with pip install pyarrow, or give the data as JSONL."
        raise DataError(f"{path}", given=Raw("Parquet"), expected="the package pyarrow", fix=fix) from None
    place, number = "row 1", 0
    try:
        for batch in ParquetFile(path).iter_batches(columns=list(kind.__struct_fields__)):
            for row in batch.to_pylist():
                number += 1
                place = f"row {number}"
                yield place, msgspec.convert(row, kind)
    except (OSError, KeyError, pyarrow.ArrowException, msgspec.ValidationError) as error:
        raise malformed(path, place, Raw(error), _fields(kind)) from None


def malformed(path: Path, place: str, given: object, expected: str) -> DataError:
    """Return the error of a row that breaks its format."""
    fix = f"Repair or remove the {place.split()[0]}, or get the file again."
    return DataError(f"{path} {place}", given=given, expected=expected, fix=fix)


def _text(path: Path, place: str, line: bytes, encoding: str) -> str:
    try:
        return line.decode(encoding).rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise malformed(path, place, line[error.start : error.end], "text in UTF-8") from None


def _fields(kind: type[msgspec.Struct]) -> str:
    return f"the texts {', '.join(kind.__struct_fields__)}"
