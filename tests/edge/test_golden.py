"""The golden set: its file, the comparison, and the check of a runner."""

import io
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.bundles.golden import Golden, GoldenReport, OutputDiff, check_outputs, check_runner, compare, decode
from edge.bundles.manifest import Tolerance
from edge.errors import BundleError, GoldenError
from edge.runtimes.onnxruntime_runner import OnnxRuntimeRunner
from tests.support.models import oracle_golden, oracle_manifest, oracle_onnx

EXACT = Tolerance(atol=0, rtol=0)
ENCODED = oracle_golden().encode()
INF, NAN = float("inf"), float("nan")


def of(*values):
    return Golden({"x": np.zeros((len(values), 1))}, {"value": np.array(values)})


def test_set_is_read_back_and_equal_sets_are_equal_bytes():
    golden, decoded = oracle_golden(), decode(ENCODED, oracle_manifest(), "golden")
    for kind in ("inputs", "outputs", "raw"):
        arrays = getattr(decoded, kind)
        assert set(arrays) == set(getattr(golden, kind))
        for name, array in getattr(golden, kind).items():
            np.testing.assert_array_equal(arrays[name], array)
            assert arrays[name].dtype == array.dtype
    assert decoded.rows == 8
    assert decoded.encode() == ENCODED
    assert all(kind.__struct_config__.frozen for kind in (Golden, GoldenReport, OutputDiff))
    text = Golden({"x": np.array([b"a"], object)}, {})
    assert text.encode() == Golden({"x": np.array([b"a"])}, {}).encode()


def test_set_that_differs_from_the_manifest_is_rejected():
    for key, array, message in (
        ("odd/x", np.zeros(1), "golden array 'odd/x': got 'odd/x', expected input/…, output/… or raw/…. Export the"),
        ("input/y", np.zeros(1), "golden input names: got ['x', 'y'], expected exactly ['x']. Export the bundle"),
        ("raw/y", np.zeros(8), "golden raw: got ['expression', 'y'], expected ['expression']. Export the bundle"),
        ("output/value", np.zeros((0, 1), "f4"), "golden output 'value': got FP32 [0, 1], expected FP32 [-1, 1], not"),
        ("output/value", np.zeros((8, 1), "f8"), "golden output 'value': got FP64 [8, 1], expected FP32 [-1, 1], not"),
        ("output/value", np.zeros((8, 2), "f4"), "golden output 'value': got FP32 [8, 2], expected FP32 [-1, 1], not"),
        ("output/value", np.full((8, 1), INF, "f4"), "golden output 'value': got NaN or Inf, expected finite values."),
        ("output/value", np.zeros((7, 1), "f4"), "golden: got {'input/x': 8, 'output/value': 7, 'raw/expression': 8}"),
    ):
        with np.load(io.BytesIO(ENCODED)) as good:
            arrays = {**good, key: array}
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)
        with pytest.raises(BundleError) as caught:
            decode(buffer.getvalue(), oracle_manifest(), "golden")
        assert str(caught.value).startswith(message)


@settings(deadline=None)
@given(st.integers(0, len(ENCODED)), st.integers(0, 40), st.binary(max_size=40))
def test_mutated_bytes_raise_only_bundle_errors(start, length, inserted):
    with suppress(BundleError):
        decode(ENCODED[:start] + inserted + ENCODED[start + length :], oracle_manifest(), "golden")


def test_difference_is_compared_with_the_tolerance():
    for got, tolerance, expected in (
        ([1.0, -100.0], EXACT, (0.0, 0.0, True, 0)),
        ([1.0, -100.5], EXACT, (0.5, 0.0, False, 0)),
        ([1.5, -103.0], EXACT, (3.0, 0.0, False, 0)),
        ([1.25, -100.25], Tolerance(atol=0.25, rtol=0), (0.25, 0.25, True, 0)),
        ([1.0, -101.25], Tolerance(atol=0.25, rtol=0.01), (1.25, 1.25, True, 0)),
        ([1.5, -100.0], Tolerance(atol=0.25, rtol=0.01), (0.5, 0.26, False, 0)),
        ([NAN, -100.0], Tolerance(atol=1e9, rtol=1e9), (NAN, 2e9, False, 1)),
        ([1.0, INF], Tolerance(atol=1e9, rtol=1e9), (INF, 1e9 + 1e11, False, 1)),
    ):
        report = compare({"value": np.array(got)}, of(1.0, -100.0), tolerance)
        (diff,) = report.outputs
        assert (diff.max_abs_diff, diff.allowed, diff.passed, diff.nonfinite) == pytest.approx(expected, nan_ok=True)
        assert report.max_abs_diff == pytest.approx(expected[0], nan_ok=True)
        assert (report.rows, report.passed) == (2, expected[2])


