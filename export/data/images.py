"""Images and their classes: MNIST, scikit-learn's digits, and folders in ImageNet's layout."""

from __future__ import annotations

import copy
import gzip
import importlib
import zlib
from collections.abc import Iterable
from io import BytesIO
from pathlib import Path

import msgspec
import numpy as np
import torch

from edge.bundles.steps import ImagePreprocess
from edge.datatypes import Array
from edge.errors import Raw, UsageError
from export.data.tokens import Batch
from export.data.unlabelled import ENDINGS, MAX_BYTES, MAX_PIXELS, ImageFiles, read_image, read_pixels
from export.errors import DataError, listed
from export.models.transformer import LayerShape, TransformerConfig

_MNIST_FIX = "Get the files of MNIST, t10k-images-idx3-ubyte.gz and so on, into mnist/ of --data-dir."
_FOLDER_FIX = "Give a directory with a directory of images for each class."
_UNSIGNED_BYTES = 8
#: Larger files are scaled down to this longer side for a golden set, which is in memory while a bundle is opened.
_LARGE_FILE_BYTES, _SIDE = 128 * 1024, 512


class ImageShape(msgspec.Struct, frozen=True):
    """Images of a model: pixels of a side, and colours."""

    size: int
    channels: int

    def __str__(self) -> str:
        return f"{self.size} x {self.size} pixels of {self.channels} colours"


def image_step(size: int, channels: int) -> ImagePreprocess:
    """Return how images are read for training, and by bundles of what was trained: from -1 to 1, as for ViT."""
    return ImagePreprocess(
        input="image",
        output="pixels",
        size=size,
        colours="rgb" if channels == 3 else "grey",
        mean=(0.5,) * channels,
        std=(0.5,) * channels,
        max_bytes=MAX_BYTES,
        max_pixels=MAX_PIXELS,
    )


class Images(msgspec.Struct, frozen=True):
    """Images in memory: pixels [n, channels, size, size] of float32 from -1 to 1, and classes [n]."""

    pixels: Array
    targets: Array

    @property
    def lengths(self) -> Array:
        return np.ones(len(self.targets), dtype=np.int64)

    @property
    def contents(self) -> Iterable[Array]:
        return self.pixels, self.targets

    @property
    def keys(self) -> tuple[str, ...]:
        """The number of each image, the key for draws and hold-outs."""
        return tuple(map(str, range(len(self.targets))))

    def take(self, rows: Array) -> Images:
        """Return the images with these indices, or of a mask [n]."""
        return Images(self.pixels[rows], self.targets[rows])

    def batch(self, rows: Array) -> Batch:
        return Batch(torch.from_numpy(self.pixels[rows]), None, None, torch.from_numpy(self.targets[rows]))

    def files(self, rows: Array) -> list[bytes]:
        """Return images by their indices as PNG files."""
        from PIL import Image

        files = []
        for pixels in self.pixels[rows]:
            levels = np.rint((pixels + 1) * (255 / 2)).astype(np.uint8)
            file = BytesIO()
            Image.fromarray(levels.transpose(1, 2, 0).squeeze()).save(file, "PNG")
            files.append(file.getvalue())
        return files


def mnist_splits(directory: Path) -> tuple[Images | None, Images]:
    """Read the 60,000 training and the 10,000 test images of MNIST, 28 x 28; None without files of the training set.

    Raises:
        DataError: a file is missing or malformed, images and labels differ in number, or a label is not a digit.
    """
    train = _mnist(directory, "train") if (directory / "train-images-idx3-ubyte.gz").exists() else None
    return train, _mnist(directory, "t10k")


def _mnist(directory: Path, part: str) -> Images:
    pixels = read_idx(directory / f"{part}-images-idx3-ubyte.gz", dimensions=3)
    labels = read_idx(directory / f"{part}-labels-idx1-ubyte.gz", dimensions=1)
    if labels.max(initial=0) > 9:
        raise DataError(f"{directory}", given=int(labels.max()), expected="labels 0 to 9", fix=_MNIST_FIX)
    if len(pixels) != len(labels):
        given = Raw(f"{len(labels)} labels")
        raise DataError(f"{directory}", given=given, expected=f"{len(pixels)}, as images", fix=_MNIST_FIX)
    return Images(_centred(pixels[:, None], 255), labels.astype(np.int64))


