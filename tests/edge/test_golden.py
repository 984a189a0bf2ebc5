"""The golden set: its file, the comparison, and the check of a runner."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.bundles.golden import Golden, check_runner, compare, decode
from edge.bundles.manifest import Tolerance
from edge.errors import BundleError, GoldenError
from edge.runtimes.onnxruntime_runner import OnnxRuntimeRunner
from tests.support.models import oracle_golden, oracle_manifest, oracle_onnx

EXACT = Tolerance(atol=0, rtol=0)
ENCODED = oracle_golden().encode()


def of_values(*values: float) -> Golden:
    return Golden({"x": np.zeros((len(values), 1))}, {"value": np.array(values)})


def test_round_trip():
    golden, decoded = oracle_golden(), decode(ENCODED, oracle_manifest(), "golden")
    for kind in ("inputs", "outputs", "raw"):
        arrays = getattr(decoded, kind)
        assert set(arrays) == set(getattr(golden, kind))
        for name, array in getattr(golden, kind).items():
            np.testing.assert_array_equal(arrays[name], array)
            assert arrays[name].dtype == array.dtype
    assert decoded.rows == 8


def test_equal_sets_are_equal_bytes():
    assert oracle_golden().encode() == ENCODED


@settings(deadline=None)
@given(st.integers(0, len(ENCODED)), st.integers(0, 40), st.binary(max_size=40))
def test_mutated_bytes_give_nothing_but_a_bundle_error(start: int, length: int, inserted: bytes):
    with suppress(BundleError):
        decode(ENCODED[:start] + inserted + ENCODED[start + length :], oracle_manifest(), "golden")


@settings(deadline=None)
@given(st.dictionaries(st.integers(0, len(ENCODED) - 1), st.integers(0, 255), min_size=1, max_size=3))
def test_flipped_bytes_give_nothing_but_a_bundle_error(changes: dict[int, int]):
    mutated = bytearray(ENCODED)
    for position, value in changes.items():
        mutated[position] = value
    with suppress(BundleError):
        decode(bytes(mutated), oracle_manifest(), "golden")


@pytest.mark.parametrize(
    ("got", "tolerance", "passed"),
    [
        ([1.0, -100.0], EXACT, True),
        ([1.0, -100.5], EXACT, False),
        ([1.1, -100.1], Tolerance(atol=0.11, rtol=0), True),
        ([1.1, -101.0], Tolerance(atol=0.11, rtol=0.01), True),
        ([1.2, -100.0], Tolerance(atol=0.11, rtol=0.01), False),
        ([float("nan"), -100.0], Tolerance(atol=1e9, rtol=1e9), False),
        ([float("inf"), -100.0], Tolerance(atol=1e9, rtol=1e9), False),
    ],
)
def test_tolerance(got: list[float], tolerance: Tolerance, passed: bool):
    assert compare({"value": np.array(got)}, of_values(1.0, -100.0), tolerance).passed is passed


def test_report_gives_the_largest_difference():
    report = compare({"value": np.array([1.5, -103.0])}, of_values(1.0, -100.0), EXACT)
    assert report.max_abs_diff == 3.0
    assert report.rows == 2


def test_other_shape_fails_instead_of_broadcasting():
    report = compare({"value": np.array([[1.0]])}, of_values(1.0, 1.0), Tolerance(atol=1, rtol=1))
    assert not report.passed


def test_text_has_to_be_equal():
    golden = Golden({"x": np.zeros((1, 1))}, {"label": np.array([b"yes"])})
    assert compare({"label": np.array([b"yes"], object)}, golden, EXACT).passed
    assert not compare({"label": np.array([b"no"], object)}, golden, EXACT).passed


@pytest.mark.parametrize("max_rows", [0, 1, 3, 8, 64])
def test_oracle_reproduces_its_set_in_parts_of_any_size(max_rows: int):
    runner = OnnxRuntimeRunner(oracle_onnx(), subject="oracle")
    report = check_runner(runner, oracle_golden(), EXACT, "oracle", max_rows)
    assert report.passed
    assert report.rows == 8
    assert report.max_abs_diff == 0.0


def test_failure_names_output_and_both_numbers():
    good = oracle_golden()
    golden = Golden(good.inputs, {"value": good.outputs["value"] + np.float32(0.5)})
    runner = OnnxRuntimeRunner(oracle_onnx(), subject="oracle")
    with pytest.raises(GoldenError, match=r"oracle output 'value' on 8 golden rows: got a largest difference of 0\.5"):
        check_runner(runner, golden, Tolerance(atol=0.25, rtol=0), "oracle", 64)
