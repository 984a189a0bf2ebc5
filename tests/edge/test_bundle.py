"""Bundles on disk and their golden sets: written whole or not at all, read back, compared, and rejected if broken."""

import io
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from edge import errors
from edge.bundles.bundle import Bundle, write_bundle
from edge.bundles.golden import Golden, GoldenReport, OutputDiff, check_outputs, check_runner, compare, decode
from edge.bundles.manifest import Tolerance
from edge.bundles.onnx_file import check_self_contained
from edge.bundles.preprocess import preprocessor
from edge.errors import BundleError, GoldenError
from edge.runtimes.build import load_runner
from edge.runtimes.onnxruntime_runner import OnnxRuntimeRunner
from tests.data.make_broken_bundles import BROKEN_BUNDLES
from tests.support.models import (
    ORACLE_BUNDLE,
    oracle_golden,
    oracle_manifest,
    oracle_onnx,
    write_bundle_of_roles,
    write_oracle_bundle,
)

ROOT = Path(__file__).parents[2]


def test_committed_bundle_is_what_the_code_writes(tmp_path):
    bundle = write_oracle_bundle(tmp_path / "made" / "on the way" / "oracle")
    assert {path.name: path.read_bytes() for path in bundle.path.iterdir()} == {
        path.name: path.read_bytes() for path in ORACLE_BUNDLE.iterdir()
    }
    assert bundle.manifest == Bundle.open(str(ORACLE_BUNDLE)).manifest
    assert bundle.read("model.onnx") == oracle_onnx()
    assert os.listdir(bundle.path.parent) == ["oracle"]


def test_artifact_of_a_role_tier_and_runtime(tmp_path):
    bundle = write_bundle_of_roles(tmp_path / "oracle")
    model, embed, head = (bundle.artifact("onnxruntime", role=role) for role in ("model", "embed", "head"))
    assert (model.file, embed.file, head.file) == ("model.onnx", "embed.onnx", "head.onnx")
    assert bundle.artifact("tensorrt", "full", "head").file == "head-tensorrt.onnx"
    found = "got ['embed for any', 'head for tensorrt', 'model for any', 'head for any']"
    with pytest.raises(BundleError, match=re.escape(f"tier 'full': {found}, expected step for onnxruntime. Take")):
        bundle.artifact("onnxruntime", role="step")
    with pytest.raises(BundleError, match="tier: got 'lean', expected one of full"):
        bundle.artifact("onnxruntime", "lean")
    manifest = bundle.manifest
    assert manifest.tensors(model) == (manifest.inputs, manifest.outputs, manifest.profile, ())
    assert manifest.tensors(embed) == (manifest.inputs, embed.outputs, manifest.profile, ())
    assert manifest.tensors(head) == (embed.outputs, manifest.outputs, head.profile, ())


def test_change_after_opening_is_found_and_a_pipe_does_not_hang(tmp_path):
    bundle = write_oracle_bundle(tmp_path / "oracle")
    model = bundle.path / "model.onnx"
    model.write_bytes(model.read_bytes()[::-1])
    with pytest.raises(BundleError, match="sha256: got"):
        bundle.read("model.onnx")
    assert Bundle.open(bundle.path, models=False)
    model.unlink()
    os.mkfifo(model)
    with pytest.raises(BundleError, match="got no regular file, expected a regular file"):
        Bundle.open(bundle.path)


