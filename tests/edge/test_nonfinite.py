"""Answers that hold a NaN or an infinity: found in every float type, told now and then, never changed."""

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
def test_one_bad_number_is_found_wherever_it_is(dtype: str, bad: float, size: int) -> None:
    for position in {0, size // 2, size - 1}:
        array = np.zeros((1, size), dtype)
        array[0, position] = bad
        assert nonfinite({"good": np.zeros(3, dtype), "y": array}) == ("y",)
        assert nonfinite({"y": array[::-1, ::-1]}) == ("y",)


@pytest.mark.parametrize("dtype", FLOATS)
def test_extreme_numbers_are_numbers(dtype: str) -> None:
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
def test_what_holds_no_floats_or_none_at_all(array: np.ndarray) -> None:
    assert nonfinite({"y": array}) == ()


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    messages = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return messages


def test_a_model_is_warned_of_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "edge.instruments.nonfinite")
    warnings = NonfiniteWarnings(seconds=3600)
    for _ in range(1000):
        warnings.found("m", "half", ["logits", "value"])
    assert told(caplog) == ["NaN or infinity in logits, value of model 'm', tier 'half'"]
    warnings.found("other", "full", ["y"])  # of each model
    assert told(caplog) == ["NaN or infinity in y of model 'other', tier 'full'"]


def test_those_between_two_warnings_are_told_by_their_number(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "edge.instruments.nonfinite")
    warnings = NonfiniteWarnings(seconds=3600)
    for _ in range(4):
        warnings.found("m", "full", ["y"])
    told(caplog)
    warnings._warned_at["m"] = 0.0  # an hour later
    for _ in range(2):
        warnings.found("m", "full", ["y"])
    assert told(caplog) == ["NaN or infinity in y of model 'm', tier 'full', and in 3 responses before"]
