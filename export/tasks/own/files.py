"""The files of each split of a user's own data."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from edge.errors import Raw
from export.data.examples import HOLDOUT, TRAIN
from export.data.tables import ENDINGS as TABLES
from export.data.tables import KNOWN
from export.data.unlabelled import ENDINGS as IMAGES
from export.data.unlabelled import OTHER_ENDINGS
from export.errors import DataError, listed
from export.training.runs import StructT

#: Names of splits for published metrics.
DEV = ("dev", "validation", "valid", "val", "test")
#: One of several files of a split, such as train-00000-of-00002.parquet.
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})")


class Found(NamedTuple):
    """Files, or for images folders, by the name of the split; ``train`` is the first."""

    images: bool
    splits: Mapping[str, tuple[Path, ...]]


def find(path: Path, dev: Path | None) -> Found:
    """Return the files of own data.

    Args:
        path: a table, a directory with tables, one that ``datasets`` saved, or a folder of images.
        dev: a table, or a folder of images, for the published metrics; it replaces those in ``path``.

    Raises:
        DataError: there are none of these, a split has files of two formats or lacks one, or its name is taken.
    """
    found = _find(path, "--data")
    found = found._replace(splits=_with_train(path, found.splits))
    if dev is None:
        return found
    other = _find(dev, "--dev")
    if other.images != found.images:
        given, expected = ("images" if one.images else "tables" for one in (other, found))
        fix = "Give both in the same form."
        raise DataError(f"--dev {dev}", given=Raw(given), expected=f"{expected}, as in --data", fix=fix)
    return Found(found.images, {TRAIN: found.splits[TRAIN], DEV[0]: other.splits[_measured(dev, other.splits)]})


def _measured(dev: Path, splits: Mapping[str, tuple[Path, ...]]) -> str:
    """Return the one split of ``--dev``, or the one with a name for published metrics."""
    named = [name for name in splits if len(splits) == 1 or name in DEV]
    if len(named) != 1:
        given, fix = Raw(f"the splits {listed(list(splits), 8)}"), "Give the file or directory of one of them."
        raise DataError(f"--dev {dev}", given=given, expected=f"one, or one out of {', '.join(DEV)}", fix=fix)
    return named[0]


def _find(path: Path, option: str) -> Found:
    if not path.exists():
        raise DataError(f"{path}", given=Raw("nothing there"), expected=KNOWN, fix=f"Give another {option}.")
    if path.is_file():
        return Found(False, {TRAIN: (path,)})
    if (path / "dataset_dict.json").is_file():
        return Found(False, {name: _saved(path / name) for name in _saved_splits(path)})
    if (path / "state.json").is_file():
        return Found(False, {TRAIN: _saved(path)})
    tables = _tables(path)
    if tables:
        return Found(False, tables)
    folders = {name: (path / name,) for name in (TRAIN, *DEV) if _has_classes(path / name)}
    if folders:
        return Found(True, folders)
    if _has_classes(path):
        return Found(True, {TRAIN: (path,)})
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
        if file.suffix.lower() in TABLES and name in (TRAIN, *DEV):
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


def _saved_splits(path: Path) -> list[str]:
    return _json(path / "dataset_dict.json", _DatasetDict).splits


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