def read_idx(path: Path, *, dimensions: int) -> Array:
    """Read an IDX file of unsigned bytes with a number of dimensions, compressed with gzip.

    The format, from MNIST's page: two zero bytes, a byte for the datatype, one for the number of dimensions, the
    dimensions as big-endian 32-bit numbers, the data.
    """
    try:
        data = gzip.decompress(path.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}", given=Raw(error), expected="an IDX file in gzip", fix=_MNIST_FIX) from None
    header = 4 + 4 * dimensions
    shape = tuple(int(size) for size in np.frombuffer(data[4:header], dtype=">u4"))
    expected = bytes([0, 0, _UNSIGNED_BYTES, dimensions])
    if data[:4] != expected or len(data) != header + np.prod(shape, dtype=np.int64):
        given = Raw(f"{len(data)} bytes that begin with {data[:4].hex()}")
        wanted = f"{expected.hex()}, {dimensions} sizes, and as many bytes as they say"
        raise DataError(f"{path}", given=given, expected=wanted, fix=_MNIST_FIX)
    return np.frombuffer(data, dtype=np.uint8, offset=header).reshape(shape)


def digits() -> Images:
    """Return scikit-learn's 1,797 digits, 8 x 8."""
    try:
        datasets = importlib.import_module("sklearn.datasets")
    except ImportError as error:
        fix = "Install it with 'pip install scikit-learn'."
        raise DataError("digits", given=Raw(error), expected="scikit-learn", fix=fix) from None
    bunch = datasets.load_digits()
    return Images(_centred(bunch.images[:, None], 16), bunch.target.astype(np.int64))


class ImageFolder(ImageFiles):
    """Images on disk in ImageNet's layout, ``CLASS/NAME.jpg``, read when a batch needs them.

    They are read by the step of :func:`image_step`, as a server reads them.

    Args:
        directory: contains a directory for each class; they are numbered in the order of their names.
        size: pixels of a side.
        classes: those of another folder, for the same numbers; None numbers the classes of this folder.

    Raises:
        BackendError: Pillow is not installed.
        DataError: there are no images, or one is of an unknown class.
    """

    def __init__(self, directory: str | Path, size: int, classes: tuple[str, ...] | None = None) -> None:
        self.directory = directory = Path(directory)
        paths = sorted(path for path in directory.glob("*/*") if path.suffix.lower() in ENDINGS)
        if not paths:
            given = Raw("no images")
            raise DataError(f"{directory}", given=given, expected="CLASS/NAME.jpg or .png", fix=_FOLDER_FIX)
        here = sorted({path.parent.name for path in paths})
        self.classes = classes or tuple(here)
        numbers = {name: number for number, name in enumerate(self.classes)}
        for name in here:
            if name not in numbers:
                expected = f"one of the {len(numbers)} classes to learn: {listed(self.classes, 20)}"
                fix = "Give both folders the same classes."
                raise DataError(f"{directory}", given=name, expected=expected, fix=fix)
        targets = np.array([numbers[path.parent.name] for path in paths], dtype=np.int64)
        super().__init__(paths, image_step(size, channels=3), targets)

    @property
    def keys(self) -> tuple[str, ...]:
        """Class and name of each image, the key for draws and hold-outs."""
        return tuple(f"{path.parent.name}/{path.name}" for path in self.paths)

    def take(self, rows: Array) -> ImageFolder:
        """Return the images with these indices, or of a mask [n]."""
        taken = copy.copy(self)
        taken.paths = [self.paths[row] for row in np.arange(len(self.paths))[rows]]
        taken.targets, taken.lengths = self.targets[rows], self.lengths[rows]
        return taken

    def files(self, rows: Array) -> list[bytes]:
        """Return images by their indices as files, the large ones scaled down."""
        from PIL import Image

        files = []
        for row in rows:
            data = read_image(self.paths[row])
            if len(data) > _LARGE_FILE_BYTES:
                image, file = Image.open(BytesIO(data)).convert("RGB"), BytesIO()
                image.thumbnail((_SIDE, _SIDE))
                image.save(file, "JPEG", quality=90)
                data = file.getvalue()
            files.append(data)
        return files

    def shorter_side(self, row: int) -> int:
        """Decode an image by its index; return the pixels of its shorter side.

        Raises:
            DataError: it cannot be read.
        """
        from PIL import Image

        read_pixels(self.paths[row], self._reader)
        with Image.open(self.paths[row]) as image:
            return int(min(image.size))


def vit(
    image_size: int, patch_size: int, channels: int, *, dim: int = 64, depth: int = 4, heads: int = 4
) -> TransformerConfig:
    """Return the shape of a small ViT: heads of dim / heads, feed-forward of 2 dim.

    Raises:
        UsageError: ``heads`` is not a divisor of ``dim``.
    """
    if dim % heads:
        expected, fix = f"a divisor of the width, {dim}", "Choose another --heads or --dim."
        raise UsageError("--heads", given=heads, expected=expected, fix=fix)
    shape = LayerShape(heads, dim // heads, 2 * dim)
    return TransformerConfig(
        architecture="vit",
        dim=dim,
        layers=(shape,) * depth,
        max_positions=(image_size // patch_size) ** 2 + 1,
        image_size=image_size,
        patch_size=patch_size,
        channels=channels,
        norm_eps=1e-6,
    )


def _centred(values: Array, largest: float) -> Array:
    return (values / (largest / 2) - 1).astype(np.float32)
