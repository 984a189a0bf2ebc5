"""Own folders of images as a task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from edge.errors import Raw, UsageError
from edge.files import sha256
from export.data.columns import check_classes, check_enough, check_learnt, class_metrics
from export.data.examples import DEV_SEED, DEV_SHARE, TRAIN, held_out
from export.data.images import ImageFolder
from export.data.tables import find
from export.finetune.image_tasks import ImageTask, Parts, check_shape
from export.finetune.task import HOLDOUT, ImageShape
from export.training.runs import DataFile, OwnData, SplitRows

#: Pixels of a side of a patch in a new ViT: the most of these that leave four patches on a side.
_PATCHES = (16, 8, 4, 2, 1)
_LEAST_PATCHES = 4
#: Larger images are reduced to the usual size of a ViT.
_LARGEST = 224


def image_task(data: OwnData) -> ImageTask:
    """Return the task of data that :func:`describe` returned."""
    return ImageTask(
        name=data.name,
        origin=data.origin,
        shape=ImageShape(data.image_size, 3),
        patch_size=_patch_size(data.image_size),
        read=partial(_read, data),
        metrics=class_metrics(data.labels),
        headline="macro_f1",
        own_data=data,
    )


def describe(data: OwnData, on_image: Callable[[int, int], None]) -> OwnData:
    """Read every image once, and check everything that a training needs.

    Args:
        on_image: called with the number of images done and of all.

    Raises:
        DataError: an image cannot be read, or a class has too few of them.
        UsageError: the images are too small.
    """
    folders = _folders(data, _LARGEST)
    total, done = sum(len(folder.targets) for folder in folders.values()), 0
    sides: dict[str, list[int]] = {}
    for name, folder in folders.items():
        sides[name] = []
        for row in range(len(folder.targets)):
            sides[name].append(folder.shorter_side(row))
            done += 1
            on_image(done, total)
    train = folders[TRAIN]
    counts = np.bincount(train.targets, minlength=len(train.classes)).tolist()
    check_classes(dict(zip(train.classes, counts, strict=True)), data.path)
    side = min(_LARGEST, int(np.median(sides[TRAIN])))
    if side < _LEAST_PATCHES:
        given, expected = Raw(f"{side} pixels"), f"{_LEAST_PATCHES} or more"
        raise UsageError(f"shorter side of images in {data.path}", given=given, expected=expected, fix="Enlarge them.")
    patch = _patch_size(side)
    hashes = _hashes(folders)
    parts = _parts(folders)
    learnt, holdout = parts.with_holdout()
    check_learnt(learnt.targets, train.classes, data.path)
    check_enough(learnt.targets, holdout.targets, data.path)
    splits = {TRAIN: learnt, HOLDOUT: holdout, **parts.dev}
    known = {hashes[path] for path in learnt.paths}
    return msgspec.structs.replace(
        data,
        values=train.classes,
        labels=train.classes,
        image_size=side // patch * patch,
        files=_files(data, folders, hashes),
        splits=tuple(
            SplitRows(name, len(one.paths), None if one is learnt else sum(hashes[path] in known for path in one.paths))
            for name, one in splits.items()
        ),
    )


def _read(data: OwnData, data_dir: str | Path, shape: ImageShape) -> Parts[ImageFolder]:
    check_shape(data.name, ImageShape(shape.size, 3), shape)  # images become as large as the model wants them
    located = data.located(data_dir)
    folders = _folders(located, shape.size)
    data.check_unchanged(_files(located, folders, _hashes(folders)), located.path)
    return _parts(folders)


def _folders(data: OwnData, size: int) -> dict[str, ImageFolder]:
    found = find(Path(data.path), None if data.dev is None else Path(data.dev)).splits
    train = ImageFolder(found[TRAIN][0], size)
    others = {name: ImageFolder(folders[0], size, train.classes) for name, folders in found.items() if name != TRAIN}
    return {TRAIN: train, **others}


def _parts(folders: Mapping[str, ImageFolder]) -> Parts[ImageFolder]:
    train = folders[TRAIN]
    dev = {name: folder for name, folder in folders.items() if name != TRAIN}
    if dev:
        return Parts(train, dev, train.classes)
    held = held_out(train.keys, DEV_SHARE, DEV_SEED)
    return Parts(train.take(~held), {"dev": train.take(held)}, train.classes)


def _hashes(folders: Mapping[str, ImageFolder]) -> dict[Path, str]:
    return {path: sha256(path.read_bytes()) for folder in folders.values() for path in folder.paths}


def _files(data: OwnData, folders: Mapping[str, ImageFolder], hashes: Mapping[Path, str]) -> tuple[DataFile, ...]:
    files = []
    for name, folder in folders.items():
        lines = (f"{hashes[path]}  {key}\n" for path, key in zip(folder.paths, folder.keys, strict=True))
        place = f"{data.name_of(folder.directory)}/"
        files.append(DataFile(name, place, len(folder.paths), sha256("".join(lines).encode())))
    return tuple(files)


def _patch_size(side: int) -> int:
    return next(size for size in _PATCHES if side // size >= _LEAST_PATCHES)