def test_path_that_is_no_bundle(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    for bundle in ("b", "a"):
        write_oracle_bundle(tmp_path / bundle)
    for name, message in (
        ("nothing", "got nothing there, expected a bundle directory. Give the directory that holds manifest.json."),
        ("file", "got a file, expected a bundle directory. Give the directory that holds manifest.json."),
        (".", "got a directory of bundles, expected a bundle. Give one of its bundles, such as {path}/a."),
    ):
        with pytest.raises(BundleError, match=re.escape(message.format(path=tmp_path))):
            Bundle.open(tmp_path / name)


def test_existing_bundle_is_replaced_only_on_demand_and_by_a_good_one(tmp_path):
    write_oracle_bundle(tmp_path / "oracle", version=1)
    with pytest.raises(BundleError, match="got something there, expected a free path"):
        write_oracle_bundle(tmp_path / "oracle", version=2)
    files = {"model.onnx": oracle_onnx(), "golden.npz": b"no zip"}
    with pytest.raises(BundleError, match=r"expected an \.npz without pickles"):
        write_bundle(tmp_path / "oracle", oracle_manifest(version=2), files, replace=True)
    with pytest.raises(BundleError, match=re.escape(f"{tmp_path}/oracle/manifest.json files entry for 'golden.npz'")):
        write_bundle(tmp_path / "oracle", oracle_manifest(version=2), {"model.onnx": oracle_onnx()}, replace=True)
    assert Bundle.open(tmp_path / "oracle").manifest.version == 1
    write_oracle_bundle(tmp_path / "oracle", version=2, replace=True)
    assert Bundle.open(tmp_path / "oracle").manifest.version == 2
    assert os.listdir(tmp_path) == ["oracle"]


@pytest.mark.parametrize("before", [None, 1])
def test_full_disk_leaves_what_was_there(tmp_path, before):
    target = tmp_path / "place" / "oracle"
    if before:
        write_oracle_bundle(target, version=before)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    assert signal.getsignal(signal.SIGXFSZ) is signal.SIG_IGN  # so that writing raises an OSError
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(BundleError, match=r"File too large, expected .* room to write it\. Free space"):
            write_oracle_bundle(target, version=2, replace=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(target.parent) == (["oracle"] if before else [])
    if before:
        assert Bundle.open(target).manifest.version == before
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(BundleError, match=r"Not a directory|File exists"):
        write_oracle_bundle(tmp_path / "file" / "oracle")


def test_killed_writer_leaves_a_whole_bundle_or_none(tmp_path):
    target = tmp_path / "oracle"
    code = (
        "from pathlib import Path; from tests.support.models import write_oracle_bundle; print(flush=True)\n"
        f"for version in range(1, 10**6): write_oracle_bundle(Path({str(target)!r}), version=version, replace=True)"
    )
    for delay_s in (0.0, 0.02, 0.1):
        with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE) as writer:
            writer.stdout.readline()
            time.sleep(delay_s)
            writer.kill()
        if target.exists():
            assert Bundle.open(target).manifest.version >= 1
        # The name of a half-written bundle starts with a dot, and servers ignore it.
        assert all(name == "oracle" or name.startswith(".oracle.") for name in os.listdir(tmp_path))


def test_readers_never_see_a_mixture(tmp_path):
    target, stop = tmp_path / "oracle", threading.Event()
    write_oracle_bundle(target, version=1)

    def read():
        seen = set()
        while not stop.is_set():
            # Between two versions there is nothing to open, and a mixture is rejected: both are a BundleError.
            with suppress(BundleError):
                seen.add(Bundle.open(target).manifest.version)
        return seen

    with ThreadPoolExecutor() as pool:
        readers = [pool.submit(read) for _ in range(2)]
        for version in range(2, 20):
            write_oracle_bundle(target, version=version, replace=True)
        stop.set()
    assert all(reader.result() <= set(range(1, 20)) for reader in readers)
    assert Bundle.open(target).manifest.version == 19


EXPECTED = json.loads((BROKEN_BUNDLES / "expected.json").read_text())


@pytest.mark.parametrize("case", EXPECTED)
def test_broken_bundle_raises_its_error(case, tmp_path):
    path, expected = BROKEN_BUNDLES / case, EXPECTED[case]
    for models in (True, False):  # read whole at once, and model by model as a server does
        with pytest.raises(errors.FewheadsError) as caught:
            _load(path, tmp_path, models=models)
        assert type(caught.value) is getattr(errors, expected["error"])
        for fragment in expected["fragments"]:
            assert fragment in str(caught.value)
        assert str(path) in caught.value.subject
        assert caught.value.fix.endswith(".")


def _load(path, cache, *, models):
    bundle = Bundle.open(path, models=models)
    preprocessor(bundle)
    load_runner(bundle, "onnxruntime", cache)


def _models_with(tensor):
    """Return models that hold a tensor, one for each place where ONNX allows one."""
    inner, sparse = helper.make_graph([], "inner", [], [], [tensor]), onnx.SparseTensorProto(values=tensor)

    def model(nodes=(), functions=(), **fields):
        return helper.make_model(helper.make_graph(nodes, "g", [], [], **fields), functions=functions)

    values = {"tensor": tensor, "graph": inner, "sparse": sparse}
    values |= {f"{name}s": [value] for name, value in values.items()}
    nodes = {name: helper.make_node("N", [], ["y"], a=value) for name, value in values.items()}
    function = helper.make_function("d", "F", [], ["y"], [nodes["graph"]], [helper.make_opsetid("", 17)])
    default = onnx.FunctionProto(name="F", attribute_proto=[helper.make_attribute("a", tensor)])
    return {
        **{name: model((node,)) for name, node in nodes.items()},
        "initializer": helper.make_model(inner),
        "sparse initializer": model(sparse_initializer=[sparse]),
        "indices": model(sparse_initializer=[onnx.SparseTensorProto(indices=tensor)]),
        "function": model(functions=[function]),
        "default of a function": model(functions=[default]),
        "training": onnx.ModelProto(training_info=[onnx.TrainingInfoProto(algorithm=inner)]),
    }


def test_external_weights_are_found_wherever_they_are():
    inside = numpy_helper.from_array(np.zeros(2, np.float32), "w")
    outside = TensorProto(name="w", external_data=[onnx.StringStringEntryProto(key="location", value="w.bin")])
    for name, model in _models_with(inside).items():
        check_self_contained(model.SerializeToString(), name)
    for name, model in _models_with(outside).items():
        with pytest.raises(BundleError, match=f"{name}: got external data, expected all weights in the ONNX file"):
            check_self_contained(model.SerializeToString(), name)


def _nested(message, *fields):
    """Wrap a message in length-delimited fields, the innermost field first."""
    for field in fields:
        size, prefix = len(message), bytes([field << 3 | 2])
        while size > 127:
            prefix, size = prefix + bytes([size & 127 | 128]), size >> 7
        message = prefix + bytes([size]) + message
    return message


#: graph (7) of a model, and node (1), attribute (5) and subgraph (6) again and again.
DEEP = [_nested(b"", *(6, 5, 1) * levels, 7) for levels in (20, 21)]


def test_bytes_that_are_no_protobuf_are_rejected():
    for data, is_protobuf in (
        (b"", True),
        (oracle_onnx(), True),
        (oracle_onnx()[:-1], False),
        (b"\x08\x96\x01", True),  # a varint of two bytes
        (b"\x08\x96", False),
        (b"\x09" + bytes(8), True),  # 64 bits
        (b"\x09" + bytes(7), False),
        (b"\x0d" + bytes(4), True),  # 32 bits
        (b"\x0d" + bytes(3), False),
        (b"\x0b", False),  # a group
        (b"\x08" + b"\xff" * 9 + b"\x01", True),
        (b"\x08" + b"\xff" * 10 + b"\x01", False),
        (b"\x08" + b"\xff" * 9 + b"\x02", False),  # 65 bits
        (b"\xfa\x80\x80\x80\x00\x00", True),  # a tag of five bytes, which is one more than it needs
        (b"\xfa\x80\x80\x80\x80\x00\x00", False),
        (b"\xfa\x80\x80\x80\x10\x00", False),  # 33 bits, of which other readers drop one
        (b"\x3a\x80\x80\x80\x80\x08", False),  # 2 GiB
        (b"\x3a\x80\x01" + bytes([8, 1] * 64), True),  # a graph of 128 bytes
        (b"\x3a\x80\x01" + bytes([8, 1] * 63), False),
        (DEEP[0], True),
        (DEEP[1], False),
    ):
        if is_protobuf:
            check_self_contained(data, "m")
        else:
            with pytest.raises(BundleError, match=r"m: got broken protobuf, expected an ONNX model\. Copy the bundle"):
                check_self_contained(data, "m")


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
            np.testing.assert_array_equal(arrays[name], array, strict=True)
    assert (decoded.rows, decoded.encode()) == (8, ENCODED)
    assert all(kind.__struct_config__.frozen for kind in (Golden, GoldenReport, OutputDiff))
    text = Golden({"x": np.array([b"a"], object)}, {})
    assert text.encode() == Golden({"x": np.array([b"a"])}, {}).encode()


def test_set_that_differs_from_the_manifest_is_rejected():
    for key, array, message in (
        ("odd/x", np.zeros(1), "golden array 'odd/x': got 'odd/x', expected input/…, output/… or raw/…. Export the"),
        ("raw/y", np.zeros(8), "golden raw: got ['expression', 'y'], expected ['expression']. Export the bundle"),
        ("output/value", np.zeros((0, 1), "f4"), "golden output 'value': got FP32 [0, 1], expected FP32 [-1, 1], not"),
    ):
        with np.load(io.BytesIO(ENCODED)) as good:
            arrays = {**good, key: array}
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)
        with pytest.raises(BundleError, match="^" + re.escape(message)):
            decode(buffer.getvalue(), oracle_manifest(), "golden")


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
