"""Write the corpora of broken bundles: the good oracle bundle of each format version, broken in one way in each case.

``broken_bundles/expected.json`` holds the error of each case of both corpora, and is written by hand.

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
from tests.support.models import DATA, ORACLE_BUNDLE, oracle_golden, oracle_onnx

BROKEN_BUNDLES = DATA / "broken_bundles"
#: A program, or a router of version 1, that names tiers which the oracle does not have.
CASCADE = {"type": "cascade", "lean": "small", "full": "full", "logits": "value", "margin": 0.5}
#: A good further artifact of version 2: it takes an input of its own.
HEAD: dict[str, Any] = {
    "role": "head",
    "inputs": [{"name": "code", "datatype": "FP32", "shape": [-1, 4]}],
    "profile": {"code": {"min": [1, 4], "opt": [8, 4], "max": [64, 4]}},
}
#: Format version to its good bundle and its corpus.
CORPORA = {
    1: (DATA / "version_1" / "bundles" / ORACLE_BUNDLE.name, DATA / "version_1" / "broken_bundles"),
    2: (ORACLE_BUNDLE, BROKEN_BUNDLES),
}


class Link(NamedTuple):
    target: str


#: File name to contents.
Tree = dict[str, bytes | Link]


class Good:
    """The good bundle of one format version, from which every case is made.

    Attributes:
        files: name to contents.
        manifest: the decoded manifest; not to be changed.
    """

    def __init__(self, version: int) -> None:
        self.files = {path.name: path.read_bytes() for path in sorted(CORPORA[version][0].iterdir())}
        self.manifest: dict[str, Any] = json.loads(self.files["manifest.json"])

    def with_files(self, **changes: bytes | Link | None) -> Tree:
        """Return the good files with some replaced; ``_`` in a name stands for ``.``, and None removes the file."""
        changed = {**self.files, **{name.replace("_", "."): content for name, content in changes.items()}}
        return {name: content for name, content in changed.items() if content is not None}

    def with_manifest(self, change: Callable[[dict[str, Any]], object]) -> Tree:
        manifest = copy.deepcopy(self.manifest)
        change(manifest)
        return self.with_files(manifest_json=as_json(manifest))

    def with_hashed(self, name: str, content: bytes) -> Tree:
        return {**self.with_manifest(lambda manifest: manifest["files"].update({name: record(content)})), name: content}

    def with_golden(self, **changes: Mapping[str, Array]) -> Tree:
        """Return the good files with some arrays of the golden set replaced."""
        good = oracle_golden()
        arrays = {kind: {**getattr(good, kind), **changes.get(kind, {})} for kind in ("inputs", "outputs", "raw")}
        return self.with_hashed("golden.npz", Golden(**arrays).encode())

    def with_field(self, *path: str | int, value: object) -> Tree:
        def change(manifest: Any) -> None:
            for key in path[:-1]:
                manifest = manifest[key]
            manifest[path[-1]] = value

        return self.with_manifest(change)

    def with_model_called(self, name: str) -> Tree:
        """Return the good files with a manifest that calls the model ``name``."""

        def change(manifest: dict[str, Any]) -> None:
            manifest["files"][name] = manifest["files"].pop("model.onnx")
            manifest["tiers"][0]["artifacts"][0]["file"] = name

        return self.with_manifest(change)

    def with_artifacts(self, *changes: Mapping[str, object]) -> Tree:
        """Return the good files with further ONNX files in the tier, ``extra1.onnx`` and so on.

        Args:
            changes: for each further file, the fields of its artifact in which it differs from the first one.
        """
        content = self.files["model.onnx"]
        files = {f"extra{index}.onnx": change for index, change in enumerate(changes, 1)}

        def change_manifest(manifest: dict[str, Any]) -> None:
            artifacts = manifest["tiers"][0]["artifacts"]
            artifacts += [{**artifacts[0], "file": file, **change} for file, change in files.items()]
            manifest["files"].update({file: record(content) for file in files})

        return {**self.with_manifest(change_manifest), **dict.fromkeys(files, content)}


def record(content: bytes) -> dict[str, object]:
    return {"size_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def as_json(value: object) -> bytes:
    return json.dumps(value, indent=2).encode() + b"\n"


def changed_onnx(change: Callable[[onnx.ModelProto], object]) -> bytes:
    model = onnx.load_from_string(oracle_onnx())
    change(model)
    return bytes(model.SerializeToString(deterministic=True))


def golden_compressed() -> bytes:
    buffer = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(oracle_golden().encode())) as stored,
        zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=0) as deflated,
    ):
        for item in stored.infolist():
            # Level 0 still is the deflate format, and gives the same bytes whatever zlib there is.
            deflated.writestr(zipfile.ZipInfo(item.filename), stored.read(item), zipfile.ZIP_DEFLATED, compresslevel=0)
    return buffer.getvalue()


def golden_pickled() -> bytes:
    member, buffer = io.BytesIO(), io.BytesIO(oracle_golden().encode())
    np.save(member, oracle_golden().raw["expression"].astype(object), allow_pickle=True)
    with zipfile.ZipFile(buffer, "a") as archive:
        archive.writestr(zipfile.ZipInfo("raw/pickled.npy"), member.getvalue())
    return buffer.getvalue()


def external_data(model: onnx.ModelProto) -> None:
    weight = model.graph.initializer[2]
    external_data_helper.set_external_data(weight, "weights.bin")
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL


def custom_operator(model: onnx.ModelProto) -> None:
    model.graph.node[1].op_type = "Frobnicate"
    model.graph.node[1].domain = "com.example"
    model.opset_import.append(helper.make_opsetid("com.example", 1))


def rename_input(model: onnx.ModelProto) -> None:
    model.graph.input[0].name = model.graph.node[0].input[0] = "tokens"


def cases(version: int) -> dict[str, Tree]:
    good = Good(version)
    of_version = broken_only_in_version_1 if version == 1 else broken_only_in_version_2
    return {
        **broken_files(good),
        **broken_manifests(good),
        **of_version(good),
        **broken_golden_sets(good),
        **broken_models(good),
    }


def broken_files(good: Good) -> dict[str, Tree]:
    return {
        "wrong-hash": good.with_files(model_onnx=good.files["model.onnx"][:-1] + b"\0"),
        "wrong-size-short": good.with_files(model_onnx=good.files["model.onnx"][:-1]),
        "wrong-size-long": good.with_files(model_onnx=good.files["model.onnx"] + b"\0"),
        "missing-file": good.with_files(model_onnx=None),
        "stray-file": good.with_files(notes_txt=b"remember the milk\n"),
        "link-as-file": {
            **good.with_files(model_onnx=None),
            "model.onnx": Link("../../bundles/calculator-oracle-1/model.onnx"),
        },
        "link-as-manifest": good.with_files(manifest_json=Link("../../bundles/calculator-oracle-1/manifest.json")),
        "directory-as-file": {**good.with_files(model_onnx=None), "model.onnx/placeholder": b"\n"},
        "missing-golden": good.with_files(golden_npz=None),
        "path-traversal": good.with_model_called("../model.onnx"),
        "path-absolute": good.with_model_called("/etc/passwd"),
    }


def broken_manifests(good: Good) -> dict[str, Tree]:
    deep = b"[" * 50_000 + b"]" * 50_000
    return {
        "missing-manifest": good.with_files(manifest_json=None),
        "empty-manifest": good.with_files(manifest_json=b""),
        "not-json": good.with_files(manifest_json=b"name: calculator\n"),
        "not-utf8": good.with_files(manifest_json=good.files["manifest.json"].replace(b"Evaluates", b"\xff\xfe")),
        "deep-json": good.with_files(
            manifest_json=b'{"format_version":%d,"name":%s}\n' % (good.manifest["format_version"], deep)
        ),
        "huge-manifest": good.with_files(manifest_json=good.files["manifest.json"].rstrip() + b" " * 2**18 + b"\n"),
        "unknown-field": good.with_field("colour", value="blue"),
        "future-format": good.with_field("format_version", value=3),
        "format-zero": good.with_field("format_version", value=0),
        "format-negative": good.with_field("format_version", value=-1),
        "format-text": good.with_field("format_version", value="2"),
        "no-format": good.with_manifest(lambda manifest: manifest.pop("format_version")),
        "version-zero": good.with_field("version", value=0),
        "uppercase-name": good.with_field("name", value="Calculator"),
        "duplicate-tier": good.with_field("tiers", value=good.manifest["tiers"] * 2),
        "duplicate-tensor": good.with_field("outputs", 0, "name", value="x"),
        "unknown-datatype": good.with_field("inputs", 0, "datatype", value="FP8"),
        "fixed-batch": good.with_field("outputs", 0, "shape", value=[1, 1]),
        "no-profile": good.with_field("profile", value={}),
        "profile-inverted": good.with_field("profile", "x", "min", value=[9, 15]),
        "profile-unfit": good.with_field("profile", "x", "opt", value=[8, 16]),
        "profile-not-batch": good.with_field("max_batch_size", value=32),
        "preprocess-to-nothing": good.with_field("preprocess", "output", value="tokens"),
        "preprocess-from-tensor": good.with_field("preprocess", "input", value="x"),
        "unlisted-artifact": good.with_field("tiers", 0, "artifacts", 0, "file", value="other.onnx"),
        "unlisted-golden": good.with_field("golden", value="other.npz"),
        "two-artifacts-for-a-runtime": good.with_artifacts({}),
    }


def broken_only_in_version_1(good: Good) -> dict[str, Tree]:
    """Manifests of version 1 with fields of version 2, or with a router that breaks a rule."""
    return {
        "role-in-version-1": good.with_field("tiers", 0, "artifacts", 0, "role", value="model"),
        "own-tensors-in-version-1": good.with_field(
            "tiers", 0, "artifacts", 0, "inputs", value=good.manifest["inputs"]
        ),
        "program-in-version-1": good.with_field("program", value=CASCADE),
        "router-of-unknown-tiers": good.with_field("router", value=CASCADE),
    }


def broken_only_in_version_2(good: Good) -> dict[str, Tree]:
    """Manifests of version 2 whose roles, tensors of artifacts or program break the schema or a rule."""
    x, y = good.manifest["inputs"], good.manifest["outputs"]
    head, (code,), shapes = HEAD, HEAD["inputs"], HEAD["profile"]["code"]
    return {
        "router-in-version-2": good.with_field("router", value=CASCADE),
        "program-without-type": good.with_field(
            "program", value={key: CASCADE[key] for key in CASCADE if key != "type"}
        ),
        "program-of-unknown-type": good.with_field("program", value={"type": "spiral", "turns": 3}),
        "program-of-unknown-tiers": good.with_field("program", value=CASCADE),
        "unknown-role": good.with_field("tiers", 0, "artifacts", 0, "role", value="brain"),
        "no-model-role": good.with_field("tiers", 0, "artifacts", 0, "role", value="backbone"),
        "two-artifacts-of-a-role": good.with_artifacts({"role": "head"}, {"role": "head"}),
        "own-tensors-of-a-model": good.with_artifacts(
            {"runtime": "tensorrt", "inputs": x, "profile": good.manifest["profile"]}
        ),
        "own-tensors-differ-in-a-role": good.with_artifacts(
            head, {**head, "runtime": "tensorrt", "outputs": [{**y[0], "name": "z"}]}
        ),
        "own-datatype-unknown": good.with_artifacts({**head, "inputs": [{**code, "datatype": "BF16"}]}),
        "own-batch-fixed": good.with_artifacts({**head, "inputs": [{**code, "shape": [1, 4]}]}),
        "own-name-twice": good.with_artifacts({**head, "outputs": [{**y[0], "name": "code"}]}),
        "own-input-empty": good.with_artifacts({**head, "inputs": []}),
        "own-profile-missing": good.with_artifacts({**head, "profile": {}}),
        "own-profile-unfit": good.with_artifacts({**head, "profile": {"code": {**shapes, "opt": [8, 5]}}}),
        "own-profile-without-inputs": good.with_artifacts({"role": "head", "profile": good.manifest["profile"]}),
    }


def broken_golden_sets(good: Good) -> dict[str, Tree]:
    values = oracle_golden().outputs["value"]
    return {
        "golden-no-zip": good.with_hashed("golden.npz", b"not a zip file\n"),
        "golden-truncated": good.with_hashed("golden.npz", good.files["golden.npz"][:700]),
        "golden-compressed": good.with_hashed("golden.npz", golden_compressed()),
        "golden-pickled": good.with_hashed("golden.npz", golden_pickled()),
        "golden-nan": good.with_golden(outputs={"value": values * np.float32("nan")}),
        "golden-shape": good.with_golden(inputs={"x": np.zeros((8, 14), np.float32)}),
        "golden-datatype": good.with_golden(outputs={"value": values.astype(np.float64)}),
        "golden-rows": good.with_golden(outputs={"value": values[:3]}),
        "golden-extra": good.with_golden(outputs={"other": values}),
    }


def broken_models(good: Good) -> dict[str, Tree]:
    values = oracle_golden().outputs["value"]
    return {
        "golden-wrong": good.with_golden(outputs={"value": values + 1}),
        "golden-other-text": good.with_golden(raw={"expression": oracle_golden().raw["expression"][::-1]}),
        "golden-no-expression": good.with_golden(raw={"expression": np.full((8, 1), b"two")}),
        "onnx-truncated": good.with_hashed("model.onnx", good.files["model.onnx"][:1000]),
        "onnx-not": good.with_hashed("model.onnx", b"\x08\x08"),
        "onnx-other-input": good.with_hashed("model.onnx", changed_onnx(rename_input)),
        "onnx-other-shape": good.with_field("outputs", 0, "shape", value=[-1, -1]),
        "onnx-external-data": good.with_hashed("model.onnx", changed_onnx(external_data)),
        "onnx-unknown-opset": good.with_hashed(
            "model.onnx", changed_onnx(lambda model: setattr(model.opset_import[0], "version", 999))
        ),
        "onnx-custom-operator": good.with_hashed("model.onnx", changed_onnx(custom_operator)),
    }


def write(directory: Path, version: int) -> None:
    for name, files in cases(version).items():
        shutil.rmtree(directory / name, ignore_errors=True)
        for file, content in files.items():
            path = directory / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, Link):
                path.symlink_to(content.target)
            else:
                path.write_bytes(content)


if __name__ == "__main__":
    for version, (_, corpus) in CORPORA.items():
        write(corpus, version)
