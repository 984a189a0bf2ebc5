"""Texts and images without labels: files of them, and sentences of ours for models that come without data."""

from __future__ import annotations

import lzma
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
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


#: A bundle's limit for a text.
MAX_TEXT_BYTES = 16 * 1024
#: Formats that other commands read, by the end of a file's name.
_OTHER_FORMATS = (".csv", ".json", ".jsonl", ".parquet", ".arrow", ".xlsx", ".gz", ".zip")
#: Of different lengths, with names, numbers and punctuation. Written for this purpose.
_SENTENCES = (
    "The train to Lisbon leaves at 7:45 from platform nine.",
    "Anna Keller joined Siemens in Munich last spring.",
    "Good soup.",
    "I would not buy this kettle again, because its lid broke within a week.",
    "Two dogs are running along the beach.",
    "Where can I renew my passport?",
    "The committee postponed its vote on the new harbour until March 2031.",
    "He plays the violin.",
    "Rain is expected in the north of Norway, with gusts of up to 90 km/h near Tromsø.",
    "The film is slow at first, but its last half hour is wonderful!",
    "Please send the invoice to the address below.",
    "Marie Curie was born in Warsaw and worked in Paris.",
    "A woman slices onions in a small kitchen while the radio reports the football results.",
    "Prices rose by 3.2 % in June.",
    "No.",
    "The battery lasts two days, which is more than the maker promises.",
)


def sample_texts(pair: bool) -> tuple[tuple[str, ...], ...]:
    """Return sentences, each alone and each before another one; for ``pair``, each with eight others."""
    count = len(_SENTENCES)
    if pair:
        return tuple(
            (one, _SENTENCES[(at + step) % count]) for at, one in enumerate(_SENTENCES) for step in range(1, 9)
        )
    shifted = cycle([*_SENTENCES[5:], *_SENTENCES[:5]])
    longer = (f"{one} {other}" for one, other in zip(_SENTENCES, shifted, strict=False))
    return tuple((text,) for text in (*_SENTENCES, *longer))


def read_texts(path: Path, pair: bool) -> tuple[tuple[str, ...], ...]:
    """Read a text in each line, or with ``pair`` two texts with a tab between them; empty lines are left out.

    Args:
        path: plain or ``.xz``.

    Raises:
        DataError: the file is missing, of another format or not UTF-8, a line has another number of texts or one that a
            server would refuse, or there are fewer than two.
    """
    each = "two texts with a tab between them" if pair else "one text without a tab"
    fix = f"Give a UTF-8 file with {each} in each line."
    if path.suffix.lower() in _OTHER_FORMATS:
        given, expected = Raw(f"a {path.suffix} file"), "lines of text, such as .txt or .tsv"
        raise DataError(f"texts {path}", given=given, expected=expected, fix=fix)
    try:
        data = path.read_bytes()
        lines = (lzma.decompress(data) if path.suffix == ".xz" else data).decode("utf-8-sig").split("\n")
    except OSError as error:
        raise DataError(f"texts {path}", given=Raw(error.strerror), expected="a file", fix=fix) from None
    except lzma.LZMAError as error:
        raise DataError(f"texts {path}", given=Raw(error), expected="a complete file of xz", fix=fix) from None
    except UnicodeDecodeError as error:
        raise DataError(f"texts {path}", given=Raw(error), expected="UTF-8", fix=fix) from None
    texts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        items = tuple(text.strip() for text in line.split("\t"))
        if len(items) != 1 + pair or not all(items):
            given = Raw(f"{sum(map(bool, items))} texts in {len(items)} columns")
            raise DataError(f"{path} line {number}", given=given, expected=each, fix=fix)
        size = max(len(text.encode()) for text in items)
        if size > MAX_TEXT_BYTES:
            given, expected = Raw(f"a text of {size} bytes"), f"at most {MAX_TEXT_BYTES}, a bundle's limit"
            raise DataError(f"{path} line {number}", given=given, expected=expected, fix="Shorten it, or leave it out.")
        texts.append(items)
    if len(texts) < 2:
        raise DataError(f"texts {path}", given=Raw(f"{len(texts)} texts"), expected="two at least", fix=fix)
    return tuple(texts)


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
        known = []
        for path in self.paths:
            with _reading(path):
                status = path.stat()
            known.append((path.name, status.st_size, status.st_mtime_ns))
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


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        fix = "Remove it, or make it readable."
        raise DataError(f"{path}", given=Raw(error.strerror), expected="an image", fix=fix) from None


def find_images(directory: Path) -> list[Path]:
    """Return the JPEG and PNG files below a directory, by name; raise a DataError if there are fewer than two."""
    images = sorted(path for path in directory.rglob("*") if path.suffix.lower() in ENDINGS)
    if len(images) < 2:
        given = Raw(f"{len(images)} images" if directory.is_dir() else "no directory")
        expected = f"two at least, {', '.join(ENDINGS)}"
        raise DataError(f"images in {directory}", given=given, expected=expected, fix=_FIX)
    return images
