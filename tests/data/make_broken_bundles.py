"""Write ``broken_bundles``: the good oracle bundle, broken in one way in each case.

``broken_bundles/expected.json`` says which error each has to give, and is written by hand.

    python -m tests.data.make_broken_bundles
"""

from __future__ import annotations

import copy
import hashlib
import io
import json
import shutil
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, external_data_helper, helper

from edge.bundles.golden import Golden
from edge.datatypes import Array
from tests.edge.models import ORACLE_BUNDLE, oracle_golden

BROKEN_BUNDLES = Path(__file__).parent / "broken_bundles"

GOOD = {path.name: path.read_bytes() for path in sorted(ORACLE_BUNDLE.iterdir())}
MANIFEST: dict[str, Any] = json.loads(GOOD["manifest.json"])


class Link(NamedTuple):
    """A symbolic link to ``target``."""

    target: str


#: File name to contents.
Tree = dict[str, bytes | Link]


def with_files(**changes: bytes | Link | None) -> Tree:
    """Return the good files with some replaced; ``_`` in a name stands for ``.``, and None removes the file."""
    changed = {**GOOD, **{name.replace("_", "."): content for name, content in changes.items()}}
    return {name: content for name, content in changed.items() if content is not None}


def with_manifest(change: Callable[[dict[str, Any]], object]) -> Tree:
    """Return the good files with a change to the manifest."""
    manifest = copy.deepcopy(MANIFEST)
    change(manifest)
    return with_files(manifest_json=as_json(manifest))


def with_hashed(name: str, content: bytes) -> Tree:
    """Return the good files with one replaced, and the manifest's size and hash adapted to it."""
    record = {"size_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    return {**with_manifest(lambda manifest: manifest["files"].update({name: record})), name: content}


def as_json(value: object) -> bytes:
    """Return JSON as a bundle holds it."""
    return json.dumps(value, indent=2).encode() + b"\n"


def changed_onnx(change: Callable[[onnx.ModelProto], object]) -> bytes:
    """Return the good model with a change."""
    model = onnx.load_from_string(GOOD["model.onnx"])
    change(model)
    return bytes(model.SerializeToString(deterministic=True))


def golden(**changes: Mapping[str, Array]) -> bytes:
    """Return the good golden set with some of its arrays replaced."""
    good = oracle_golden()
    arrays = {kind: {**getattr(good, kind), **changes.get(kind, {})} for kind in ("inputs", "outputs", "raw")}
    return Golden(**arrays).encode()


def golden_compressed() -> bytes:
    """Return the good golden set with its members deflated."""
    buffer = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(GOOD["golden.npz"])) as stored,
        zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=0) as deflated,
    ):
        for item in stored.infolist():
            # Level 0 still is the deflate format, and gives the same bytes whatever zlib there is.
            deflated.writestr(zipfile.ZipInfo(item.filename), stored.read(item), zipfile.ZIP_DEFLATED, compresslevel=0)
    return buffer.getvalue()


def golden_pickled() -> bytes:
    """Return the good golden set with its text as an array of Python objects."""
    member, buffer = io.BytesIO(), io.BytesIO(GOOD["golden.npz"])
    np.save(member, oracle_golden().raw["expression"].astype(object), allow_pickle=True)
    with zipfile.ZipFile(buffer, "a") as archive:
        archive.writestr(zipfile.ZipInfo("raw/pickled.npy"), member.getvalue())
    return buffer.getvalue()


def external_data(model: onnx.ModelProto) -> None:
    """Move one weight into another file."""
    weight = model.graph.initializer[2]
    external_data_helper.set_external_data(weight, "weights.bin")
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL


def custom_operator(model: onnx.ModelProto) -> None:
    """Replace the activation by an operator that no runtime knows."""
    model.graph.node[1].op_type = "Frobnicate"
    model.graph.node[1].domain = "com.example"
    model.opset_import.append(helper.make_opsetid("com.example", 1))


def files_entry(name: str) -> Tree:
    """Return the good files with a manifest that calls the model ``name``."""

    def change(manifest: dict[str, Any]) -> None:
        manifest["files"][name] = manifest["files"].pop("model.onnx")
        manifest["tiers"][0]["artifacts"][0]["file"] = name

    return with_manifest(change)


def field(*path: str | int, value: object) -> Tree:
    """Return the good files with one value of the manifest replaced."""

    def change(manifest: Any) -> None:
        for key in path[:-1]:
            manifest = manifest[key]
        manifest[path[-1]] = value

    return with_manifest(change)


def rename_input(model: onnx.ModelProto) -> None:
    """Call the input ``tokens``."""
    model.graph.input[0].name = model.graph.node[0].input[0] = "tokens"


def cases() -> dict[str, Tree]:
    """Return the files of every case by its name."""
    return {**broken_files(), **broken_manifests(), **broken_golden_sets(), **broken_models()}


