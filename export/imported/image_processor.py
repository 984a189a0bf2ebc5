"""Image processors of Hugging Face, as the step ``image`` of a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from edge.bundles.manifest import ImagePreprocess
from edge.errors import Literally
from export.errors import CheckpointError
from export.imported.config import ImageConfig, Side, read_json
from export.transformer import TransformerConfig

_NAME = "preprocessor_config.json"
#: Pillow's numbers of filters.
_FILTERS: dict[int, Literal["bilinear", "bicubic"]] = {2: "bilinear", 3: "bicubic"}
_MAX_BYTES, _MAX_PIXELS = 16 << 20, 50_000_000


def read_image_processor(directory: Path, config: TransformerConfig) -> ImagePreprocess:
    """Read ``preprocessor_config.json``.

    Raises:
        CheckpointError: it is missing or malformed, leaves a step out, or makes other images than the model reads.
    """
    path = directory / _NAME
    found = read_json(path, ImageConfig)
    for field in ("do_resize", "do_rescale", "do_normalize"):
        _require(getattr(found, field), path, field, False, "true: every step is part of what the model reads")
    _require(abs(found.rescale_factor * 255 - 1) < 1e-6, path, "rescale_factor", found.rescale_factor, "1/255")
    _require(found.resample in _FILTERS, path, "resample", found.resample, "2 (bilinear) or 3 (bicubic)")
    wanted, size = (config.image_size, config.image_size), _side(found.size)
    crop = _side(found.crop_size) if found.do_center_crop else None
    shorter = size.shortest_edge
    final = crop or size
    square = (final.height, final.width)
    expected = f"{config.image_size} x {config.image_size} pixels in the end, as config.json has it"
    enough = crop is None or (shorter is not None and shorter >= config.image_size)
    _require(square == wanted and enough, path, "size", Literally(f"{found.size}"), expected)
    colours = f"{config.channels}, one for each colour"
    _require(len(found.image_mean) == config.channels, path, "image_mean", found.image_mean, colours)
    positive = len(found.image_std) == config.channels and min(found.image_std) > 0
    _require(positive, path, "image_std", found.image_std, f"{colours}, above 0")
    return ImagePreprocess(
        input="image",
        output="pixels",
        size=config.image_size,
        colours="rgb" if config.channels == 3 else "grey",
        mean=found.image_mean,
        std=found.image_std,
        max_bytes=_MAX_BYTES,
        max_pixels=_MAX_PIXELS,
        resize="stretch" if crop is None else "crop",
        shorter_side=None if crop is None else shorter,
        interpolation=_FILTERS[found.resample],
    )


def _side(size: Side | int | None) -> Side:
    return Side(height=size, width=size) if isinstance(size, int) else size or Side()


def _require(holds: object, path: Path, field: str, given: object, expected: str) -> None:
    if not holds:
        fix = "Save the image processor that the model was trained with: its save_pretrained writes this file."
        raise CheckpointError(f"{path} field {field}", given=given, expected=expected, fix=fix)
