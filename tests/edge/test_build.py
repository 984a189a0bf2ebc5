"""Builds for ONNX Runtime and TensorRT-RTX: the cache, its records, and loading."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from edge.bundles.bundle import Bundle
from edge.errors import UsageError
from edge.files import sha256
from edge.runtimes import cache
from edge.runtimes.build import build, load_runner
from edge.runtimes.cache import BuildRecord, Cached, cache_directory
from edge.runtimes.runtime import Source
from edge.runtimes.table import choose
from tests.support.marks import with_rtx
from tests.support.models import ORACLE_BUNDLE, write_oracle_bundle

ROOT = Path(__file__).parents[2]
ORT = "onnxruntime"
RTX = "tensorrt-rtx:SM86"


@pytest.fixture
def oracle() -> Bundle:
    return Bundle.open(ORACLE_BUNDLE)


def cached(bundle: Bundle, cache_dir: Path) -> Cached | None:
    key = cache.key_of(Source.of(bundle, choose(ORT)), choose(ORT))
    return cache.find(cache.entry(cache_dir, key), key)


def test_build_for_onnxruntime(oracle: Bundle, tmp_path: Path):
    assert cached(oracle, tmp_path) is None
    straight = load_runner(oracle, ORT, tmp_path)
    built = build(oracle, ORT, tmp_path)
    record = built.record
    assert not built.reused
    assert built.directory.parent == tmp_path
    assert (record.name, record.version, record.tier) == ("calculator-oracle", 1, "full")
    assert (record.runtime, record.device, record.reason) == (ORT, "CPU", "The target names it.")
    assert record.onnx_sha256 == oracle.manifest.files["model.onnx"].sha256
    assert (record.golden, record.engine) == (straight.golden_report, None)
    data = (built.directory / record.file).read_bytes()
    assert (record.size_bytes, record.sha256) == (len(data), sha256(data))
    stored = (built.directory / "build.json").read_bytes()
    assert msgspec.json.decode(stored, type=BuildRecord) == record
    assert sorted(os.listdir(tmp_path)) == [built.directory.name]
    assert build(oracle, ORT, tmp_path) == (built.directory, record, True)
    through = load_runner(oracle, ORT, tmp_path)
    assert (straight.source, through.source) == ("bundle", "cache")
    assert through.golden_report == record.golden
    second = write_oracle_bundle(tmp_path / "second", version=2)
    assert build(second, ORT, tmp_path).directory != built.directory


@pytest.mark.parametrize(
    ("file", "contents", "why"),
    [
        ("model.onnx", b"shorter", "got 7 bytes"),
        ("model.onnx", bytes, "sha256: got"),
        ("model.onnx", None, "No such file or directory"),
        ("build.json", b"{}", "missing required field"),
    ],
)
def test_corrupted_build_is_ignored_and_repeated(
    oracle: Bundle, tmp_path: Path, caplog: pytest.LogCaptureFixture, file: str, contents: object, why: str
):
    built = build(oracle, ORT, tmp_path)
    if contents is bytes:  # of the same size
        contents = (built.directory / file).read_bytes()[:-1] + b"\0"
    (built.directory / file).unlink()
    if isinstance(contents, bytes):
        (built.directory / file).write_bytes(contents)
    assert load_runner(oracle, ORT, tmp_path).source == "bundle"
    assert f"the build in {built.directory} is ignored, build it again" in caplog.text
    assert why in caplog.text
    again = build(oracle, ORT, tmp_path)
    assert not again.reused
    assert again.record.sha256 == built.record.sha256
    assert load_runner(oracle, ORT, tmp_path).source == "cache"
    assert os.listdir(tmp_path) == [built.directory.name]


def test_record_cannot_name_a_file_outside_its_directory(oracle: Bundle, tmp_path: Path):
    built = build(oracle, ORT, tmp_path)
    (tmp_path / "elsewhere.onnx").write_bytes((built.directory / built.record.file).read_bytes())
    moved = msgspec.structs.replace(built.record, file="../elsewhere.onnx")
    (built.directory / "build.json").write_bytes(msgspec.json.encode(moved))
    assert cached(oracle, tmp_path) is None


def test_full_disk_keeps_nothing(tmp_path: Path):
    code = (
        "import resource, sys; from pathlib import Path\n"
        "from edge.bundles.bundle import Bundle; from edge.runtimes.build import build\n"
        "bundle = Bundle.open(sys.argv[1])\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "build(bundle, 'onnxruntime', Path(sys.argv[2]))\n"
    )
    command = [sys.executable, "-c", code, str(ORACLE_BUNDLE), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "edge.errors.UsageError: --cache: got [Errno 27] File too large, expected a cache at" in done.stderr
    assert "or make room in this one." in done.stderr
    assert os.listdir(tmp_path) == []


def test_default_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("FEWHEADS_CACHE", raising=False)
    assert cache_directory(None) == tmp_path / ".cache" / "fewheads"
    monkeypatch.setenv("FEWHEADS_CACHE", str(tmp_path / "elsewhere"))
    assert cache_directory(None) == tmp_path / "elsewhere"
    assert cache_directory(tmp_path) == tmp_path


@with_rtx
def test_build_for_tensorrt_rtx_cannot_be_loaded(oracle: Bundle, tmp_path: Path):
    record = build(oracle, RTX, tmp_path).record
    assert (record.golden, record.golden_skipped) == (None, "golden check not run: it needs a GPU of SM86")
    assert build(oracle, RTX, tmp_path).reused
    wrong = "--target: got 'tensorrt-rtx:SM86', expected a target that this program can run"
    with pytest.raises(UsageError, match=wrong):
        load_runner(oracle, RTX, tmp_path)
