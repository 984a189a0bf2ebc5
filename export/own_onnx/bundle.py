"""A bundle from a user's own ONNX file, without a run directory and without torch."""

from __future__ import annotations

import importlib.metadata
from datetime import datetime, timezone
from pathlib import Path

import msgspec

from edge import __version__
from edge.bundles.bundle import write_bundle
from edge.bundles.golden import Golden
from edge.bundles.manifest import Artifact, Manifest, Provenance, Tier
from edge.errors import UsageError
from edge.runtimes.onnxruntime_runner import OnnxRuntimeRunner
from export.exported import FULL
from export.outputs import check_bundle, check_name
from export.own_onnx.golden import (
    RANDOM,
    SEED,
    check_repeatable,
    check_rows_independent,
    golden_outputs,
    random_inputs,
    read_inputs,
    tolerance_of,
)
from export.own_onnx.model import OwnModel, load_model, read_model
from export.own_onnx.profiles import Shapes, profiles

#: Used where the graph has a batch dimension and ``--max-batch-size`` is not given.
DEFAULT_MAX_BATCH_SIZE = 8
_PACKAGES = ("onnx", "onnxruntime", "numpy")


class OwnOptions(msgspec.Struct, frozen=True):
    """Options for an own ONNX file.

    Attributes:
        max_batch_size: most rows of a run; 0 without a batch dimension; None takes it from the graph.
        shapes: of each input with a dynamic dimension other than the batch.
        inputs: an ``.npz`` with golden inputs; None for random ones.
    """

    max_batch_size: int | None = None
    shapes: Shapes = msgspec.field(default_factory=dict)
    inputs: Path | None = None


class OwnExported(msgspec.Struct, frozen=True):
    """A bundle that was written from an own ONNX file.

    Attributes:
        max_batch_size: most rows of a run; 0 without a batch dimension.
        precision: ``fp32``, ``fp16`` or ``int8``, found in the graph.
        golden: source of the golden inputs.
    """

    bundle: str
    max_batch_size: int
    precision: str
    golden: str
    golden_rows: int
    onnx_bytes: int


def export_own(
    path: Path,
    repository: str | Path,
    name: str | None,
    options: OwnOptions,
    *,
    version: int = 1,
    replace: bool = False,
) -> OwnExported:
    """Write ``repository/<name>-<version>`` from an ONNX file, with golden outputs by ONNX Runtime.

    Weights in files beside the ONNX file are embedded.

    Raises:
        UsageError: the file, the name or an option does not fit, or the bundle exists; the message names the option
            that helps.
        GoldenError: repeated runs of the graph give other outputs.
    """
    name = check_name("--name", name)
    target = Path(repository) / f"{name}-{version}"
    check_bundle(target, {"the ONNX file": path, "--inputs": options.inputs}, replace=replace)
    model = read_model(path)
    runner = load_model(model)
    try:
        max_batch_size = _max_batch_size(runner, path, options.max_batch_size)
        profile = profiles(runner.inputs, max_batch_size, options.shapes)
        inputs = (
            read_inputs(options.inputs, runner.inputs, profile, max_batch_size)
            if options.inputs
            else random_inputs(runner.inputs, profile, max_batch_size)
        )
        golden = Golden(inputs, golden_outputs(runner, inputs, max_batch_size, path))
        tolerance = tolerance_of(golden, model.precision)
        check_repeatable(runner, golden, tolerance, max_batch_size, path)
        # Requests never share a run of an INT8 tier, because dynamic quantization depends on the whole run.
        if max_batch_size > 1 and model.precision != "int8":
            check_rows_independent(runner, golden, tolerance, path)
        specs = runner.inputs, runner.outputs
    finally:
        runner.close()
    source = options.inputs.name if options.inputs else RANDOM
    artifact = Artifact(
        file="model.onnx", runtime="any", precision=model.precision, opset=model.opset, tolerance=tolerance
    )
    manifest = Manifest(
        name=name,
        version=version,
        description=f"{path.name}, as given to 'fewheads export'",
        inputs=specs[0],
        outputs=specs[1],
        max_batch_size=max_batch_size,
        profile=profile,
        tiers=(Tier(name=FULL, artifacts=(artifact,)),),
        golden="golden.npz",
        files={},
        provenance=_provenance(model, source, None if options.inputs else SEED),
    )
    files = {artifact.file: model.data, manifest.golden: golden.encode()}
    written = write_bundle(target, manifest, files, replace=replace)
    return OwnExported(str(written.path), max_batch_size, model.precision, source, golden.rows, len(model.data))


def _max_batch_size(runner: OnnxRuntimeRunner, path: Path, given: int | None) -> int:
    fixed = [spec for spec in (*runner.inputs, *runner.outputs) if spec.shape[0] != -1]
    if given and fixed:
        raise UsageError(
            "--max-batch-size",
            given=given,
            expected=f"0, because {fixed[0].name!r} of {path} has the fixed shape {list(fixed[0].shape)}",
            fix="Leave the option out, or export the model again with a symbolic first dimension of all tensors.",
        )
    if given is not None:
        return given
    return 0 if fixed else DEFAULT_MAX_BATCH_SIZE


def _provenance(model: OwnModel, golden: str, seed: int | None) -> Provenance:
    return Provenance(
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        trainer=f"unknown; {model.path.name} was written by {model.producer}"[:4096],
        data=f"unknown; golden inputs: {golden}"[:4096],
        seed=seed,
        versions={"fewheads": __version__, **{package: importlib.metadata.version(package) for package in _PACKAGES}},
    )