def broken_files() -> dict[str, Tree]:
    """Files that are not those of the manifest."""
    return {
        "wrong-hash": with_files(model_onnx=GOOD["model.onnx"][:-1] + b"\0"),
        "wrong-size-short": with_files(model_onnx=GOOD["model.onnx"][:-1]),
        "wrong-size-long": with_files(model_onnx=GOOD["model.onnx"] + b"\0"),
        "missing-file": with_files(model_onnx=None),
        "stray-file": with_files(notes_txt=b"remember the milk\n"),
        "link-as-file": {
            **with_files(model_onnx=None),
            "model.onnx": Link("../../bundles/calculator-oracle-1/model.onnx"),
        },
        "link-as-manifest": with_files(manifest_json=Link("../../bundles/calculator-oracle-1/manifest.json")),
        "directory-as-file": {**with_files(model_onnx=None), "model.onnx/placeholder": b"\n"},
        "missing-golden": with_files(golden_npz=None),
        "path-traversal": files_entry("../model.onnx"),
        "path-absolute": files_entry("/etc/passwd"),
    }


def broken_manifests() -> dict[str, Tree]:
    """Manifests that break the schema or a rule."""
    return {
        "missing-manifest": with_files(manifest_json=None),
        "empty-manifest": with_files(manifest_json=b""),
        "not-json": with_files(manifest_json=b"name: calculator\n"),
        "not-utf8": with_files(manifest_json=GOOD["manifest.json"].replace(b"Evaluates", b"\xff\xfe")),
        "deep-json": with_files(manifest_json=b'{"format_version":1,"name":' + b"[" * 50_000 + b"]" * 50_000 + b"}\n"),
        "huge-manifest": with_files(manifest_json=GOOD["manifest.json"] + b"\n" * 2**18),
        "unknown-field": field("colour", value="blue"),
        "future-format": field("format_version", value=2),
        "version-zero": field("version", value=0),
        "uppercase-name": field("name", value="Calculator"),
        "duplicate-tier": field("tiers", value=MANIFEST["tiers"] * 2),
        "duplicate-tensor": field("outputs", 0, "name", value="x"),
        "unknown-datatype": field("inputs", 0, "datatype", value="FP8"),
        "fixed-batch": field("outputs", 0, "shape", value=[1, 1]),
        "no-profile": field("profile", value={}),
        "profile-inverted": field("profile", "x", "min", value=[9, 15]),
        "profile-unfit": field("profile", "x", "opt", value=[8, 16]),
        "profile-not-batch": field("max_batch_size", value=32),
        "preprocess-to-nothing": field("preprocess", "output", value="tokens"),
        "preprocess-from-tensor": field("preprocess", "input", value="x"),
        "unlisted-artifact": field("tiers", 0, "artifacts", 0, "file", value="other.onnx"),
        "unlisted-golden": field("golden", value="other.npz"),
    }


def broken_golden_sets() -> dict[str, Tree]:
    """Golden sets that break the format."""
    values = oracle_golden().outputs["value"]
    return {
        "golden-no-zip": with_hashed("golden.npz", b"not a zip file\n"),
        "golden-truncated": with_hashed("golden.npz", GOOD["golden.npz"][:700]),
        "golden-compressed": with_hashed("golden.npz", golden_compressed()),
        "golden-pickled": with_hashed("golden.npz", golden_pickled()),
        "golden-nan": with_hashed("golden.npz", golden(outputs={"value": values * np.float32("nan")})),
        "golden-shape": with_hashed("golden.npz", golden(inputs={"x": np.zeros((8, 14), np.float32)})),
        "golden-datatype": with_hashed("golden.npz", golden(outputs={"value": values.astype(np.float64)})),
        "golden-rows": with_hashed("golden.npz", golden(outputs={"value": values[:3]})),
        "golden-extra": with_hashed("golden.npz", golden(outputs={"other": values})),
    }


def broken_models() -> dict[str, Tree]:
    """Sound files that contradict each other, found only when the model is loaded."""
    values = oracle_golden().outputs["value"]
    return {
        "golden-wrong": with_hashed("golden.npz", golden(outputs={"value": values + 1})),
        "golden-other-text": with_hashed(
            "golden.npz", golden(raw={"expression": oracle_golden().raw["expression"][::-1]})
        ),
        "golden-no-expression": with_hashed("golden.npz", golden(raw={"expression": np.full((8, 1), b"two")})),
        "onnx-truncated": with_hashed("model.onnx", GOOD["model.onnx"][:1000]),
        "onnx-not": with_hashed("model.onnx", b"\x08\x08"),
        "onnx-other-input": with_hashed("model.onnx", changed_onnx(rename_input)),
        "onnx-other-shape": field("outputs", 0, "shape", value=[-1, -1]),
        "onnx-external-data": with_hashed("model.onnx", changed_onnx(external_data)),
        "onnx-unknown-opset": with_hashed(
            "model.onnx", changed_onnx(lambda model: setattr(model.opset_import[0], "version", 999))
        ),
        "onnx-custom-operator": with_hashed("model.onnx", changed_onnx(custom_operator)),
    }


def write(directory: Path) -> None:
    """Write all cases, replacing those that are there."""
    for name, files in cases().items():
        shutil.rmtree(directory / name, ignore_errors=True)
        for file, content in files.items():
            path = directory / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, Link):
                path.symlink_to(content.target)
            else:
                path.write_bytes(content)


if __name__ == "__main__":
    write(BROKEN_BUNDLES)
