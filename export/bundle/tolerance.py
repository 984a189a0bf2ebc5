"""Sizes of outputs, from which the tolerances of golden checks are computed."""

from __future__ import annotations

import numpy as np

from edge.datatypes import Array


def spread_of(output: Array) -> float:
    """Return the standard deviation of an output, or the largest magnitude of a constant one; 0 of whole numbers."""
    # Whole numbers and texts are the same on every machine.
    if output.dtype.kind != "f":
        return 0.0
    values = output.astype(np.float64)
    return float(values.std()) or float(np.abs(values).max())


def two_digits(value: float) -> float:
    """Return a number for those who read manifests."""
    return float(f"{value:.1e}")
