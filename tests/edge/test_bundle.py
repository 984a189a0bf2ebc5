"""Bundles on disk: written whole or not at all, and read back as they were written."""

from __future__ import annotations

import os
import re
import resource
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from edge.bundles.bundle import Bundle, write_bundle
from edge.errors import BundleError
from tests.support.models import ORACLE_BUNDLE, oracle_manifest, oracle_onnx, write_bundle_of_roles, write_oracle_bundle


def test_committed_bundle_is_what_the_code_writes(tmp_path: Path):
    bundle = write_oracle_bundle(tmp_path / "made" / "on the way" / "oracle")
    assert {path.name: path.read_bytes() for path in bundle.path.iterdir()} == {
        path.name: path.read_bytes() for path in ORACLE_BUNDLE.iterdir()
    }
    assert bundle.manifest == Bundle.open(str(ORACLE_BUNDLE)).manifest
    assert bundle.read("model.onnx") == oracle_onnx()
    assert os.listdir(bundle.path.parent) == ["oracle"]


def test_artifact_of_a_role_tier_and_runtime(tmp_path: Path):
    bundle = write_bundle_of_roles(tmp_path / "oracle")
    model, embed, head = (bundle.artifact("onnxruntime", role=role) for role in ("model", "embed", "head"))
    assert (model.file, embed.file, head.file) == ("model.onnx", "embed.onnx", "head.onnx")
    assert bundle.artifact("tensorrt", "full", "head").file == "head-tensorrt.onnx"
    found = "got ['embed for any', 'head for tensorrt', 'model for any', 'head for any']"
    with pytest.raises(BundleError, match=re.escape(f"tier 'full': {found}, expected step for onnxruntime. Export")):
        bundle.artifact("onnxruntime", role="step")
    with pytest.raises(BundleError, match="tier: got 'lean', expected one of full"):
        bundle.artifact("onnxruntime", "lean")
    manifest = bundle.manifest
    assert manifest.tensors(model) == (manifest.inputs, manifest.outputs, manifest.profile)
    assert manifest.tensors(embed) == (manifest.inputs, embed.outputs, manifest.profile)
    assert manifest.tensors(head) == (embed.outputs, manifest.outputs, head.profile)


def test_change_after_opening_is_found(tmp_path: Path):
    bundle = write_oracle_bundle(tmp_path / "oracle")
    model = bundle.path / "model.onnx"
    model.write_bytes(model.read_bytes()[::-1])
    with pytest.raises(BundleError, match="sha256: got"):
        bundle.read("model.onnx")
    assert Bundle.open(bundle.path, models=False)


def test_pipe_instead_of_a_file_does_not_hang(tmp_path: Path):
    bundle = write_oracle_bundle(tmp_path / "oracle")
    (bundle.path / "model.onnx").unlink()
    os.mkfifo(bundle.path / "model.onnx")
    with pytest.raises(BundleError, match="got no regular file, expected a regular file"):
        Bundle.open(bundle.path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "got nothing there, expected a bundle directory. Give the directory that holds manifest.json."),
        ("file", "got a file, expected a bundle directory. Give the directory that holds manifest.json."),
        (".", "got a directory of bundles, expected a bundle. Give one of its bundles, such as {path}/a."),
    ],
)
def test_path_that_is_no_bundle(tmp_path: Path, name: str, message: str):
    (tmp_path / "file").write_bytes(b"")
    for bundle in ("b", "a"):
        write_oracle_bundle(tmp_path / bundle)
    with pytest.raises(BundleError, match=re.escape(message.format(path=tmp_path))):
        Bundle.open(tmp_path / name)


def test_existing_bundle_is_replaced_only_on_demand_and_by_a_good_one(tmp_path: Path):
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


@contextmanager
def full_disk() -> Iterator[None]:
    """Let no file grow beyond 1,000 bytes; Python ignores the signal, so that writing raises an OSError."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    assert signal.getsignal(signal.SIGXFSZ) is signal.SIG_IGN
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("before", [None, 1])
def test_full_disk_leaves_what_was_there(tmp_path: Path, before: int | None):
    target = tmp_path / "place" / "oracle"
    if before:
        write_oracle_bundle(target, version=before)
    with pytest.raises(BundleError, match=r"File too large, expected .* room to write it\. Free space"), full_disk():
        write_oracle_bundle(target, version=2, replace=True)
    assert os.listdir(target.parent) == (["oracle"] if before else [])
    if before:
        assert Bundle.open(target).manifest.version == before
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(BundleError, match=r"Not a directory|File exists"):
        write_oracle_bundle(tmp_path / "file" / "oracle")


def test_readers_never_see_a_mixture(tmp_path: Path):
    target, stop = tmp_path / "oracle", threading.Event()
    write_oracle_bundle(target, version=1)

    def read() -> set[int]:
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
