"""Image processors of Hugging Face, as the step ``image`` of a bundle, and sample images for it."""

from __future__ import annotations

import importlib
from io import BytesIO
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np

from edge.bundles.steps import ImagePreprocess
from edge.errors import Raw
from export.data.images import image_step
from export.errors import CheckpointError
from export.models.huggingface import SAVE_AGAIN, read_json

#: ConvNextImageProcessor, which ResNet has, too, does not crop images of this size or more.
_UNCROPPED = 384
#: Images that are made up for models that come without data.
_SAMPLES = 8
_SAVE = "Save the image processor that the model was trained with: its save_pretrained writes this file."
_SIZES = (
    'Write {{"height": {0}, "width": {0}}} for images that are stretched, or {{"max_height": {0}, '
    '"max_width": {0}}} with "do_pad": true for images that keep their proportions, as the model learnt them.'
)
#: Pillow's numbers of filters.
_FILTERS: dict[int, Literal["bilinear", "bicubic"]] = {2: "bilinear", 3: "bicubic"}


class Side(msgspec.Struct, frozen=True, omit_defaults=True):
    """A size of images: of both sides, of the shorter one with the most of the longer one, or the most of both."""

    height: int | None = None
    width: int | None = None
    shortest_edge: int | None = None
    longest_edge: int | None = None
    max_height: int | None = None
    max_width: int | None = None


class ImageConfig(msgspec.Struct, frozen=True):
    """``preprocessor_config.json`` of an image processor; ``resample`` is the number of Pillow's filter.

    ``crop_pct`` is the side of the square that is kept, as a share of the shorter side. With ``do_pad``, pixels follow
    to the right and below up to ``pad_size``, or to the largest image of the batch. Older files of DETR have the
    ``longest_edge`` of ``size`` in ``max_size``.
    """

    image_mean: tuple[float, ...]
    image_std: tuple[float, ...]
    size: Side | int
    resample: int = 2
    do_resize: bool = True
    do_rescale: bool = True
    do_normalize: bool = True
    do_center_crop: bool | None = None
    crop_size: Side | int | None = None
    crop_pct: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    rescale_factor: float = 1 / 255
    do_pad: bool | None = None
    pad_size: Side | None = None
    max_size: int | None = None


def read_image_processor(path: Path, image_size: int, channels: int) -> ImagePreprocess:
    """Read the ``preprocessor_config.json`` of a model that reads images of a size and a number of channels.

    Raises:
        CheckpointError: it is missing or malformed, leaves a step out, or makes other images than the model reads.
    """
    found = read_json(path, ImageConfig, SAVE_AGAIN)
    for field in ("do_resize", "do_rescale"):
        _require(getattr(found, field), path, field, False, "true: every step is part of what the model reads")
    _require(abs(found.rescale_factor * 255 - 1) < 1e-6, path, "rescale_factor", found.rescale_factor, "1/255")
    _require(found.resample in _FILTERS, path, "resample", found.resample, "2 (bilinear) or 3 (bicubic)")
    if found.max_size and isinstance(found.size, int):
        size = Side(shortest_edge=found.size, longest_edge=found.max_size)
        found = msgspec.structs.replace(found, size=size)
    if not found.do_normalize:
        found = msgspec.structs.replace(found, image_mean=(0.0,) * channels, image_std=(1.0,) * channels)
    resize, shorter, final = _sizes(found)
    expected = f"{image_size} x {image_size} pixels in the end, as the model reads them"
    holds = (final.height, final.width) == (image_size, image_size) and (shorter is None or shorter >= image_size)
    fix = _SIZES.format(image_size) if _side(found.size).longest_edge or _side(found.size).max_height else _SAVE
    _require(holds, path, "size", Raw(msgspec.json.encode(found.size).decode()), expected, fix)
    padded = not found.do_pad or found.pad_size in (None, final)
    _require(padded, path, "pad_size", Raw(msgspec.json.encode(found.pad_size).decode()), expected)
    colours = f"{channels}, one for each colour"
    _require(len(found.image_mean) == channels, path, "image_mean", found.image_mean, colours)
    positive = len(found.image_std) == channels and min(found.image_std) > 0
    _require(positive, path, "image_std", found.image_std, f"{colours}, above 0")
    return msgspec.structs.replace(
        image_step(image_size, channels),
        mean=found.image_mean,
        std=found.image_std,
        resize=resize,
        shorter_side=shorter,
        interpolation=_FILTERS[found.resample],
    )


def _sizes(found: ImageConfig) -> tuple[Literal["crop", "stretch", "letterbox"], int | None, Side]:
    """Return how images get their size, the shorter side after the resize of a crop, and the size in the end."""
    size = _side(found.size)
    if found.do_pad and size.max_height and size.max_height == size.max_width:
        return "letterbox", None, Side(height=size.max_height, width=size.max_width)
    if found.crop_pct is not None:
        edge = size.shortest_edge or size.height or 0
        final = Side(height=edge, width=edge)
        return ("crop", int(edge / found.crop_pct), final) if edge < _UNCROPPED else ("stretch", None, final)
    if found.do_center_crop:
        return "crop", size.shortest_edge or 0, _side(found.crop_size)
    return "stretch", None, size


def _side(size: Side | int | None) -> Side:
    return Side(height=size, width=size) if isinstance(size, int) else size or Side()


def _require(holds: object, path: Path, field: str, given: object, expected: str, fix: str = _SAVE) -> None:
    if not holds:
        raise CheckpointError(f"{path} field {field}", given=given, expected=expected, fix=fix)


def sample_images(step: ImagePreprocess) -> list[bytes]:
    """Return PNG files: waves of random directions and lengths in each channel, as large as the model reads."""
    random = np.random.default_rng(0)
    y, x = np.mgrid[0 : step.size, 0 : step.size] / step.size
    pillow = importlib.import_module("PIL.Image")
    images = []
    for _ in range(_SAMPLES):
        parameters = random.uniform(-12, 12, (step.channels, 3))
        waves = np.stack([np.sin(a * x + b * y + c) for a, b, c in parameters], axis=-1)
        pixels = (127.5 * (waves + 1)).astype(np.uint8)
        file = BytesIO()
        pillow.fromarray(pixels if step.channels == 3 else pixels[:, :, 0]).save(file, "PNG")
        images.append(file.getvalue())
    return images
