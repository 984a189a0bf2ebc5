"""JPEG and PNG images to the pixels that a graph reads. Only this file imports Pillow, when a model needs it."""

from __future__ import annotations

import re
import struct
import warnings
from collections.abc import Callable
from contextlib import suppress
from io import BytesIO
from typing import TYPE_CHECKING, Final, Literal

import numpy as np

from edge.bundles.boxes import Picture
from edge.bundles.steps import ImagePreprocess
from edge.datatypes import Array
from edge.errors import BackendError, InvalidRequest, Raw

if TYPE_CHECKING:
    from PIL.ImageFile import ImageFile

_JPEG, _PNG = "JPEG", "PNG"
#: How files of each format begin. All but the first two are only named in errors.
_BEGINNINGS: Final = {
    _JPEG: re.compile(rb"\xff\xd8\xff"),
    _PNG: re.compile(rb"\x89PNG\r\n\x1a\n"),
    "GIF": re.compile(rb"GIF8[79]a"),
    "WebP": re.compile(rb"RIFF.{4}WEBP", re.DOTALL),
    "BMP": re.compile(rb"BM.{4}\0{4}", re.DOTALL),
    "TIFF": re.compile(rb"II\*\0|MM\0\*"),
    "HEIC or AVIF": re.compile(rb".{4}ftyp", re.DOTALL),
    "SVG or XML": re.compile(rb"\s*<(svg|\?xml)"),
}
_SHOWN_BYTES: Final = 16
#: How a JPEG and a PNG begin in base64.
_IN_BASE64: Final = (b"/9j/", b"iVBORw0KGgo")
#: Offset in a PNG of the number of bits of each channel.
_PNG_BITS: Final = 24
#: A marker of a JPEG that begins a segment, or ends the image. Within compressed data, 0xFF has 0 or a restart marker
#: behind it.
_MARKER: Final = re.compile(rb"\xff([\xc0-\xcf\xd9-\xfe])")
_SCAN: Final = b"\xda"
_END: Final = b"\xd9"
#: Usual progressive files have ten scans. Metadata of 16 MiB are 256 segments.
_MAX_SCANS: Final = 100
_MAX_SEGMENTS: Final = 2000
#: How each resource in the metadata of Photoshop begins, all of which Pillow reads.
_RESOURCE: Final = b"8BIM"
_MAX_RESOURCES: Final = 10_000
#: Offset of the first chunk in a PNG, and the bytes of a chunk beside its data.
_PNG_CHUNKS, _PNG_OVERHEAD = 8, 12
#: Encoders write chunks of 4 KiB or more with pixels, and a few dozen others.
_MAX_CHUNKS: Final = 32_768
_MAX_OTHER_CHUNKS: Final = 256
#: The tag of EXIF that says how a camera was held.
_ORIENTATION: Final = 0x0112
_EXIF: Final = b"Exif\0\0"
#: Cameras write a few dozen. Pillow reads the value of each, and warns of it if it cannot.
_MAX_ENTRIES: Final = 1000
#: A JPEG is decoded at an eighth, a quarter or half of its size where this many times the wanted size is left.
_DRAFT_MARGIN: Final = 2
#: Difference of a value that other releases of the decoder may make: two of 255 levels.
_TOLERANCE: Final = 2 / 255
#: What Pillow raises for files that break their format; struct.error only in older releases.
_BROKEN: Final = (OSError, SyntaxError, ValueError, OverflowError, LookupError, TypeError, EOFError, struct.error)


