"""Trend of measurements such as the memory of a server."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def slope(values: Sequence[float]) -> float:
    """The growth from one value to the next, by least squares.

    Raises:
        ValueError: fewer than two values.
    """
    if len(values) < 2:
        raise ValueError(f"slope: got {len(values)} values, expected at least 2")
    return float(np.polyfit(np.arange(len(values)), values, 1)[0])
