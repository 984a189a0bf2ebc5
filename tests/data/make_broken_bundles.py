"""Write the corpus of broken bundles: the good oracle bundle, broken in one way in each case.

``broken_bundles/expected.json`` holds the error of each case, and is written by hand.

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
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, external_data_helper, helper

from edge.bundles.golden import Golden
from edge.datatypes import Array
from tests.support.models import DATA, ORACLE_BUNDLE, oracle_golden, oracle_onnx

BROKEN_BUNDLES = DATA / "broken_bundles"
#: A program that names tiers which the oracle does not have.
CASCADE = {"type": "cascade", "lean": "small", "full": "full", "logits": "value", "margin": 0.5}
#: A step whose pixels are not the oracle's tokens.
IMAGE = {"type": "image", "input": "image", "output": "x", "size": 8, "colours": "grey", "mean": [0.5], "std": [0.5]}
IMAGE |= {"max_bytes": 1000, "max_pixels": 1000}
#: A good further artifact: it takes an input of its own.
HEAD: dict[str, Any] = {
    "role": "head",
    "inputs": [{"name": "code", "datatype": "FP32", "shape": [-1, 4]}],
    "profile": {"code": {"min": [1, 4], "opt": [8, 4], "max": [64, 4]}},
}
#: Good latencies.
MEASURED: dict[str, Any] = {"source": "measured", "device": "AMD EPYC", "runtime": "onnxruntime", "precision": "fp32"}
MEASURED |= {"rows": 1, "tokens": 32, "milliseconds": 1.25, "times_faster": 1.0, "calls": 20}
PREDICTION: dict[str, Any] = {"source": "prediction", "device": "Jetson Orin Nano Super", "power_mode": "15W"}
PREDICTION |= {"runtime": "tensorrt", "precision": "fp16", "rows": 8}
PREDICTION |= {"milliseconds": 0.5, "low_ms": 0.3, "high_ms": 0.7, "times_faster": 1.5}
#: File name to contents, or to the target of a link.
Tree = dict[str, bytes | Path]


class Good:
    """The good bundle, from which every case is made; ``manifest`` is not to be changed."""

    def __init__(self) -> None:
        self.files = {path.name: path.read_bytes() for path in sorted(ORACLE_BUNDLE.iterdir())}
        self.manifest: dict[str, Any] = json.loads(self.files["manifest.json"])

    def with_files(self, **changes: bytes | Path | None) -> Tree:
        """Return the good files with some replaced; ``_`` in a name stands for ``.``, and None removes the file."""
        changed = {**self.files, **{name.replace("_", "."): content for name, content in changes.items()}}
        return {name: content for name, content in changed.items() if content is not None}

    def with_manifest(self, change: Callable[[dict[str, Any]], object]) -> Tree:
        manifest = copy.deepcopy(self.manifest)
        change(manifest)
        return self.with_files(manifest_json=json.dumps(manifest, indent=2).encode() + b"\n")

    def with_hashed(self, name: str, content: bytes) -> Tree:
        return {**self.with_manifest(lambda manifest: manifest["files"].update({name: record(content)})), name: content}

    def with_golden(self, **changes: Mapping[str, Array]) -> Tree:
        """Return the good files with some arrays of the golden set replaced."""
        good = oracle_golden()
        arrays = {kind: {**getattr(good, kind), **changes.get(kind, {})} for kind in ("inputs", "outputs", "raw")}
        return self.with_hashed("golden.npz", Golden(**arrays).encode())

    def with_field(self, path: str, value: object) -> Tree:
        """Return the good files with another value at a path of the manifest, such as ``tiers.0.name``."""
        *parents, last = [int(key) if key.isdigit() else key for key in path.split(".")]

        def change(part: Any) -> None:
            for key in parents:
                part = part[key]
            part[last] = value

        return self.with_manifest(change)

    def with_model_called(self, name: str) -> Tree:
        def change(manifest: dict[str, Any]) -> None:
            manifest["files"][name] = manifest["files"].pop("model.onnx")
            manifest["tiers"][0]["artifacts"][0]["file"] = name

        return self.with_manifest(change)

    def with_artifacts(self, *changes: Mapping[str, object]) -> Tree:
        """Return the good files with further ones in the tier; their artifacts differ from the first in some fields."""
        content = self.files["model.onnx"]
        files = {f"extra{index}.onnx": change for index, change in enumerate(changes, 1)}

        def change_manifest(manifest: dict[str, Any]) -> None:
            artifacts = manifest["tiers"][0]["artifacts"]
            artifacts += [{**artifacts[0], "file": file, **change} for file, change in files.items()]
            manifest["files"].update({file: record(content) for file in files})

        return {**self.with_manifest(change_manifest), **dict.fromkeys(files, content)}


def record(content: bytes) -> dict[str, object]:
    return {"size_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


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


def cases() -> dict[str, Tree]:
    good = Good()
    return broken_files(good) | broken_manifests(good) | broken_roles(good) | broken_contents(good)


def broken_files(good: Good) -> dict[str, Tree]:
    model, linked = good.files["model.onnx"], Path("../../bundles/calculator-oracle-1")
    return {
        "wrong-hash": good.with_files(model_onnx=model[:-1] + b"\0"),
        "wrong-size-short": good.with_files(model_onnx=model[:-1]),
        "wrong-size-long": good.with_files(model_onnx=model + b"\0"),
        "missing-file": good.with_files(model_onnx=None),
        "stray-file": good.with_files(notes_txt=b"remember the milk\n"),
        "link-as-file": {**good.with_files(model_onnx=None), "model.onnx": linked / "model.onnx"},
        "link-as-manifest": good.with_files(manifest_json=linked / "manifest.json"),
        "directory-as-file": {**good.with_files(model_onnx=None), "model.onnx/placeholder": b"\n"},
        "missing-golden": good.with_files(golden_npz=None),
        "path-traversal": good.with_model_called("../model.onnx"),
        "path-absolute": good.with_model_called("/etc/passwd"),
    }


def broken_manifests(good: Good) -> dict[str, Tree]:
    manifest, field = good.files["manifest.json"], good.with_field
    deep = b'{"format_version":%d,"name":%s}\n' % (good.manifest["format_version"], b"[" * 50_000 + b"]" * 50_000)
    return {
        "missing-manifest": good.with_files(manifest_json=None),
        "empty-manifest": good.with_files(manifest_json=b""),
        "not-json": good.with_files(manifest_json=b"name: calculator\n"),
        "not-utf8": good.with_files(manifest_json=manifest.replace(b"Evaluates", b"\xff\xfe")),
        "deep-json": good.with_files(manifest_json=deep),
        "huge-manifest": good.with_files(manifest_json=manifest.rstrip() + b" " * 2**20 + b"\n"),
        "unknown-field": field("colour", "blue"),
        "future-format": field("format_version", 3),
        "format-zero": field("format_version", 0),
        "format-negative": field("format_version", -1),
        "format-text": field("format_version", "2"),
        "no-format": good.with_manifest(lambda manifest: manifest.pop("format_version")),
        "version-zero": field("version", 0),
        "uppercase-name": field("name", "Calculator"),
        "duplicate-tier": field("tiers", good.manifest["tiers"] * 2),
        "duplicate-tensor": field("outputs.0.name", "x"),
        "unknown-datatype": field("inputs.0.datatype", "FP8"),
        "fixed-batch": field("outputs.0.shape", [1, 1]),
        "no-profile": field("profile", {}),
        "profile-inverted": field("profile.x.min", [9, 15]),
        "profile-unfit": field("profile.x.opt", [8, 16]),
        "profile-not-batch": field("max_batch_size", 32),
        "preprocess-to-nothing": field("preprocess.output", "tokens"),
        "preprocess-from-tensor": field("preprocess.input", "x"),
        "unlisted-artifact": field("tiers.0.artifacts.0.file", "other.onnx"),
        "unlisted-golden": field("golden", "other.npz"),
        "two-artifacts-for-a-runtime": good.with_artifacts({}),
    }


def broken_roles(good: Good) -> dict[str, Tree]:
    """Manifests whose roles, tensors of artifacts or program break the schema or a rule."""
    x, (y,), profile = good.manifest["inputs"], good.manifest["outputs"], good.manifest["profile"]
    (code,), shapes = HEAD["inputs"], HEAD["profile"]["code"]
    on_tensorrt = {**HEAD, "runtime": "tensorrt", "outputs": [{**y, "name": "z"}]}

    def head(**fields: object) -> Tree:
        return good.with_artifacts({**HEAD, **fields})

    return {
        "router-in-version-2": good.with_field("router", CASCADE),
        "program-without-type": good.with_field("program", {k: v for k, v in CASCADE.items() if k != "type"}),
        "program-of-unknown-type": good.with_field("program", {"type": "spiral", "turns": 3}),
        "program-of-unknown-tiers": good.with_field("program", CASCADE),
        "image-to-tokens": good.with_field("preprocess", IMAGE),
        "image-of-other-colours": good.with_field("preprocess", {**IMAGE, "colours": "rgb"}),
        "image-cut-from-less": good.with_field("preprocess", {**IMAGE, "shorter_side": 7}),
        "tolerance-of-no-output": good.with_field("tiers.0.artifacts.0.tolerance.outputs", {"x": 0.5}),
        "latency-outside-its-band": good.with_field("tiers.0.latencies", [{**PREDICTION, "milliseconds": 0.2}]),
        "latency-of-a-part-of-one-run": good.with_field("tiers.0.latencies", [{**PREDICTION, "part": "step"}]),
        "latency-of-no-source": good.with_field("tiers.0.latencies", [{**PREDICTION, "source": "guess"}]),
        "latency-without-its-band": good.with_field(
            "tiers.0.latencies", [{k: v for k, v in PREDICTION.items() if k != "high_ms"}]
        ),
        "unknown-role": good.with_field("tiers.0.artifacts.0.role", "brain"),
        "no-model-role": good.with_field("tiers.0.artifacts.0.role", "backbone"),
        "two-artifacts-of-a-role": good.with_artifacts({"role": "head"}, {"role": "head"}),
        "own-tensors-of-a-model": good.with_artifacts({"runtime": "tensorrt", "inputs": x, "profile": profile}),
        "own-tensors-differ-in-a-role": good.with_artifacts(HEAD, on_tensorrt),
        "own-datatype-unknown": head(inputs=[{**code, "datatype": "BF16"}]),
        "own-batch-fixed": head(inputs=[{**code, "shape": [1, 4]}]),
        "own-name-twice": head(outputs=[{**y, "name": "code"}]),
        "own-input-empty": head(inputs=[]),
        "own-profile-missing": head(profile={}),
        "own-profile-unfit": head(profile={"code": {**shapes, "opt": [8, 5]}}),
        "own-more-profiles-unfit": head(more_profiles=[{"code": {**shapes, "min": [9, 4]}}]),
        "own-profile-without-inputs": good.with_artifacts({"role": "head", "profile": profile}),
    }


def broken_contents(good: Good) -> dict[str, Tree]:
    """Golden sets and models behind correct hashes."""
    values, texts = oracle_golden().outputs["value"], oracle_golden().raw["expression"]
    golden, model = good.files["golden.npz"], good.files["model.onnx"]
    unknown_opset = changed_onnx(lambda model: setattr(model.opset_import[0], "version", 999))
    return {
        "golden-no-zip": good.with_hashed("golden.npz", b"not a zip file\n"),
        "golden-truncated": good.with_hashed("golden.npz", golden[:700]),
        "golden-compressed": good.with_hashed("golden.npz", golden_compressed()),
        "golden-pickled": good.with_hashed("golden.npz", golden_pickled()),
        "golden-nan": good.with_golden(outputs={"value": values * np.float32("nan")}),
        "golden-shape": good.with_golden(inputs={"x": np.zeros((8, 14), np.float32)}),
        "golden-datatype": good.with_golden(outputs={"value": values.astype(np.float64)}),
        "golden-rows": good.with_golden(outputs={"value": values[:3]}),
        "golden-extra": good.with_golden(outputs={"other": values}),
        "golden-wrong": good.with_golden(outputs={"value": values + 1}),
        "golden-other-text": good.with_golden(raw={"expression": texts[::-1]}),
        "golden-no-expression": good.with_golden(raw={"expression": np.full((8, 1), b"two")}),
        "onnx-truncated": good.with_hashed("model.onnx", model[:1000]),
        "onnx-not": good.with_hashed("model.onnx", b"\x08\x08"),
        "onnx-other-input": good.with_hashed("model.onnx", changed_onnx(rename_input)),
        "onnx-other-shape": good.with_field("outputs.0.shape", [-1, -1]),
        "onnx-external-data": good.with_hashed("model.onnx", changed_onnx(external_data)),
        "onnx-unknown-opset": good.with_hashed("model.onnx", unknown_opset),
        "onnx-custom-operator": good.with_hashed("model.onnx", changed_onnx(custom_operator)),
    }


def write(directory: Path) -> None:
    for name, files in cases().items():
        shutil.rmtree(directory / name, ignore_errors=True)
        for file, content in files.items():
            path = directory / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, Path):
                path.symlink_to(content)
            else:
                path.write_bytes(content)


if __name__ == "__main__":
    write(BROKEN_BUNDLES)
