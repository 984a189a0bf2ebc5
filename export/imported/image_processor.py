"""Image processors of Hugging Face, as the step ``image`` of a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from edge.bundles.steps import ImagePreprocess
from edge.errors import Raw
from export.data.unlabelled import MAX_BYTES, MAX_PIXELS
from export.errors import CheckpointError
from export.models.huggingface import ImageConfig, Side, read_json

#: ConvNextImageProcessor, which ResNet has, too, does not crop images of this size or more.
_UNCROPPED = 384
#: Pillow's numbers of filters.
_FILTERS: dict[int, Literal["bilinear", "bicubic"]] = {2: "bilinear", 3: "bicubic"}


def read_image_processor(path: Path, image_size: int, channels: int) -> ImagePreprocess:
    """Read the ``preprocessor_config.json`` of a model that reads images of a size and a number of channels.

    Raises:
        CheckpointError: it is missing or malformed, leaves a step out, or makes other images than the model reads.
    """
    found = read_json(path, ImageConfig)
    for field in ("do_resize", "do_rescale", "do_normalize"):
        _require(getattr(found, field), path, field, False, "true: every step is part of what the model reads")
    _require(abs(found.rescale_factor * 255 - 1) < 1e-6, path, "rescale_factor", found.rescale_factor, "1/255")
    _require(found.resample in _FILTERS, path, "resample", found.resample, "2 (bilinear) or 3 (bicubic)")
    shorter, final = _sizes(found)
    expected = f"{image_size} x {image_size} pixels in the end, as the model reads them"
    holds = (final.height, final.width) == (image_size, image_size) and (shorter is None or shorter >= image_size)
    _require(holds, path, "size", Raw(msgspec.json.encode(found.size).decode()), expected)
    colours = f"{channels}, one for each colour"
    _require(len(found.image_mean) == channels, path, "image_mean", found.image_mean, colours)
    positive = len(found.image_std) == channels and min(found.image_std) > 0
    _require(positive, path, "image_std", found.image_std, f"{colours}, above 0")
    return ImagePreprocess(
        input="image",
        output="pixels",
        size=image_size,
        colours="rgb" if channels == 3 else "grey",
        mean=found.image_mean,
        std=found.image_std,
        max_bytes=MAX_BYTES,
        max_pixels=MAX_PIXELS,
        resize="stretch" if shorter is None else "crop",
        shorter_side=shorter,
        interpolation=_FILTERS[found.resample],
    )


def _sizes(found: ImageConfig) -> tuple[int | None, Side]:
    """Return the shorter side after the resize, None where both sides are stretched, and the size in the end."""
    size = _side(found.size)
    if found.crop_pct is not None:
        edge = size.shortest_edge or size.height or 0
        return int(edge / found.crop_pct) if edge < _UNCROPPED else None, Side(height=edge, width=edge)
    if found.do_center_crop:
        return size.shortest_edge or 0, _side(found.crop_size)
    return None, size


def _side(size: Side | int | None) -> Side:
    return Side(height=size, width=size) if isinstance(size, int) else size or Side()


def _require(holds: object, path: Path, field: str, given: object, expected: str) -> None:
    if not holds:
        fix = "Save the image processor that the model was trained with: its save_pretrained writes this file."
        raise CheckpointError(f"{path} field {field}", given=given, expected=expected, fix=fix)
