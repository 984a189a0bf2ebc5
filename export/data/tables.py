"""Tables with named columns: CSV, TSV, JSON Lines, Parquet and Arrow."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from edge.errors import Raw
from export.data.examples import HOLDOUT, TRAIN
from export.data.unlabelled import ENDINGS as IMAGES
from export.data.unlabelled import OTHER_ENDINGS
from export.errors import DataError, listed
from export.training.runs import StructT

#: A key of Arrow's schema metadata, for the features of Hugging Face's ``datasets``.
_FEATURES = b"huggingface"


class _Info(msgspec.Struct, frozen=True):
    features: dict[str, Any] = {}  # of nested columns, lists


class _ClassLabel(msgspec.Struct, frozen=True):
    names: tuple[str, ...]


class _Metadata(msgspec.Struct, frozen=True):
    info: _Info = _Info()


class DataTable(NamedTuple):
    """A table in memory.

    Attributes:
        columns: lists, or columns of Arrow, by name.
        lines: of the file where each row begins; None for formats without lines.
        classes: names of class numbers, by column, where the file has them.
    """

    path: Path
    columns: Mapping[str, Any]
    lines: Sequence[int] | None
    classes: Mapping[str, tuple[str, ...]]

    @property
    def rows(self) -> int:
        """The number of rows."""
        return len(next(iter(self.columns.values()), ()))

    def values(self, column: str) -> list[Any]:
        """Return the cells of a column; raise a DataError for text that is not UTF-8."""
        column_cells = self.columns[column]
        try:
            return column_cells if isinstance(column_cells, list) else list(column_cells.to_pylist())
        except UnicodeDecodeError as error:
            subject, fix = f"{self.path} column {column}", "Write the file again, with text in UTF-8."
            raise DataError(subject, given=Raw(error), expected="UTF-8", fix=fix) from None

    def place(self, row: int) -> str:
        """Return the file and the line of a row, or its number from 1, for messages."""
        return f"{self.path} line {self.lines[row]}" if self.lines is not None else f"{self.path} row {row + 1}"


def read_table(path: Path) -> DataTable:
    """Read a table; the ending of the file's name decides its format.

    Raises:
        DataError: the ending is unknown, or the file is missing, malformed, or not UTF-8.
    """
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        given = Raw(f"a file {path.suffix or 'without an ending'}")
        fix = "Save the table in one of these formats, or rename the file if it has one of them. "
        fix += "Texts without labels need a run of 'fewheads import' as --teacher."
        raise DataError(f"{path}", given=given, expected=KNOWN, fix=fix)
    return reader(path)


def _read_csv(path: Path) -> DataTable:
    text = _text(path)
    # Spreadsheets write semicolons where the comma is the decimal point; a heading has no commas of its own then.
    heading = text.partition("\n")[0]
    delimiter = ";" if heading.count(";") > heading.count(",") else ","
    return _with_heading(path, _csv_records(path, text, delimiter), "Quote cells that hold the delimiter.")


def read_tsv(path: Path, *, header: Sequence[str] = (), skips_short_rows: bool = False) -> DataTable:
    """Read a table without quotes.

    Args:
        header: names of the columns of a file without a heading.
        skips_short_rows: leave rows out that lack cells.

    Raises:
        DataError: the file is missing, malformed, or not UTF-8.
    """
    # Not splitlines(), and no text mode: cells may hold U+2028 or a lone "\r".
    lines = (line.removesuffix("\r") for line in _text(path).split("\n"))
    records = ((number, line.split("\t")) for number, line in enumerate(lines, 1) if line)
    names = header or next(records, (1, [""]))[1]
    whole = ((line, cells) for line, cells in records if not skips_short_rows or len(cells) >= len(names))
    return _with_heading(path, chain([(1, [*names])], whole), "Quotes mean nothing in .tsv.")


def _csv_records(path: Path, text: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the line where each record begins, and its cells; empty lines are left out."""
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))  # documents may be longer than the default, 128 Ki
    # newline="": quoted cells keep their line ends.
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    line = 1
    try:
        for cells in reader:
            if cells:
                yield line, cells
            line = reader.line_num + 1
    except csv.Error as error:
        fix = "Repair it: a quote within a quoted cell is doubled, and a quoted cell must end."
        raise DataError(f"{path} line {line}", given=Raw(error), expected="a row of CSV", fix=fix) from None


def _with_heading(path: Path, records: Iterator[tuple[int, list[str]]], rule: str) -> DataTable:
    """Return the table of records, of which the first has the names of the columns; ``rule`` is for the message."""
    names = [cell.strip() for cell in next(records, (1, []))[1]]
    _check_names(path, names)
    columns: list[list[str]] = [[] for _ in names]
    lines = []
    for line, cells in records:
        if len(cells) != len(names):
            given, expected = Raw(f"{len(cells)} cells"), f"{len(names)}, as in the heading"
            raise DataError(f"{path} line {line}", given=given, expected=expected, fix=f"Repair the line. {rule}")
        lines.append(line)
        for column, cell in zip(columns, cells, strict=True):
            column.append(cell)
    return _checked(DataTable(path, dict(zip(names, columns, strict=True)), lines, {}))