class ImagePreprocessor:
    """Images (BYTES, [-1, 1]) to pixels (FP32, [-1, channels, size, size]); see :class:`ImagePreprocess`.

    Resizing and normalising compute what torchvision's ``Resize``, ``CenterCrop``, ``ToTensor`` and ``Normalize`` do on
    Pillow images. Images are turned upright by their EXIF orientation; CMYK becomes RGB as in Pillow's ``convert``.
    Other formats, broken files, animations, 16 bits in a channel, and pixels that are not opaque are refused. Raise a
    BackendError if Pillow is not installed.
    """

    largest: float | None = None

    def __init__(self, config: ImagePreprocess) -> None:
        try:
            from PIL import Image, JpegImagePlugin, PngImagePlugin
        except ImportError as error:
            fix = "Install the extra 'images'."
            raise BackendError("pillow", given=Raw(error), expected="an importable package", fix=fix) from None
        warnings.filterwarnings("ignore", module=r"PIL\.")  # about files of clients
        self.inputs, self.graph_inputs = config.inputs, config.graph_inputs
        # JPEG does not define its decoder to the last bit.
        self.tolerance = _TOLERANCE / min(config.std)
        self._config = config
        # The classes, because Image.open would check the size against a limit of its own.
        self._readers: dict[str, type[ImageFile]] = {
            _JPEG: JpegImagePlugin.JpegImageFile,
            _PNG: PngImagePlugin.PngImageFile,
        }
        self._filter = Image.Resampling[config.interpolation.upper()]
        turns = Image.Transpose
        self._upright = {  # those from 5 on swap width and height
            2: turns.FLIP_LEFT_RIGHT,
            3: turns.ROTATE_180,
            4: turns.FLIP_TOP_BOTTOM,
            5: turns.TRANSPOSE,
            6: turns.ROTATE_270,
            7: turns.TRANSVERSE,
            8: turns.ROTATE_90,
        }
        self._mode = "RGB" if config.colours == "rgb" else "L"
        self._mean, self._std = (np.array(values, np.float32)[:, None, None] for values in (config.mean, config.std))

    def slow(self, size_bytes: int) -> bool:
        return True

    def __call__(self, *images: Array, go_on: Callable[[], None] = lambda: None) -> dict[str, Array]:
        return self.placed(*images, go_on=go_on)[0]

    def placed(
        self, *images: Array, go_on: Callable[[], None] = lambda: None
    ) -> tuple[dict[str, Array], list[Picture]]:
        """Return what a call does, and the place of each image in its pixels."""
        rows, name = images[0].ravel().tolist(), self.inputs[0].name
        subject, pixels, pictures = f"image in input {name!r}", [], []
        for row, data in enumerate(rows, 1):
            go_on()
            read, picture = self.read_placed(data, f"{subject} row {row}" if len(rows) > 1 else subject)
            pixels.append(read)
            pictures.append(picture)
        return {self.graph_inputs[0]: np.stack(pixels)}, pictures

    def read(self, data: bytes, subject: str) -> Array:
        """Return the pixels of one image, [channels, size, size]; raise an InvalidRequest about ``subject``."""
        return self.read_placed(data, subject)[0]

    def read_placed(self, data: bytes, subject: str) -> tuple[Array, Picture]:
        """Return what :meth:`read` does, and the place of the image in its pixels."""
        if len(data) > self._config.max_bytes:
            given, expected = f"{len(data)} bytes", f"at most {self._config.max_bytes}"
            raise _refused(subject, given, expected, "Scale it down, or compress it more.")
        kind = next((name for name, beginning in _BEGINNINGS.items() if beginning.match(data)), "")
        if kind not in self._readers:
            given = kind or (f"bytes that begin with {data[:_SHOWN_BYTES]!r}" if data else "no bytes")
            fix = "Convert the image, and send the bytes of its file."
            if data.startswith(_IN_BASE64):
                fix = 'Send base64 in JSON as {"b64": "…"}, or the bytes of the file as binary data.'
            raise _refused(subject, given, "JPEG or PNG", fix)
        try:
            (_check_segments if kind == _JPEG else _check_chunks)(data, subject)
            image = self._readers[kind](BytesIO(data))
            self._check(image, data, subject)
            square, picture = self._square(image, subject)
        except _BROKEN as error:
            raise _refused(subject, f"{error}", f"a complete {kind}", "Send the file's bytes unchanged.") from None
        planes = square.reshape(*square.shape[:2], -1).transpose(2, 0, 1)
        pixels = np.ascontiguousarray((np.divide(planes, 255, dtype=np.float32) - self._mean) / self._std)
        width, height = picture.resized
        pixels[:, height:], pixels[:, :, width:] = 0, 0  # beside a letterbox; elsewhere, the image fills the square
        return pixels, picture

    def _check(self, image: ImageFile, data: bytes, subject: str) -> None:
        """Refuse by the header, before any pixel is decoded."""
        most = self._config.max_pixels
        for what, (width, height) in (("", image.size), (" after the resize", self._resized(image.size))):
            if width * height > most:
                given, expected = f"{width} x {height} pixels{what}", f"at most {most} pixels"
                raise _refused(subject, given, expected, "Scale it down, or crop it.")
        if getattr(image, "is_animated", False):
            raise _refused(subject, "an animated PNG", "a single picture", "Send one of its frames.")
        if image.format == _PNG and data[_PNG_BITS] == 16:
            raise _refused(subject, "16 bits in a channel", "at most 8", "Convert it to 8 bits.")

    def _square(self, image: ImageFile, subject: str) -> tuple[Array, Picture]:
        """Return an image in its final size, uint8 [size, size] or [size, size, channels], and its place there."""
        given, size, (width, height) = image.size, self._config.size, self._resized(image.size)
        draft = image.draft(None, (_DRAFT_MARGIN * width, _DRAFT_MARGIN * height))  # of a JPEG only
        image.load()
        if image.has_transparency_data and image.convert("RGBA").getchannel("A").getextrema()[0] != 255:
            raise _refused(subject, "transparent pixels", "an opaque image", "Put it on a background.")
        plain = image.convert(self._mode)
        plain = plain.resize((width, height), self._filter, box=draft[1] if draft else None)
        orientation = _orientation(image, subject)
        if orientation in self._upright:
            plain = plain.transpose(self._upright[orientation])
            given = given[::-1] if orientation >= 5 else given
        left, top = (round((side - size) / 2) for side in plain.size) if self._config.resize == "crop" else (0, 0)
        square = np.asarray(plain.crop((left, top, left + size, top + size)))
        return square, Picture(given, plain.size, (-left, -top), size)

    def _resized(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return width and height after the resize, before the crop."""
        if self._config.resize == "stretch":
            return self._config.size, self._config.size
        if self._config.resize == "letterbox":
            scale = self._config.size / max(size)  # first, as transformers does, which leaves some sides a pixel short
            width, height = (max(int(other * scale), 1) for other in size)
        else:
            side, shorter = self._config.shorter_side or self._config.size, min(size)
            width, height = (side * other // shorter for other in size)
        return width, height


def _check_segments(data: bytes, subject: str) -> None:
    """Refuse a JPEG of too many parts: a scan of 55 bytes visits all pixels. What follows the image does not count."""
    scans = segments = offset = 0
    while (marker := _MARKER.search(data, offset)) and marker[1] != _END:
        offset = marker.end() + max(int.from_bytes(data[marker.end() : marker.end() + 2], "big"), 2)
        segments += 1
        scans += marker[1] == _SCAN
        if scans > _MAX_SCANS or segments > _MAX_SEGMENTS:
            given, expected = f"{segments} segments or more, {scans} of them scans", f"at most {_MAX_SEGMENTS} segments"
            raise _refused(subject, given, f"{expected} and {_MAX_SCANS} scans", "Save it again as a usual JPEG.")
    if data.count(_RESOURCE) > _MAX_RESOURCES:
        expected = f"at most {_MAX_RESOURCES}"
        raise _refused(subject, "more resources of Photoshop", expected, "Save it again without its metadata.")


def _check_chunks(data: bytes, subject: str) -> None:
    """Refuse a PNG of too many parts: Pillow reads each of them, and inflates up to 1 MiB of a few bytes."""
    chunks = others = 0
    offset = _PNG_CHUNKS
    while offset + _PNG_OVERHEAD <= len(data):
        length, kind = int.from_bytes(data[offset : offset + 4], "big"), data[offset + 4 : offset + 8]
        if kind == b"IEND":
            break
        offset += _PNG_OVERHEAD + length
        chunks += 1
        others += kind != b"IDAT"
        if chunks > _MAX_CHUNKS or others > _MAX_OTHER_CHUNKS:
            given = f"{chunks} chunks or more, {others} of them without pixels"
            expected = f"at most {_MAX_CHUNKS} chunks, and {_MAX_OTHER_CHUNKS} without pixels"
            raise _refused(subject, given, expected, "Save it again without its metadata.")


def _orientation(image: ImageFile, subject: str) -> int:
    """Return the EXIF orientation, 1 to 8; 1, upright, if there is none that can be read."""
    entries = _exif_entries(image)
    if entries > _MAX_ENTRIES:
        given, fix = f"{entries} entries of EXIF", "Save it again without its metadata."
        raise _refused(subject, given, f"at most {_MAX_ENTRIES}", fix)
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # a broken EXIF raises many types, and browsers show such images as they are stored
        return 1


def _exif_entries(image: ImageFile) -> int:
    """Return how many entries the EXIF of a loaded image announces, each of which Pillow would read."""
    data, profile = image.info.get("exif", b""), image.info.get("Raw profile type exif", "")
    if profile and not data:  # of a PNG, in hexadecimal behind three lines
        with suppress(ValueError):
            data = bytes.fromhex("".join(profile.split("\n")[3:]))
    while data.startswith(_EXIF):
        data = data[len(_EXIF) :]
    order: Literal["little", "big"] = "little" if data.startswith(b"II") else "big"
    start = int.from_bytes(data[4:8], order)
    return int.from_bytes(data[start : start + 2], order)


def _refused(subject: str, given: str, expected: str, fix: str) -> InvalidRequest:
    return InvalidRequest(subject, given=Raw(given), expected=expected, fix=fix)
