"""Images of ours, for models that come without data."""

from __future__ import annotations

import importlib
from io import BytesIO

import numpy as np

from edge.bundles.steps import ImagePreprocess

_COUNT = 8


def sample_images(step: ImagePreprocess) -> list[bytes]:
    """Return PNG files: waves of random directions and lengths in each channel, as large as the model reads."""
    random = np.random.default_rng(0)
    y, x = np.mgrid[0 : step.size, 0 : step.size] / step.size
    pillow = importlib.import_module("PIL.Image")
    images = []
    for _ in range(_COUNT):
        parameters = random.uniform(-12, 12, (step.channels, 3))
        waves = np.stack([np.sin(a * x + b * y + c) for a, b, c in parameters], axis=-1)
        pixels = (127.5 * (waves + 1)).astype(np.uint8)
        file = BytesIO()
        pillow.fromarray(pixels if step.channels == 3 else pixels[:, :, 0]).save(file, "PNG")
        images.append(file.getvalue())
    return images
