"""Images in files, without labels, as the pixels that a model's preprocess step makes of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from edge.bundles.image import ImagePreprocessor
from edge.bundles.steps import ImagePreprocess
from edge.datatypes import Array
from edge.errors import InvalidRequest, Raw
from export.errors import DataError

if TYPE_CHECKING:
    from export.data.tokens import Batch

#: Of image files.
ENDINGS = (".jpg", ".jpeg", ".png")
#: Of image files that are not read.
OTHER_ENDINGS = (".webp", ".gif", ".bmp", ".tif", ".tiff", ".heic", ".avif")
#: Limits of the step ``image``: above the files of most phones and cameras, of 12 to 24 megapixels.
MAX_BYTES, MAX_PIXELS = 16 * 2**20, 25_000_000
_FIX = "Give a directory of images, at any depth below it."


class ImageFiles:
    """Images, read when a batch needs them, with ``targets`` [n].

    Raises:
        BackendError: Pillow is not installed.
    """

    def __init__(self, paths: Sequence[Path], step: ImagePreprocess, targets: Array | None = None) -> None:
        self.paths, self.step = paths, step
        self.targets = np.zeros(len(paths), np.int64) if targets is None else targets
        self.lengths = np.ones(len(paths), dtype=np.int64)
        self._reader = ImagePreprocessor(step)

    @property
    def contents(self) -> Iterable[Array]:
        """Targets, the step, and names, sizes and times of the files, which are read only when a batch needs them."""
        known = [_known(path) for path in self.paths]
        return self.targets, np.frombuffer(f"{self.step} {known}".encode(), np.uint8)

    def batch(self, rows: Array) -> Batch:
        """Read images by their indices: pixels [N, channels, size, size].

        Raises:
            DataError: a file cannot be read, or is not an image that the step takes.
        """
        # Here, because those who only read files need no torch.
        import torch

        from export.data.tokens import Batch

        pixels = np.stack([read_pixels(self.paths[row], self._reader) for row in rows])
        return Batch(torch.from_numpy(pixels), None, None, torch.from_numpy(self.targets[rows]))


def read_pixels(path: Path, reader: ImagePreprocessor) -> Array:
    """Return an image file as pixels; raise a DataError if it cannot be read or decoded."""
    try:
        return reader.read(read_image(path), f"image {path}")
    except InvalidRequest as error:
        fix = "Remove it, convert it, or scale it down."
        raise DataError(error.subject, given=error.given, expected=error.expected, fix=fix) from None


def read_image(path: Path) -> bytes:
    """Return the contents of an image file; raise a DataError if it cannot be read."""
    with _reading(path):
        return path.read_bytes()


def _known(path: Path) -> tuple[str, int, int]:
    """Return name, size and time of a file."""
    with _reading(path):
        found = path.stat()
    return path.name, found.st_size, found.st_mtime_ns


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        fix = "Remove it, or make it readable."
        raise DataError(f"{path}", given=Raw(error.strerror), expected="an image", fix=fix) from None


def find_images(directory: Path) -> list[Path]:
    """Return the JPEG and PNG files below a directory, by name; raise a DataError if there are fewer than two."""
    found = sorted(path for path in directory.rglob("*") if path.suffix.lower() in ENDINGS)
    if len(found) < 2:
        given = Raw(f"{len(found)} images" if directory.is_dir() else "no directory")
        expected = f"two at least, {', '.join(ENDINGS)}"
        raise DataError(f"images in {directory}", given=given, expected=expected, fix=_FIX)
    return found
