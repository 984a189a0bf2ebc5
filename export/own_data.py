"""What a run records of a user's own data: where they are, how they were read, and the hashes of their files."""

from __future__ import annotations

from pathlib import Path

import msgspec

from edge.errors import Raw
from export.errors import DataError, listed

#: In a description; a data set may have hundreds.
_MOST_FILES = 8


class DataFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of tables, or a folder of images.

    Attributes:
        split: that it belongs to; empty if it was left out because it has no labels.
        name: relative to the data.
        rows: examples in it.
        sha256: of its bytes; of a folder, of the names and hashes of its images.
    """

    split: str
    name: str
    rows: int
    sha256: str


class SplitRows(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A split for training or measuring.

    Attributes:
        rows: its examples.
        in_train: those whose texts, or image, are in the training set, too; None where nobody looked.
    """

    name: str
    rows: int
    in_train: int | None = None


class OwnData(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A user's own data, as ``fewheads finetune --data`` read them.

    Attributes:
        path: absolute path of the file or directory.
        images: whether it is a folder of images; otherwise texts in tables.
        dev: absolute path of ``--dev``, if it was given.
        texts: columns of the text, or of both texts.
        label: column of the classes or values.
        values: the classes as they are in the files, in the order of their numbers; empty for values to predict.
        labels: names of the classes, usually the same.
        image_size: pixels of a side for a new model; 0 for texts.
    """

    path: str
    images: bool = False
    dev: str | None = None
    texts: tuple[str, ...] = ()
    label: str = ""
    values: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    image_size: int = 0
    files: tuple[DataFile, ...] = ()
    splits: tuple[SplitRows, ...] = ()

    @property
    def name(self) -> str:
        """The name of the task: that of the file, or of the directory, which gets a slash unless it has an ending."""
        return Path(self.path).name + ("" if Path(self.path).suffix else "/")

    @property
    def origin(self) -> str:
        """The files with their hashes, the first ones of many, for a provenance."""
        return f"own data: {listed([f'{file.name} (SHA-256 {file.sha256})' for file in self.files], _MOST_FILES)}"

    def name_of(self, path: Path) -> str:
        """Return the name of a file or folder of the data: relative to them, or its own if it is not inside of them."""
        root = Path(self.path)
        return str(path.relative_to(root)) if path.is_relative_to(root) and path != root else path.name

    def located(self, data_dir: str | Path) -> OwnData:
        """Return the data with the paths where they are now: as recorded, or else below another directory.

        Raises:
            DataError: they are in neither place.
        """
        dev = None if self.dev is None else _located(Path(self.dev), Path(data_dir))
        return msgspec.structs.replace(self, path=_located(Path(self.path), Path(data_dir)), dev=dev)

    def check_unchanged(self, found: tuple[DataFile, ...], path: str) -> None:
        """Raise a DataError if files differ from those of the training: other rows would be held out.

        Args:
            path: where the data are now, for messages.
        """
        recorded, now = ({(file.split, file.name): file for file in files} for files in (self.files, found))
        for key in recorded.keys() | now.keys():
            if recorded.get(key) != now.get(key):
                given, expected = (Raw(_state(files.get(key))) for files in (now, recorded))
                fix = "Put back the files of the training, or fine-tune on the new ones: fewheads finetune --data."
                raise DataError(f"{path} file {key[1]}", given=given, expected=expected, fix=fix)


def _state(file: DataFile | None) -> str:
    return f"{file.rows} rows with SHA-256 {file.sha256[:16]}…" if file else "no such file"


def _located(recorded: Path, data_dir: Path) -> str:
    if recorded.exists():
        return str(recorded)
    other = data_dir / recorded.name
    if not other.exists():
        given, expected = Raw("nothing there"), "the data that the run was trained with"
        fix = f"Put them back, or give --data-dir with the directory that has {recorded.name} now."
        raise DataError(f"{recorded}", given=given, expected=expected, fix=fix)
    return str(other.resolve())
