"""Outputs with a NaN or an infinity: found in every float type, and logged once in a while."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from edge.instruments.nonfinite import NonfiniteWarnings
from edge.scheduling.runs import nonfinite

FLOATS = ("float16", "float32", "float64")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_one_nonfinite_number_is_found_anywhere(dtype: str, bad: float, size: int) -> None:
    for position in {0, size // 2, size - 1}:
        array = np.zeros((1, size), dtype)
        array[0, position] = bad
        assert nonfinite({"good": np.zeros(3, dtype), "y": array}) == ("y",)
        assert nonfinite({"y": array[::-1, ::-1]}) == ("y",)


@pytest.mark.parametrize("dtype", FLOATS)
def test_extreme_numbers_are_finite(dtype: str) -> None:
    limits = np.finfo(dtype)
    assert (
        nonfinite({"y": np.array([limits.max, limits.min, limits.tiny, limits.smallest_subnormal, -0.0], dtype)}) == ()
    )


@pytest.mark.parametrize(
    "array",
    [
        np.array([b"nan", b"inf"], np.object_),
        np.array([2**63 - 1]),
        np.array([True]),
        np.zeros((0, 4), np.float32),
        np.zeros((), np.float32),
    ],
)
def test_other_datatypes_and_empty_arrays_are_finite(array: np.ndarray) -> None:
    assert nonfinite({"y": array}) == ()


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    messages = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return messages


def test_one_warning_per_model_and_period(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "edge.instruments.nonfinite")
    warnings = NonfiniteWarnings(seconds=3600)
    for _ in range(1000):
        warnings.found("m", "half", ["logits", "value"])
    assert logged(caplog) == ["NaN or infinity in logits, value of model 'm', tier 'half'"]
    warnings.found("other", "full", ["y"])  # each model has its own period
    assert logged(caplog) == ["NaN or infinity in y of model 'other', tier 'full'"]


def test_next_warning_has_the_number_of_skipped_ones(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "edge.instruments.nonfinite")
    warnings = NonfiniteWarnings(seconds=3600)
    for _ in range(4):
        warnings.found("m", "full", ["y"])
    logged(caplog)
    warnings._warned_at["m"] = 0.0  # an hour later
    for _ in range(2):
        warnings.found("m", "full", ["y"])
    assert logged(caplog) == ["NaN or infinity in y of model 'm', tier 'full', and in 3 responses before"]
