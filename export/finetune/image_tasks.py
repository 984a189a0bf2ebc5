"""Images as tasks: MNIST, scikit-learn's digits, ImageNet and own folders; with a new small ViT, or a trained one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from edge.errors import Raw, UsageError
from edge.files import sha256
from export.data.columns import check_classes, check_enough, check_learnt, class_metrics
from export.data.examples import DEV_SEED, DEV_SHARE, HOLDOUT, HOLDOUT_SHARE, TRAIN, drawn, held_out
from export.data.images import ImageFolder, Images, ImageShape, digits, mnist_splits, vit
from export.data.tables import find
from export.data.tokens import Rows
from export.finetune.models import Architecture, Source, open_model
from export.finetune.predictions import Predictions, predict
from export.finetune.task import Data, Reader
from export.models.heads import Head
from export.models.transformer import TransformerConfig
from export.training.runs import DataFile, OwnData, SplitRows, SplitVersion

#: Pixels of a side of a patch in a new ViT for own images: the most of these that leave four patches on a side.
_PATCHES = (16, 8, 4, 2, 1)
_LEAST_PATCHES = 4
#: Larger own images are reduced to the usual size of a ViT.
_LARGEST = 224

ImagesT = TypeVar("ImagesT", Images, ImageFolder)


class Parts(msgspec.Struct, Generic[ImagesT], frozen=True):
    """Training images with the hold-out, images for published metrics by split, and the names of the classes."""

    train: ImagesT
    dev: dict[str, ImagesT]
    labels: tuple[str, ...]

    def with_holdout(self) -> tuple[ImagesT, ImagesT]:
        """Return the training images, and the tenth of them that is held out by the hash of their numbers or names."""
        held = held_out(self.train.keys, HOLDOUT_SHARE)
        return self.train.take(~held), self.train.take(held)


class ImageTask(msgspec.Struct, frozen=True, kw_only=True):
    """Images and their classes."""

    name: str
    origin: str
    shape: ImageShape
    patch_size: int
    read: Callable[[str | Path, ImageShape], Parts[Any]]
    metrics: tuple[str, ...] = ("accuracy",)
    headline: str = "accuracy"
    own_data: OwnData | None = None
    split: SplitVersion = 1

    def source(self, model: Path | None, shape: Mapping[str, int]) -> Source:
        if model is None:
            return vit(self.shape.size, self.patch_size, self.shape.channels, **shape)
        if shape:
            option = next(iter(shape))
            fix = f"Leave --{option} out, or --model to train a new one."
            raise UsageError(f"--{option}", given=shape[option], expected="nothing beside --model", fix=fix)
        return model

    def reader(self, source: Source) -> Reader:
        config = source if isinstance(source, TransformerConfig) else open_model(source).transformer.config
        if config.architecture != "vit":
            fix = "Give a Hugging Face directory of ViT, a run on images, or leave --model out for a new one."
            raise UsageError(f"--model {source}", given=config.architecture, expected="a ViT", fix=fix)
        return ImageShape(config.image_size, config.channels)

    def prepare(self, data_dir: str | Path, reader: Reader, *, max_length: int, limit: int | None) -> Data:
        assert isinstance(reader, ImageShape)
        parts = self.read(data_dir, reader)
        train, holdout = parts.with_holdout()
        return Data(parts.labels, train.take(drawn(train.keys, limit)), holdout, {**parts.dev})

    def architecture(self, transformer: TransformerConfig, labels: tuple[str, ...], max_length: int) -> Architecture:
        """Return a classifier of the summary token, as ViT has it."""
        return Architecture(task=self.name, transformer=transformer, labels=labels, pooling="summary")

    def predict(self, model: Head, rows: Rows) -> Predictions:
        return predict(model, rows)


def _mnist(data_dir: str | Path, shape: ImageShape) -> Parts[Images]:
    train, dev = mnist_splits(Path(data_dir) / "mnist")
    return _numbered("MNIST", *((train, dev) if train else _split(dev)), shape)


def _digits(data_dir: str | Path, shape: ImageShape) -> Parts[Images]:
    return _numbered("digits", *_split(digits()), shape)


def _imagenet(data_dir: str | Path, shape: ImageShape) -> Parts[ImageFolder]:
    _check_shape("ImageNet", ImageShape(shape.size, 3), shape)  # images become as large as the model wants them
    directory = Path(data_dir) / "imagenet"
    train = ImageFolder(directory / "train", shape.size)
    return Parts(train, {"dev": ImageFolder(directory / "val", shape.size, train.classes)}, train.classes)


def _split(images: ImagesT) -> tuple[ImagesT, ImagesT]:
    held = held_out(images.keys, DEV_SHARE, DEV_SEED)
    return images.take(~held), images.take(held)


def _numbered(name: str, train: Images, dev: Images, shape: ImageShape) -> Parts[Images]:
    for images in (train, dev):
        channels, size = images.pixels.shape[1:3]
        _check_shape(name, ImageShape(size, channels), shape)
    return Parts(train, {"dev": dev}, tuple(map(str, range(10))))


def _check_shape(name: str, given: ImageShape, wanted: ImageShape) -> None:
    if given != wanted:
        fix = "Start from a model of such images, or leave --model out for a new one."
        expected = f"{wanted}, as the model reads"
        raise UsageError(f"images of {name}", given=Raw(given), expected=expected, fix=fix)


MNIST = ImageTask(name="MNIST", origin="MNIST", shape=ImageShape(28, 1), patch_size=7, read=_mnist)
DIGITS = ImageTask(name="digits", origin="scikit-learn's digits", shape=ImageShape(8, 1), patch_size=2, read=_digits)
IMAGENET = ImageTask(
    name="ImageNet", origin="images in ImageNet's layout", shape=ImageShape(224, 3), patch_size=16, read=_imagenet
)


def own_image_task(data: OwnData) -> ImageTask:
    """Return the task of data that :func:`describe_images` returned."""
    return ImageTask(
        name=data.name,
        origin=data.origin,
        shape=ImageShape(data.image_size, 3),
        patch_size=_patch_size(data.image_size),
        read=partial(_read_own, data),
        metrics=class_metrics(data.labels),
        headline="macro_f1",
        own_data=data,
    )


def describe_images(data: OwnData, on_image: Callable[[int, int], None]) -> OwnData:
    """Read every image once, and report the images done and all; errors as :func:`.own_texts.describe`."""
    folders = _folders(data, _LARGEST)
    images = [(name, folder, row) for name, folder in folders.items() for row in range(len(folder.targets))]
    sides = []
    for done, (name, folder, row) in enumerate(images, 1):
        side = folder.shorter_side(row)
        sides += [side] * (name == TRAIN)
        on_image(done, len(images))
    train = folders[TRAIN]
    counts = np.bincount(train.targets, minlength=len(train.classes)).tolist()
    check_classes(dict(zip(train.classes, counts, strict=True)), data.path)
    side = min(_LARGEST, int(np.median(sides)))
    if side < _LEAST_PATCHES:
        given, expected = Raw(f"{side} pixels"), f"{_LEAST_PATCHES} or more"
        raise UsageError(f"shorter side of images in {data.path}", given=given, expected=expected, fix="Enlarge them.")
    patch = _patch_size(side)
    hashes = _hashes(folders)
    parts = _parts(folders)
    learnt, holdout = parts.with_holdout()
    check_learnt(learnt.targets, train.classes, data.path)
    check_enough(learnt.targets, holdout.targets, data.path)
    known = {hashes[path] for path in learnt.paths}
    return msgspec.structs.replace(
        data,
        values=train.classes,
        labels=train.classes,
        image_size=side // patch * patch,
        files=_files(data, folders, hashes),
        splits=(
            SplitRows(TRAIN, len(learnt.paths)),
            *(
                SplitRows(name, len(split.paths), sum(hashes[path] in known for path in split.paths))
                for name, split in {HOLDOUT: holdout, **parts.dev}.items()
            ),
        ),
    )


def _read_own(data: OwnData, data_dir: str | Path, shape: ImageShape) -> Parts[ImageFolder]:
    _check_shape(data.name, ImageShape(shape.size, 3), shape)  # images become as large as the model wants them
    located = data.located(data_dir)
    folders = _folders(located, shape.size)
    data.check_unchanged(_files(located, folders, _hashes(folders)), located.path)
    return _parts(folders)


def _folders(data: OwnData, size: int) -> dict[str, ImageFolder]:
    """Return the folder of each split, the training set first."""
    splits = find(Path(data.path), None if data.dev is None else Path(data.dev)).splits
    train = ImageFolder(splits[TRAIN][0], size)
    others = {name: ImageFolder(folders[0], size, train.classes) for name, folders in splits.items() if name != TRAIN}
    return {TRAIN: train, **others}


def _parts(folders: Mapping[str, ImageFolder]) -> Parts[ImageFolder]:
    train = folders[TRAIN]
    dev = {name: folder for name, folder in folders.items() if name != TRAIN}
    if dev:
        return Parts(train, dev, train.classes)
    learnt, held = _split(train)
    return Parts(learnt, {"dev": held}, train.classes)


def _hashes(folders: Mapping[str, ImageFolder]) -> dict[Path, str]:
    return {path: sha256(path.read_bytes()) for folder in folders.values() for path in folder.paths}


def _files(data: OwnData, folders: Mapping[str, ImageFolder], hashes: Mapping[Path, str]) -> tuple[DataFile, ...]:
    files = []
    for name, folder in folders.items():
        lines = (f"{hashes[path]}  {key}\n" for path, key in zip(folder.paths, folder.keys, strict=True))
        digest = sha256("".join(lines).encode())
        files.append(DataFile(name, f"{data.name_of(folder.directory)}/", len(folder.paths), digest))
    return tuple(files)


def _patch_size(side: int) -> int:
    return next(size for size in _PATCHES if side // size >= _LEAST_PATCHES)
