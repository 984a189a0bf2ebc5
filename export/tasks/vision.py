"""Images as tasks: MNIST, scikit-learn's digits, and ImageNet; with a new small ViT, or a trained one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from edge.errors import Raw, UsageError
from export.data.examples import DEV_SEED, DEV_SHARE, drawn, held_out
from export.data.images import TEST, TRAIN, ImageFolder, Images, digits, has_mnist, mnist, vit
from export.data.tokens import Rows
from export.finetune.models import Architecture, Source, open_model
from export.finetune.predictions import Predictions, predict
from export.finetune.task import Data, ImageShape, Reader
from export.models.heads import Head
from export.models.transformer import TransformerConfig
from export.training.runs import OwnData

_HOLDOUT_SHARE = 0.1


ImagesT = TypeVar("ImagesT", Images, ImageFolder)


class Parts(msgspec.Struct, Generic[ImagesT], frozen=True):
    """Training images with the hold-out, images for published metrics by split, and the names of the classes."""

    train: ImagesT
    dev: dict[str, ImagesT]
    labels: tuple[str, ...]

    def with_holdout(self) -> tuple[ImagesT, ImagesT]:
        """Return the training images, and the tenth of them that is held out by the hash of their numbers or names."""
        held = held_out(self.train.keys, _HOLDOUT_SHARE)
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

    def source(self, model: Path | None, shape: Mapping[str, int]) -> Source:
        """Return the directory of a model, or the shape of a new one; see :class:`export.finetune.task.Task`."""
        if model is None:
            return vit(self.shape.size, self.patch_size, self.shape.channels, **shape)
        if shape:
            option = next(iter(shape))
            fix = f"Leave --{option} out, or --model to train a new one."
            raise UsageError(f"--{option}", given=shape[option], expected="nothing beside --model", fix=fix)
        return model

    def reader(self, source: Source) -> Reader:
        """Return the size and colours of the images of a model."""
        config = source if isinstance(source, TransformerConfig) else open_model(source).transformer.config
        if config.architecture != "vit":
            fix = "Give a Hugging Face directory of ViT, a run on images, or leave --model out for a new one."
            raise UsageError(f"--model {source}", given=config.architecture, expected="a ViT", fix=fix)
        return ImageShape(config.image_size, config.channels)

    def prepare(self, data_dir: str | Path, reader: Reader, *, max_length: int, limit: int | None) -> Data:
        """Read the images and hold a tenth of the training set out."""
        assert isinstance(reader, ImageShape)
        parts = self.read(data_dir, reader)
        train, holdout = parts.with_holdout()
        return Data(parts.labels, train.take(drawn(train.keys, limit)), holdout, {**parts.dev})

    def architecture(self, transformer: TransformerConfig, labels: tuple[str, ...], max_length: int) -> Architecture:
        """Return a classifier of the summary token, as ViT has it."""
        return Architecture(task=self.name, transformer=transformer, labels=labels, pooling="summary")

    def predict(self, model: Head, rows: Rows) -> Predictions:
        """Return the logits."""
        return predict(model, rows)


def _mnist(data_dir: str | Path, shape: ImageShape) -> Parts[Images]:
    if has_mnist(data_dir, TRAIN):
        train, dev = mnist(data_dir, TRAIN), mnist(data_dir, TEST)
    else:
        train, dev = _split(mnist(data_dir, TEST))
    return _numbered("MNIST", train, dev, shape)


def _digits(data_dir: str | Path, shape: ImageShape) -> Parts[Images]:
    return _numbered("digits", *_split(digits()), shape)


def _imagenet(data_dir: str | Path, shape: ImageShape) -> Parts[ImageFolder]:
    check_shape("ImageNet", ImageShape(shape.size, 3), shape)  # images become as large as the model wants them
    directory = Path(data_dir) / "imagenet"
    train = ImageFolder(directory / "train", shape.size)
    return Parts(train, {"dev": ImageFolder(directory / "val", shape.size, train.classes)}, train.classes)


def _split(images: Images) -> tuple[Images, Images]:
    held = held_out(images.keys, DEV_SHARE, DEV_SEED)
    return images.take(~held), images.take(held)


def _numbered(name: str, train: Images, dev: Images, shape: ImageShape) -> Parts[Images]:
    for images in (train, dev):
        channels, size = images.pixels.shape[1:3]
        check_shape(name, ImageShape(size, channels), shape)
    return Parts(train, {"dev": dev}, tuple(map(str, np.arange(10))))


def check_shape(name: str, found: ImageShape, wanted: ImageShape) -> None:
    """Raise a UsageError if images have another size or other colours than a model reads."""
    if found != wanted:
        fix = "Start from a model of such images, or leave --model out for a new one."
        given = Raw(found)
        raise UsageError(f"images of {name}", given=given, expected=f"{wanted}, as the model reads", fix=fix)


MNIST = ImageTask(name="MNIST", origin="MNIST", shape=ImageShape(28, 1), patch_size=7, read=_mnist)
DIGITS = ImageTask(name="digits", origin="scikit-learn's digits", shape=ImageShape(8, 1), patch_size=2, read=_digits)
IMAGENET = ImageTask(
    name="ImageNet", origin="images in ImageNet's layout", shape=ImageShape(224, 3), patch_size=16, read=_imagenet
)