def _read_jsonl(path: Path) -> DataTable:
    decoder = msgspec.json.Decoder(dict[str, Any])
    rows, lines = [], []
    for number, line in enumerate(_text(path).split("\n"), 1):  # not splitlines(): texts may hold U+2028
        if not line.strip():
            continue
        try:
            rows.append(decoder.decode(line))
        except msgspec.DecodeError as error:  # ValidationError is one too
            given, fix = Raw(error), "Repair it; JSON Lines has one object on each line."
            raise DataError(f"{path} line {number}", given=given, expected="a JSON object", fix=fix) from None
        lines.append(number)
    names = dict.fromkeys(name for row in rows for name in row)
    return _checked(DataTable(path, {name: [row.get(name) for row in rows] for name in names}, lines, {}))


def _read_parquet(path: Path) -> DataTable:
    from pyarrow import parquet

    return _from_arrow(path, lambda: parquet.read_table(path))


def _read_arrow(path: Path) -> DataTable:
    import pyarrow

    def read() -> Any:
        with pyarrow.OSFile(str(path)) as source:
            return pyarrow.ipc.open_stream(source).read_all()  # the form that ``datasets`` writes

    return _from_arrow(path, read)


def _from_arrow(path: Path, read: Callable[[], Any]) -> DataTable:
    import pyarrow

    try:
        table = read()
        metadata = msgspec.json.decode((table.schema.metadata or {}).get(_FEATURES, b"{}"), type=_Metadata)
        classes = {
            name: msgspec.convert(feature, _ClassLabel).names
            for name, feature in metadata.info.features.items()
            if isinstance(feature, dict) and feature.get("_type") == "ClassLabel"
        }
    except (OSError, pyarrow.ArrowException, msgspec.DecodeError) as error:
        fix = "Write the file again."
        raise DataError(f"{path}", given=Raw(error), expected=f"a file {path.suffix}", fix=fix) from None
    _check_names(path, table.column_names)
    columns = {name: table.column(name) for name in table.column_names}
    return _checked(DataTable(path, columns, None, classes))


def _checked(table: DataTable) -> DataTable:
    if not table.rows:
        expected = "one at least" + ", below the heading" * (table.path.suffix.lower() in (".csv", ".tsv"))
        fix = "Give a file with examples."
        raise DataError(f"{table.path}", given=Raw("no rows"), expected=expected, fix=fix)
    return table


def _check_names(path: Path, names: Sequence[str]) -> None:
    twice = [name for name in names if name and names.count(name) > 1]
    if twice:
        fix = "Give each column a name of its own."
        raise DataError(f"{path} heading", given=twice[0], expected="each name once", fix=fix)


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
        return data.decode("utf-8-sig")  # Excel begins UTF-8 with a byte order mark
    except OSError as error:
        fix = "Give another path."
        raise DataError(f"{path}", given=Raw(error.strerror), expected="a readable file", fix=fix) from None
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        given = Raw(f"byte 0x{data[error.start]:02x}, which is not UTF-8")
        raise DataError(f"{path} line {line}", given=given, expected="UTF-8", fix="Save the file as UTF-8.") from None


_READERS: Mapping[str, Callable[[Path], DataTable]] = {
    ".csv": _read_csv,
    ".tsv": read_tsv,
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
}
#: Endings of the tables that users name; those of Arrow are inside of a directory that ``datasets`` saved.
ENDINGS = (".csv", ".tsv", ".jsonl", ".parquet")
#: The formats, for messages.
KNOWN = (
    "a table (.csv, .tsv, .jsonl or .parquet), a directory that 'datasets' saved, or a folder of images (.jpg or .png)"
)


#: Names of splits for published metrics.
DEV = ("dev", "validation", "valid", "val", "test")
#: One of several files of a split, such as train-00000-of-00002.parquet.
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})")


class DataFiles(NamedTuple):
    """Files, or for images folders, by the name of the split; ``train`` is the first."""

    images: bool
    splits: Mapping[str, tuple[Path, ...]]


def find(path: Path, dev: Path | None) -> DataFiles:
    """Return the files of own data.

    Args:
        path: a table, a directory with tables, one that ``datasets`` saved, or a folder of images.
        dev: a table, or a folder of images, for the published metrics; it replaces those in ``path``.

    Raises:
        DataError: there are none of these, a split has files of two formats or lacks one, or its name is taken.
    """
    data = _find(path, "--data")
    data = data._replace(splits=_with_train(path, data.splits))
    if dev is None:
        return data
    other = _find(dev, "--dev")
    if other.images != data.images:
        given, expected = ("images" if each.images else "tables" for each in (other, data))
        expected, fix = f"{expected}, as in --data", "Give both in the same form."
        raise DataError(f"--dev {dev}", given=Raw(given), expected=expected, fix=fix)
    return DataFiles(data.images, {TRAIN: data.splits[TRAIN], DEV[0]: other.splits[_measured(dev, other.splits)]})