def test_the_root_mean_square_of_all_differences_is_limited_too():
    tolerance = Tolerance(atol=1, rtol=0, rms=0.5)
    far, everywhere = {"value": np.array([1.0, -99.3])}, {"value": np.array([1.6, -99.4])}
    assert compare(far, of(1.0, -100.0), tolerance).passed
    with pytest.raises(GoldenError, match=r"golden rows: got a root mean square of 0\.6, expected at most 0\.5"):
        check_outputs(everywhere, of(1.0, -100.0), tolerance, "m")


def test_an_output_may_have_a_limit_of_its_own():
    golden = Golden({"x": np.zeros((1, 1))}, {"boxes": np.array([300.0]), "scores": np.array([0.3])})
    far = {"boxes": np.array([301.0]), "scores": np.array([0.0])}
    assert compare(far, golden, Tolerance(atol=1, rtol=0)).passed
    boxes, scores = compare(far, golden, Tolerance(atol=1, rtol=0, outputs={"scores": 0.01})).outputs
    assert (boxes.passed, boxes.allowed, scores.passed, scores.allowed) == (True, 1, False, 0.01)


def test_other_shape_or_text_fails():
    (diff,) = compare({"value": np.array([[1.0]])}, of(1.0, 1.0), Tolerance(atol=1, rtol=1)).outputs
    assert diff == OutputDiff("value", INF, 0.0, False)
    (diff,) = compare({"value": np.array([b"yes", b"no"], object)}, of(b"yes", b"no"), EXACT).outputs
    assert diff == OutputDiff("value", 0.0, 0.0, True)
    for wrong, message in (
        (["longer", "same"], r"m output 'value' on golden row 0: got 'longer', expected 'long'\. Do not serve"),
        (["long", "sam"], r"on golden row 1: got 'sam', expected 'same'"),
        (["long", "sam\N{BLACK STAR}e"], r"on golden row 1: got 'sam★e', expected 'same'"),
    ):
        for dtype in (object, np.bytes_):
            with pytest.raises(GoldenError, match=message):
                check_outputs(
                    {"value": np.array([text.encode() for text in wrong], dtype)}, of(b"long", b"same"), EXACT, "m"
                )
    begin, end = b"x" * 50, b"y" * 90
    with pytest.raises(GoldenError, match=rf"got '…{'x' * 20}a{'y' * 39}…', expected '…{'x' * 20}b{'y' * 39}…'\."):
        check_outputs({"value": np.array([begin + b"a" + end], object)}, of(begin + b"b" + end), EXACT, "m")
    with pytest.raises(GoldenError, match=r"on 2 golden rows: got the shape \[1, 1\], expected \[2\]\."):
        check_outputs({"value": np.array([[b"long"]], object)}, of(b"long", b"same"), EXACT, "m")


def test_runner_reproduces_the_set_in_parts_of_any_size():
    runner = OnnxRuntimeRunner(oracle_onnx(), subject="oracle")
    good, sizes, infer = oracle_golden(), [], runner.infer

    def count_rows(feeds):
        sizes.append(len(feeds["x"]))
        return infer(feeds)

    runner.infer = count_rows
    for max_rows, expected in ((0, [8]), (3, [3, 3, 2]), (8, [8]), (64, [8])):
        sizes.clear()
        report = check_runner(runner, good, EXACT, "oracle", max_rows)
        assert (report.passed, report.rows, report.max_abs_diff, sizes) == (True, 8, 0.0, expected)
    wrong = Golden(good.inputs, {"value": good.outputs["value"] + np.float32(0.5)})
    message = r"oracle output 'value' on 8 golden rows: got a largest difference of 0\.5, expected at most 0\.25\."
    with pytest.raises(GoldenError, match=message):
        check_runner(runner, wrong, Tolerance(atol=0.25, rtol=0), "oracle", 64)
    runner.infer = lambda feeds: {"value": infer(feeds)["value"] * np.float32(NAN)}
    with pytest.raises(GoldenError, match=r"got 8 values that are not finite, expected at most 0\.25\."):
        check_runner(runner, good, Tolerance(atol=0.25, rtol=0), "oracle", 64)
