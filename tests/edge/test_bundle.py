"""Bundles: written whole or not at all, read back as they were written; manifests of every kind."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.bundles import manifest as manifests
from edge.bundles import manifest_file
from edge.bundles.bundle import Bundle, write_bundle
from edge.bundles.manifest import Manifest
from edge.errors import BundleError
from edge.files import sha256
from edge.runtimes.build import load_runner
from tests.data.make_broken_bundles import HEAD, Good
from tests.support import text_model
from tests.support.manifests import as_version_1, valid_manifests
from tests.support.models import (
    DATA,
    ORACLE_BUNDLE,
    oracle_golden,
    oracle_manifest,
    oracle_onnx,
    write_bundle_of_roles,
    write_oracle_bundle,
)

ROOT = Path(__file__).parents[2]
VERSION_1 = DATA / "version_1"
ROUTER = (VERSION_1 / "bundles" / "sentiment-1" / "manifest.json").read_bytes()
WITH_HEAD = Good(2).with_artifacts(HEAD)["manifest.json"]
assert isinstance(WITH_HEAD, bytes)
#: A router in version 1, the same as the program of version 2, and an artifact with tensors of its own.
GOOD_MANIFESTS = [ROUTER, manifest_file.encode(manifest_file.decode(ROUTER, "router")), WITH_HEAD]
#: The words and numbers of each, and the text between them.
WORDS = [re.findall(rb"[\w.-]+|[^\w.-]+", good) for good in GOOD_MANIFESTS]
ANY_WORD = sorted({word for words in WORDS for word in words})
JSON_SNIPPETS = [
    b"",
    b"-1",
    b"0",
    b"1e999",
    b"9" * 30,
    b"null",
    b"true",
    b"{}",
    b"[[]]",
    b'""',
    b"\\ud800",
    b"..",
    b"\xff",
]


def test_committed_bundle_is_what_the_code_writes(tmp_path: Path):
    write_oracle_bundle(tmp_path / "again")
    for path in ORACLE_BUNDLE.iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()


def test_round_trip(tmp_path: Path):
    bundle = write_oracle_bundle(tmp_path / "made" / "on the way" / "oracle", version=3)
    assert bundle.manifest == Bundle.open(str(bundle.path)).manifest
    assert bundle.manifest.version == 3
    assert bundle.read("model.onnx") == oracle_onnx()
    assert sorted(os.listdir(bundle.path)) == ["golden.npz", "manifest.json", "model.onnx"]
    assert os.listdir(bundle.path.parent) == ["oracle"]


@pytest.mark.parametrize(
    ("name", "expected", "encoded_sha256"),
    [
        ("calculator-oracle-1", oracle_manifest(), "afffd95ccaecafdfe7aaa63283365d2ce3032867547ceb1df0cd5d837d4f0e83"),
        ("sentiment-1", text_model.manifest(), "3c1228620201ca3262fa03fa3158d2da561c61ddc867546096bcc3cb3daae7fc"),
    ],
)
def test_bundle_of_version_1_is_upgraded_in_memory(name: str, expected: Manifest, encoded_sha256: str, tmp_path: Path):
    bundle = Bundle.open(VERSION_1 / "bundles" / name)
    assert msgspec.structs.replace(bundle.manifest, files={}) == expected
    for tier in bundle.manifest.tiers:
        loaded = load_runner(bundle, "onnxruntime", tmp_path, tier=tier.name)
        assert loaded.golden_report.passed
        loaded.runner.close()
    # The cache of builds is named by this hash: a device that upgrades Fewheads keeps what it has built.
    assert sha256(manifest_file.encode(bundle.manifest)) == encoded_sha256


def test_schema_of_version_1_never_changes():
    pinned = json.loads((VERSION_1 / "manifest.schema.json").read_text())
    schema = json.loads(
        re.sub(rb"_?(\w+)V1\b", rb"\1", msgspec.json.encode(msgspec.json.schema(manifest_file.ManifestV1)))
    )
    assert _without_prose(schema) == pinned


def test_artifact_of_a_role(tmp_path: Path):
    bundle = write_bundle_of_roles(tmp_path / "oracle")
    assert {role: bundle.artifact("onnxruntime", role=role).file for role in ("model", "embed", "head")} == {
        "model": "model.onnx",
        "embed": "embed.onnx",
        "head": "head.onnx",
    }
    assert bundle.artifact("tensorrt", "full", "head").file == "head-tensorrt.onnx"
    with pytest.raises(BundleError, match=r"got \['embed for any', .*\], expected step for onnxruntime\. Export"):
        bundle.artifact("onnxruntime", role="step")


def test_tensors_of_an_artifact_are_its_own_or_the_manifests(tmp_path: Path):
    bundle = write_bundle_of_roles(tmp_path / "oracle")
    manifest = bundle.manifest
    model, embed, head = (bundle.artifact("onnxruntime", role=role) for role in ("model", "embed", "head"))
    assert manifest.tensors(model) == (manifest.inputs, manifest.outputs, manifest.profile)
    assert manifest.tensors(embed) == (manifest.inputs, embed.outputs, manifest.profile)
    assert manifest.tensors(head) == (embed.outputs, manifest.outputs, head.profile)


def test_artifact_of_a_tier():
    bundle = Bundle.open(ORACLE_BUNDLE)
    assert bundle.artifact("onnxruntime").file == bundle.artifact("tensorrt", "full").file == "model.onnx"
    with pytest.raises(BundleError, match="tier: got 'lean', expected one of full"):
        bundle.artifact("onnxruntime", "lean")


def test_change_after_opening_is_found(tmp_path: Path):
    bundle = write_oracle_bundle(tmp_path / "oracle")
    model = bundle.path / "model.onnx"
    model.write_bytes(model.read_bytes()[::-1])
    with pytest.raises(BundleError, match="sha256: got"):
        bundle.read("model.onnx")


def test_pipe_in_place_of_a_file_does_not_hang(tmp_path: Path):
    bundle = write_oracle_bundle(tmp_path / "oracle")
    (bundle.path / "model.onnx").unlink()
    os.mkfifo(bundle.path / "model.onnx")
    with pytest.raises(BundleError, match="got no regular file, expected a regular file"):
        Bundle.open(bundle.path)


@pytest.mark.parametrize("name", ["nothing", "file"])
def test_no_directory(tmp_path: Path, name: str):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(BundleError, match="expected a bundle directory"):
        Bundle.open(tmp_path / name)


def test_existing_bundle_is_replaced_only_on_demand(tmp_path: Path):
    write_oracle_bundle(tmp_path / "oracle", version=1)
    with pytest.raises(BundleError, match="got something there, expected a free path"):
        write_oracle_bundle(tmp_path / "oracle", version=2)
    assert Bundle.open(tmp_path / "oracle").manifest.version == 1
    write_oracle_bundle(tmp_path / "oracle", version=2, replace=True)
    assert Bundle.open(tmp_path / "oracle").manifest.version == 2
    assert os.listdir(tmp_path) == ["oracle"]


def test_broken_contents_leave_the_old_bundle(tmp_path: Path):
    write_oracle_bundle(tmp_path / "oracle", version=1)
    files = {"model.onnx": oracle_onnx(), "golden.npz": b"no zip"}
    with pytest.raises(BundleError, match=r"expected an \.npz without pickles"):
        write_bundle(tmp_path / "oracle", oracle_manifest(version=2), files, replace=True)
    assert Bundle.open(tmp_path / "oracle").manifest.version == 1
    assert os.listdir(tmp_path) == ["oracle"]


def test_place_that_cannot_be_written(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(BundleError, match=r"Not a directory|File exists"):
        write_oracle_bundle(tmp_path / "file" / "oracle")


WRITE = "from pathlib import Path; from tests.support.models import write_oracle_bundle; target = Path({target!r});"
FULL_DISK = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000));"


@pytest.mark.parametrize("before", [None, 1])
def test_full_disk_leaves_what_was_there(tmp_path: Path, before: int | None):
    target = tmp_path / "place" / "oracle"
    if before:
        write_oracle_bundle(target, version=before)
    code = FULL_DISK + WRITE.format(target=str(target)) + "write_oracle_bundle(target, version=2, replace=True)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "BundleError" in done.stderr
    assert "File too large, expected" in done.stderr
    assert "room to write it. Free space" in done.stderr
    assert os.listdir(target.parent) == (["oracle"] if before else [])
    if before:
        assert Bundle.open(target).manifest.version == before


def test_killed_writer_leaves_a_whole_bundle_or_none(tmp_path: Path):
    target = tmp_path / "oracle"
    code = WRITE.format(target=str(target)) + (
        "print(flush=True)\nfor version in range(1, 10**6): write_oracle_bundle(target, version=version, replace=True)"
    )
    for delay_s in (0.0, 0.005, 0.02, 0.05, 0.1):
        command = [sys.executable, "-c", code]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            writer.stdout.readline()
            time.sleep(delay_s)
            writer.kill()
        if target.exists():
            assert Bundle.open(target).manifest.version >= 1
        # What was left half-written has a dot, which no server looks into.
        assert all(name == "oracle" or name.startswith(".oracle.") for name in os.listdir(tmp_path))


def test_readers_never_see_a_mixture(tmp_path: Path):
    target, stop = tmp_path / "oracle", threading.Event()
    write_oracle_bundle(target, version=1)

    def read() -> set[int]:
        seen = set()
        while not stop.is_set():
            # Between two versions there is nothing to open, and a mixture is refused: both are a BundleError.
            with suppress(BundleError):
                seen.add(Bundle.open(target).manifest.version)
        return seen

    with ThreadPoolExecutor() as pool:
        readers = [pool.submit(read) for _ in range(2)]
        for version in range(2, 40):
            write_oracle_bundle(target, version=version, replace=True)
        stop.set()
    assert all(reader.result() <= set(range(1, 40)) for reader in readers)
    assert Bundle.open(target).manifest.version == 39


@settings(deadline=None)
@given(valid_manifests())
def test_every_valid_manifest_comes_back(manifest: Manifest):
    assert manifest_file.decode(manifest_file.encode(manifest), "manifest") == manifest


@pytest.mark.parametrize("good", GOOD_MANIFESTS, ids=["router", "program", "head"])
def test_manifests_that_are_mutated_below_are_good(good: bytes):
    assert manifest_file.decode(good, "manifest").tiers


@settings(deadline=None)
@given(valid_manifests(roles=False))
def test_every_valid_manifest_of_version_1_is_upgraded(manifest: Manifest):
    assert manifest_file.decode(as_version_1(manifest), "manifest") == manifest


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(GOOD_MANIFESTS), st.data(), st.integers(0, 60), st.binary(max_size=60))
def test_mutated_manifest_gives_nothing_but_a_bundle_error(good: bytes, data: st.DataObject, length: int, new: bytes):
    start = data.draw(st.integers(0, len(good)))
    with suppress(BundleError):
        manifest_file.decode(good[:start] + new + good[start + length :], "manifest")


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(WORDS), st.data())
def test_manifest_with_another_value_gives_nothing_but_a_bundle_error(words: list[bytes], data: st.DataObject):
    position = data.draw(st.integers(0, len(words) - 1))
    value = data.draw(st.sampled_from([*JSON_SNIPPETS, *ANY_WORD]))
    with suppress(BundleError):
        manifest_file.decode(b"".join([*words[:position], value, *words[position + 1 :]]), "manifest")


def test_schema_describes_every_field_of_a_manifest():
    fields = manifests.schema()["$defs"]["Manifest"]["properties"]
    assert set(fields) == {"format_version", *Manifest.__struct_fields__}
    assert fields["format_version"] == {"enum": [2]}


def _without_prose(schema: Any, *, named: bool = False) -> Any:
    """Return a JSON Schema without titles and descriptions; ``named``: the keys are names of fields or types."""
    if isinstance(schema, list):
        return [_without_prose(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _without_prose(value, named=key in ("properties", "$defs") and not named)
        for key, value in schema.items()
        if named or key not in ("title", "description")
    }


def test_golden_of_another_model_is_refused(tmp_path: Path):
    shutil.copytree(ORACLE_BUNDLE, tmp_path / "oracle")
    (tmp_path / "oracle" / "golden.npz").write_bytes(oracle_golden().encode() + b"\0")
    with pytest.raises(BundleError, match=r"golden\.npz: got \d+ bytes"):
        Bundle.open(tmp_path / "oracle")
