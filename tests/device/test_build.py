"""Builds of TensorRT engines in child processes, and their cache."""

import json
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from edge.bench.profile import profile
from edge.bundles.bundle import Bundle
from edge.errors import BackendError
from edge.files import sha256
from edge.pb import inference_pb2 as pb
from edge.runtimes.build import build, load_runner
from edge.runtimes.runtime import BuildOptions
from edge.runtimes.table import choose
from edge.runtimes.tensorrt.build import compile_onnx
from edge.runtimes.tensorrt.runtime import TensorRt
from tests.support.builds import children
from tests.support.commands import answer, fewheads, shown
from tests.support.layer_shapes import LENGTHS, SHAPES, write_layer_shapes
from tests.support.models import (
    ORACLE_BUNDLE,
    attention_onnx,
    oracle_manifest,
    write_attention_bundle,
    write_oracle_bundle,
)
from tests.support.server_processes import check_golden, served

trt = pytest.importorskip("tensorrt")

TARGET = "tensorrt"


@pytest.fixture
def oracle():
    return Bundle.open(ORACLE_BUNDLE)


@pytest.fixture
def in_process(monkeypatch):
    """Build in this process, which takes a second less than a child process."""
    monkeypatch.setattr(TensorRt, "isolated_build", False)


def test_build_is_checked_kept_and_loaded(oracle, tmp_path):
    reported = []
    built = build(oracle, TARGET, tmp_path, progress=reported.append)
    assert not children()
    record = built.record
    assert record.golden is not None
    assert record.golden.passed
    assert not any(diff.nonfinite for diff in record.golden.outputs)
    assert record.engine is not None
    assert (record.engine.timing_cache, record.engine.warnings) == ("new", ())
    assert {"onnx", "version", "compute_capability", "device_name", "l4t", "cuda", "precision", "profiles"} <= {
        *record.key
    }
    fractions = [one.fraction for one in reported]
    assert fractions == sorted(fractions)
    assert reported[-1].phase == "done"
    loaded = load_runner(oracle, TARGET, tmp_path)
    assert loaded.source == "cache"
    got = loaded.runner.infer(oracle.golden.inputs)["value"]
    np.testing.assert_allclose(got, oracle.golden.outputs["value"], atol=1e-4)
    loaded.runner.close()


@pytest.mark.parametrize("version", ["10.3.0", "10.16.2.10", "11.4.1"])
def test_every_version_builds(software, tmp_path, monkeypatch, version):
    command = ("build", ORACLE_BUNDLE, "--target", TARGET, "--cache", tmp_path, "--json")
    (one,) = json.loads(answer(fewheads(*command, SOFTWARE_TENSORRT_VERSION=version)))
    built = one["build"]
    assert built["runtime_version"] == built["key"]["version"] == version
    assert built["golden"]["outputs"][0]["passed"]
    monkeypatch.setattr(trt, "__version__", "10.7.0")
    expected = f"got a build for version {version}, expected a build for .*10.7.0"
    with pytest.raises(BackendError, match=expected) as error:
        load_runner(Bundle.open(ORACLE_BUNDLE), TARGET, tmp_path)
    assert f"fewheads build {ORACLE_BUNDLE} --target {TARGET} --cache {tmp_path}" in str(error.value)


def test_unsupported_major_versions_are_rejected(monkeypatch, oracle, tmp_path):
    for version in ("8.6.2", "12.0.1"):
        monkeypatch.setattr(trt, "__version__", version)
        with pytest.raises(BackendError, match=f"got '{version}', expected version 10 or 11. Use JetPack 6.1 or newer"):
            choose(TARGET)
        assert f"tensorrt: {version}" in choose("auto").reason


def test_timing_cache_is_reused_unless_it_is_broken_or_of_another_version(
    software, in_process, oracle, tmp_path, caplog
):
    def timing():
        record = build(oracle, TARGET, tmp_path, replace=True).record
        assert record.engine is not None
        return record.engine.timing_cache

    caplog.set_level("INFO")
    assert [timing(), timing()] == ["new", "reused"]
    (path,) = (tmp_path / "timing").iterdir()
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    assert timing() == "new"
    assert f"the timing cache {path} is broken or of another TensorRT or device, and is made anew" in caplog.text
    caplog.clear()
    older = content[64:].replace(trt.__version__.encode(), b"10.3.0")
    path.write_bytes(sha256(older).encode() + older)
    assert timing() == "new"
    assert f"the timing cache {path} is broken or of another TensorRT or device" in caplog.text


def test_skipped_tactics_are_recorded_and_reported_at_load(software, in_process, tmp_path, caplog):
    bundle = write_attention_bundle(tmp_path / "attention", 32)
    engine = build(bundle, TARGET, tmp_path / "cache", options=BuildOptions(workspace_bytes=200_000)).record.engine
    assert engine is not None
    assert engine.skipped_tactics > 0
    (note,) = engine.notes
    assert re.match(rf"{engine.skipped_tactics} tactics were skipped for lack of memory of up to \d+ MiB each, ", note)
    assert "raise --workspace-mib, and build it again with --replace" in note
    assert engine.warnings
    assert "insufficient" not in caplog.text  # the note counts them
    load_runner(bundle, TARGET, tmp_path / "cache").runner.close()
    assert f"the engine of attention-32 1 (tier full): {note}" in caplog.text
    again = build(bundle, TARGET, tmp_path / "cache", replace=True).record.engine
    assert again is not None
    assert (again.skipped_tactics, again.notes) == (0, ())


