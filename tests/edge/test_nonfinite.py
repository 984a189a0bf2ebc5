"""Answers with a NaN or an infinity: found in every float type, and logged at a limited rate."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from edge.instruments.nonfinite import NonfiniteWarnings
from edge.scheduling.runs import nonfinite

FLOATS = ("float16", "float32", "float64")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("position", [0, 500, 999])
def test_bad_number_is_found_anywhere(dtype: str, position: int) -> None:
    for bad in (np.nan, np.inf, -np.inf):
        array = np.zeros((1, 1000), dtype)
        array[0, position] = bad
        assert nonfinite({"good": np.zeros(3, dtype), "y": array}) == nonfinite({"y": array[::-1, ::-1]}) == ("y",)


def test_extreme_numbers_and_other_types_are_no_bad_numbers() -> None:
    limits = [np.finfo(dtype) for dtype in FLOATS]
    for array in (
        *(np.array([it.max, it.min, it.smallest_subnormal, -0.0], it.dtype) for it in limits),
        *(np.array([b"nan", b"inf"], np.object_), np.array([2**63 - 1]), np.array([True])),
        *(np.zeros(shape, np.float32) for shape in ((0, 4), ())),
    ):
        assert nonfinite({"y": array}) == ()


def test_one_warning_per_model_and_period(caplog: pytest.LogCaptureFixture) -> None:
    def logged() -> list[str]:
        messages = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return messages

    caplog.set_level(logging.WARNING, "edge.instruments.nonfinite")
    warnings = NonfiniteWarnings(seconds=3600)
    for _ in range(4):
        warnings.found("m", "half", ["logits", "value"])
    assert logged() == ["NaN or infinity in logits, value of model 'm', tier 'half'"]
    warnings.found("other", "full", ["y"])
    assert logged() == ["NaN or infinity in y of model 'other', tier 'full'"]
    warnings._warned_at["m"] = 0.0  # an hour later
    for _ in range(2):
        warnings.found("m", "full", ["y"])
    assert logged() == ["NaN or infinity in y of model 'm', tier 'full', and in 3 responses before"]
