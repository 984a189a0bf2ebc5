"""A model repository of Triton from a bundle: ``NAME/config.pbtxt`` and ``NAME/VERSION/model.onnx``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from google.protobuf import text_format

from edge.bundles.bundle import Bundle
from edge.bundles.manifest import Artifact, Manifest
from edge.bundles.programs import CascadeProgram
from edge.bundles.steps import LabelPostprocess, TokenizerPreprocess
from edge.datatypes import TensorSpec
from edge.errors import BundleError, Raw, UsageError
from edge.files import replaced_directory, write_durably
from edge.pb import inference_pb2 as pb
from export.bundle.outputs import TRITON_CONFIG, check_triton_model

_LABELS: Final = "labels.txt"


class TritonModel(msgspec.Struct, frozen=True):
    """A model that was written for Triton.

    Attributes:
        model: its directory.
        inputs: that clients send, by name.
        notes: what Fewheads does with the bundle, and Triton does not.
    """

    model: str
    version: int
    tier: str
    precision: str
    max_batch_size: int
    inputs: tuple[str, ...]
    notes: tuple[str, ...]


def write_triton_model(
    path: Path, repository: Path, *, name: str | None = None, tier: str | None = None, replace: bool = False
) -> TritonModel:
    """Write ``repository/NAME`` for Triton's backend ``onnxruntime`` from a bundle.

    Args:
        name: of the model; None for that of the bundle.
        tier: None for the full one.

    Raises:
        BundleError: the path is not a bundle, has no such tier or none for ONNX Runtime, or the directory cannot be
            written.
        UsageError: a request to the model is several runs, or the directory exists.
    """
    bundle = Bundle.open(path)
    manifest = bundle.manifest
    if manifest.program and not isinstance(manifest.program, CascadeProgram):
        given, expected = Raw(f"the program {manifest.program.__struct_config__.tag}"), "a model that is one ONNX file"
        fix = "Serve it with 'fewheads serve': the backend onnxruntime does not run several files in turn."
        raise UsageError(f"bundle {path}", given=given, expected=expected, fix=fix)
    target = repository / (name or manifest.name)
    check_triton_model(target, {"the bundle": path}, replace=replace)
    chosen, artifact = bundle.tier(tier), bundle.artifact("onnxruntime", tier)
    config = _config(manifest, artifact, target.name)
    files = {TRITON_CONFIG: text_format.MessageToString(config).encode()}
    if isinstance(manifest.postprocess, LabelPostprocess):
        files[_LABELS] = "".join(f"{label}\n" for label in manifest.postprocess.labels).encode()
    files[f"{manifest.version}/model.onnx"] = bundle.read(artifact.file)
    try:
        with replaced_directory(target) as new:
            (new / str(manifest.version)).mkdir()
            for file, data in files.items():
                write_durably(new / file, data)
    except OSError as error:
        fix = "Free space, or choose another place."
        raise BundleError(f"{target}", given=Raw(error), expected="a place with room to write it", fix=fix) from None
    inputs = tuple(spec.name for spec in manifest.inputs)
    notes = tuple(_notes(manifest))
    return TritonModel(
        f"{target}", manifest.version, chosen.name, artifact.precision, manifest.max_batch_size, inputs, notes
    )


def check_names(bundles: Sequence[Path]) -> None:
    """Raise a UsageError if two bundles would become the same model, as versions of one do."""
    known: dict[str, Path] = {}
    for path in bundles:
        other = known.setdefault(Bundle.open(path).manifest.name, path)
        if other != path:
            given, expected = Raw(f"{other} and {path}"), "bundles of different names: a model has one version here"
            fix = "Write them one by one, into repositories of their own or with another --name."
            raise UsageError("BUNDLE", given=given, expected=expected, fix=fix)


def _config(manifest: Manifest, artifact: Artifact, name: str) -> pb.ModelConfig:
    rows, serving = manifest.max_batch_size, manifest.serving
    config = pb.ModelConfig(name=name, platform="onnxruntime_onnx", backend="onnxruntime", max_batch_size=rows)
    after = manifest.postprocess
    logits = after.logits if isinstance(after, LabelPostprocess) else None
    for spec in manifest.inputs:
        config.input.add(**_described(spec, rows))
    for spec in manifest.outputs:
        config.output.add(**_described(spec, rows), label_filename=_LABELS if spec.name == logits else "")
    # The scales of dynamic INT8 depend on all rows of a run, so that requests must not share one.
    if rows > 1 and artifact.precision != "int8":
        config.dynamic_batching.SetInParent()
        if serving:
            config.dynamic_batching.preferred_batch_size.extend(serving.preferred_batch_sizes)
            config.dynamic_batching.max_queue_delay_microseconds = serving.max_queue_delay_us
    return config


def _described(spec: TensorSpec, rows: int) -> dict[str, Any]:
    """Return the fields of a tensor; without dimensions but the batch, it is reshaped, because Triton demands dims."""
    dims = spec.shape[1 if rows else 0 :]
    datatype = f"TYPE_{'STRING' if spec.datatype == 'BYTES' else spec.datatype}"
    reshape = None if dims else pb.ModelTensorReshape()
    return {"name": spec.name, "data_type": datatype, "dims": dims or (1,), "reshape": reshape}


def _notes(manifest: Manifest) -> list[str]:
    notes, step, after = [], manifest.preprocess, manifest.postprocess
    if isinstance(step, TokenizerPreprocess):
        names = ", ".join(step.graph_inputs)
        notes.append(f"clients send {names} of at most {step.max_length} tokens, not texts: {step.file} makes them")
    elif step:
        notes.append(f"clients send {', '.join(step.graph_inputs)}, what the step {step.__struct_config__.tag} makes")
    if isinstance(after, LabelPostprocess):
        notes.append(f"clients get the label with class_count of {after.logits}, not as {after.output}")
    elif after:
        made = ", ".join(spec.name for spec in after.results)
        notes.append(f"clients get {', '.join(after.reads)}, without {made}")
    if len(manifest.tiers) > 1:
        notes.append("a request cannot choose a tier")
    return notes