def _measured(dev: Path, splits: Mapping[str, tuple[Path, ...]]) -> str:
    """Return the one split of ``--dev``, or the one with a name for published metrics."""
    named = [name for name in splits if len(splits) == 1 or name in DEV]
    if len(named) != 1:
        given, fix = Raw(f"the splits {listed(list(splits), 8)}"), "Give the file or directory of one of them."
        raise DataError(f"--dev {dev}", given=given, expected=f"one, or one out of {', '.join(DEV)}", fix=fix)
    return named[0]


def _find(path: Path, option: str) -> DataFiles:
    if not path.exists():
        raise DataError(f"{path}", given=Raw("nothing there"), expected=KNOWN, fix=f"Give another {option}.")
    if path.is_file():
        return DataFiles(False, {TRAIN: (path,)})
    if (path / "dataset_dict.json").is_file():
        return DataFiles(
            False, {name: _saved(path / name) for name in _json(path / "dataset_dict.json", _DatasetDict).splits}
        )
    if (path / "state.json").is_file():
        return DataFiles(False, {TRAIN: _saved(path)})
    tables = _tables(path)
    if tables:
        return DataFiles(False, tables)
    folders = {name: (path / name,) for name in (TRAIN, *DEV) if _has_classes(path / name)}
    if folders:
        return DataFiles(True, folders)
    if _has_classes(path):
        return DataFiles(True, {TRAIN: (path,)})
    others = sorted(file.name for file in path.glob("**/*") if file.suffix.lower() in OTHER_ENDINGS)
    if others:
        given = Raw(f"{len(others)} images in other formats, such as {others[0]}")
        raise DataError(f"{path}", given=given, expected=f"images as {', '.join(IMAGES)}", fix="Convert them.")
    names = sorted(entry.name + "/" * entry.is_dir() for entry in path.iterdir())
    given = Raw(listed(names, 8) if names else "an empty directory")
    fix = "Give a file, or a directory with train.csv and dev.csv, or with images as CLASS/NAME.png."
    raise DataError(f"{path}", given=given, expected=KNOWN, fix=fix)


def _tables(path: Path) -> dict[str, tuple[Path, ...]]:
    splits: dict[str, list[Path]] = {}
    for file in sorted(path.iterdir()):
        shard = _SHARD.fullmatch(file.stem)
        name = shard[1] if shard else file.stem
        if file.suffix.lower() in ENDINGS and name in (TRAIN, *DEV):
            earlier = splits.setdefault(name, [])
            if earlier and not (shard and earlier[0].suffix == file.suffix and _SHARD.fullmatch(earlier[0].stem)):
                given = Raw(f"{earlier[0].name} and {file.name}")
                raise DataError(f"{path}", given=given, expected=f"one file for {name}", fix="Remove one of them.")
            earlier.append(file)
    for files in splits.values():
        _check_shards(path, files)
    return {name: tuple(files) for name, files in splits.items()}


def _check_shards(path: Path, files: Sequence[Path]) -> None:
    """Raise a DataError if a file of a split is missing, by the number of files in the name of the first."""
    if shard := _SHARD.fullmatch(files[0].stem):
        wanted = [f"{shard[1]}-{number:05}-of-{shard[3]}{files[0].suffix}" for number in range(int(shard[3]))]
        names = [file.name for file in files]
        if names != wanted:
            wrong = [name for name in wanted if name not in names] or [name for name in names if name not in wanted]
            given, expected = Raw(listed(names, 5)), f"{len(wanted)} files for {shard[1]}, {listed(wanted, 5)}"
            fix = f"Compare {listed(wrong, 5)} with where they were copied from."
            raise DataError(f"{path}", given=given, expected=expected, fix=fix)


def _with_train(path: Path, splits: Mapping[str, tuple[Path, ...]]) -> dict[str, tuple[Path, ...]]:
    if TRAIN not in splits:
        given, fix = Raw(", ".join(splits)), f"Name the training set {TRAIN}, or give it alone."
        raise DataError(f"{path}", given=given, expected=f"a split {TRAIN}", fix=fix)
    if HOLDOUT in splits:
        given, fix = Raw(f"a split {HOLDOUT}"), f"Call it {DEV[0]} or test: a tenth of {TRAIN} is held out."
        raise DataError(f"{path}", given=given, expected="splits of other names", fix=fix)
    return {TRAIN: splits[TRAIN], **splits}


def _saved(path: Path) -> tuple[Path, ...]:
    state = _json(path / "state.json", _State)
    if not state.files:
        raise DataError(f"{path}", given=Raw("no rows"), expected="one at least", fix="Give data with examples.")
    return tuple(path / file.filename for file in state.files)


class _DatasetDict(msgspec.Struct):
    splits: list[str]


class _DataFile(msgspec.Struct):
    filename: str


class _State(msgspec.Struct):
    files: list[_DataFile] = msgspec.field(name="_data_files")


def _json(path: Path, kind: type[StructT]) -> StructT:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError) as error:
        fix = "Save the data set again with save_to_disk()."
        raise DataError(f"{path}", given=Raw(error), expected="a file of 'datasets'", fix=fix) from None


def _has_classes(path: Path) -> bool:
    return path.is_dir() and any(file.suffix.lower() in IMAGES for file in path.glob("*/*"))