def test_unfused_attention_is_rejected_on_request(in_process, tmp_path):
    fused = write_attention_bundle(tmp_path / "fused", 32)
    command = ("build", fused.path, "--target", TARGET, "--cache", tmp_path / "cache", "--require-fused-attention")
    assert "1 block, fused" in shown(*command)
    unfused, options = write_attention_bundle(tmp_path / "unfused", 8), BuildOptions(require_fused_attention=True)
    why = "1 block, not fused: head dimension 8 is below 16"
    expected = f"attention: got {why}, expected every block fused, as --require-fused-attention demands. Export FP16"
    with pytest.raises(BackendError, match=expected):
        build(unfused, TARGET, tmp_path / "cache", options=options)
    engine = build(unfused, TARGET, tmp_path / "cache").record.engine  # nothing was kept
    assert engine
    assert engine.attention == why
    with pytest.raises(BackendError, match=expected):  # also of the build in the cache
        build(unfused, TARGET, tmp_path / "cache", options=options)


def test_attention_that_tensorrt_could_have_fused_is_noted(software, monkeypatch):
    builder = pytest.importorskip("tensorrt.builder")
    monkeypatch.setattr(builder, "fused_attention", lambda *_: [])
    rest = (16, 64)
    allowed = {"x": oracle_manifest().profile["x"].__class__(min=(1, *rest), opt=(4, *rest), max=(8, *rest))}
    options = {"flavor": "tensorrt", "compute_capability": None, "subject": "model"}
    (note,) = compile_onnx(attention_onnx(32), allowed, **options).report.notes
    assert note.startswith("attention is not fused although head dimension 32 in HALF allows it")
    assert "build it again with --replace and more --workspace-mib" in note


@pytest.mark.usefixtures("software")
@pytest.mark.parametrize(
    ("variable", "message"),
    [
        ("FAIL=cuMemHostAlloc:1:2", "out of memory"),
        ("FAIL=cuDevicePrimaryCtxRetain:1:2", "out of memory"),
        ("FAIL=cuMemAlloc:1:2", r"memory.*expected enough memory to build with a workspace of 64 MiB"),
        ("MEMORY=4096", r"memory.*expected enough memory to build with a workspace of 64 MiB. Stop"),
    ],
)
def test_failed_build_keeps_nothing(oracle, tmp_path, monkeypatch, variable, message):
    name, _, value = f"SOFTWARE_CUDA_{variable}".partition("=")
    monkeypatch.setenv(name, value)  # for the child process
    with pytest.raises(BackendError, match=message):
        build(oracle, TARGET, tmp_path, options=BuildOptions(workspace_bytes=64 << 20))
    assert not children()
    assert not [path for path in tmp_path.iterdir() if path.name != "timing"]
    monkeypatch.delenv(name)
    assert not build(oracle, TARGET, tmp_path).reused


def parameter_of(server, name):
    config = server.stub.ModelConfig(pb.ModelConfigRequest(name="calculator-oracle")).config
    return str(config.parameters[name].string_value)


def test_server_builds_missing_engines_before_it_is_ready(tmp_path):
    write_oracle_bundle(tmp_path / "repository" / "oracle")
    options = (f"--target={TARGET}", f"--cache={tmp_path / 'cache'}", "--model-control=explicit", "--load-model=*")
    with served(tmp_path / "repository", *options) as server:
        assert list(server.ready.ready) == ["calculator-oracle:1"], server.ready.unavailable
        assert parameter_of(server, "runtime") == TARGET
        check_golden(server)
        status, log = server.stop()
        assert status == 0
        assert f"oracle: BUILDING 0 % for {TARGET}" in log
    assert len([path for path in (tmp_path / "cache").iterdir() if path.name != "timing"]) == 1


def test_auto_falls_back_to_another_runtime_if_the_build_fails(tmp_path, device):
    write_oracle_bundle(tmp_path / "repository" / "oracle")
    fails = {"SOFTWARE_CUDA_FAIL": "cuStreamCreate:1:2"} if device == "software" else {}
    with served(tmp_path / "repository", "--target=auto", f"--cache={tmp_path / 'cache'}", **fails) as server:
        reason = parameter_of(server, "runtime_reason")
        assert (TARGET in parameter_of(server, "runtime")) != bool(fails), reason
        assert bool(fails) == reason.startswith(f"{TARGET} failed: ")


def test_builds_at_the_same_time_do_not_disturb_each_other(oracle, tmp_path):
    with ThreadPoolExecutor(3) as builders:
        built = {builder.result().directory.name for builder in [
            builders.submit(build, oracle, TARGET, tmp_path) for _ in range(3)
        ]}  # fmt: skip
    assert len(built) == 1
    assert {path.name for path in tmp_path.iterdir()} == built | {"timing"}
    load_runner(oracle, TARGET, tmp_path).runner.close()


def test_profile_times_every_shape_once(in_process, tmp_path):
    directory, out = write_layer_shapes(tmp_path / "shapes"), tmp_path / "table.json"
    options = {"target": "tensorrt", "calls": 3, "cache": tmp_path / "cache"}
    table = profile(directory, out, **options)
    assert (table.key["runtime"], table.key["provider"], table.key["precision"]) == ("tensorrt", "GPU", "fp32")
    assert {(timing.shape, timing.tokens) for timing in table.timings} == {(s, n) for s in SHAPES for n in LENGTHS}
    assert {rest.tokens for rest in table.rest} == set(LENGTHS)
    steps = []
    assert profile(directory, out, on_progress=lambda *now: steps.append(now[-1]), **options) == table
    assert not steps
