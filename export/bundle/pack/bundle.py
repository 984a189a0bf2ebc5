"""The bundle of a user's own ONNX file, written without a run directory and without torch."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

import msgspec

from edge import __version__
from edge.bundles.golden import Golden
from edge.bundles.manifest import Artifact, Manifest, Profile, Provenance, Serving, Tier
from edge.datatypes import Array
from edge.errors import UsageError
from edge.files import sha256
from edge.runtimes.onnxruntime_runner import OnnxRuntimeRunner
from export.bundle.exportable import Contents, File, write_contents
from export.bundle.exported import FULL
from export.bundle.outputs import check_bundle, check_name
from export.bundle.pack.boxes import boxes_step, with_limits
from export.bundle.pack.golden import (
    OutputError,
    check_repeatable,
    check_rows_independent,
    golden_outputs,
    tolerance_of,
)
from export.bundle.pack.inputs import RANDOM, SEED, in_runs, random_inputs, read_inputs, read_items
from export.bundle.pack.model import Change, OnnxModel, load_model, read_model
from export.bundle.pack.options import READ, PackOptions, in_directory
from export.bundle.pack.profiles import profiles
from export.bundle.pack.steps import Arrays, label_step, pixels_step, read_images
from export.bundle.pack.texts import EMBEDDINGS, SAMPLES, text_step, with_embedding
from export.bundle.pack.variants import Checks, Variant, check_convertible, fp16_variant, int8_variants

#: Used where the graph has a batch dimension and ``--max-batch-size`` is not given.
DEFAULT_MAX_BATCH_SIZE = 8
_PACKAGES = ("onnx", "onnxruntime", "numpy")


class PackedFile(msgspec.Struct, frozen=True):
    """One ONNX file of the bundle.

    Attributes:
        runtime: that reads it: ``any``, ``onnxruntime`` or ``tensorrt``.
        rms_error: largest RMS error of an output against the golden outputs, as a share of their spread; None for the
            given file, which made them, and where no output is a floating-point number.
        largest_error: as ``rms_error``, the largest absolute error.
    """

    tier: str
    file: str
    runtime: str
    precision: str
    size_bytes: int
    rms_error: float | None = None
    largest_error: float | None = None


class Packed(msgspec.Struct, frozen=True):
    """A bundle that was written from an ONNX file.

    Attributes:
        max_batch_size: most rows of a run; 0 without a batch dimension.
        golden: source of the golden inputs.
        only_onnxruntime: why TensorRT cannot run the model; empty if no known reason forbids it.
        calibration_items: inputs that set the scales of INT8; None without INT8.
        not_taken: what Triton's configuration says and a bundle has no place for.
    """

    bundle: str
    max_batch_size: int
    golden: str
    golden_rows: int
    only_onnxruntime: str
    files: list[PackedFile]
    calibration_items: int | None = None
    not_taken: tuple[str, ...] = ()


def pack_model(
    path: Path,
    repository: Path,
    name: str | None,
    options: PackOptions,
    *,
    version: int = 1,
    replace: bool = False,
    changes: Sequence[Change] = (),
    serving: Serving | None = None,
    begin: Callable[[str], None] = lambda step: None,
) -> Packed:
    """Write ``repository/<name>-<version>`` from an ONNX file, with golden outputs by ONNX Runtime.

    Weights in files beside the ONNX file are embedded.

    Args:
        path: of the file, or of a Hugging Face directory that has one.
        changes: of the graph, before anything else reads it.
        serving: defaults of the server.
        begin: called with the name of each step before it begins.

    Raises:
        UsageError: the file, the name or an option does not fit, a variant computes something else, or the bundle
            exists; the message names the option that helps.
        GoldenError: repeated runs of the graph give other outputs.
        CheckpointError: a file of a Hugging Face directory is malformed or not supported.
        DataError: a file or directory of golden inputs cannot be read.
    """
    name = check_name("--name", name)
    target = repository / f"{name}-{version}"
    read = {f"--{name}": getattr(options, name) for name in READ}
    # A bundle may be written below the directory of a model or a tokenizer.
    read |= {"the ONNX file": None if path.is_dir() else path}
    check_bundle(target, read, replace=replace)
    if path.is_dir():
        path, options = in_directory(path, options)
    options.check()
    begin("reading")
    if options.tokenizer:
        changes = (*changes, partial(with_embedding, pooling=options.pooling, normalize=options.normalize))
    model = read_model(path, changes)
    for option in [f"--{kind}" for kind in ("fp16", "int8") if getattr(options, kind)]:
        check_convertible(model, option)
    with closing(load_model(model)) as runner:
        specs = runner.inputs, runner.outputs
        max_batch_size = _max_batch_size(runner, path, options.max_batch_size)
        # Before the profiles, which would ask for the sizes of dynamic images that --image refuses.
        image = pixels_step(options.image, *specs, path) if options.image else None
        texts = text_step(options.tokenizer, options.max_length, runner.inputs) if options.tokenizer else None
        shapes = texts.shapes(max_batch_size) if texts else {}
        profile = profiles(runner.inputs, model.dimensions, max_batch_size, shapes | options.shapes)
        boxes = boxes_step(options, specs[1], path) if options.detect else None
        labels = None
        if options.labels and not boxes:
            labels = label_step(options.labels, specs[1], path, options.labelled)
        begin("golden outputs")
        if texts:
            texts.check(runner, path)
        read_raw = texts.read if texts else partial(read_images, step=image) if image else None
        golden = _golden(runner, path, options.inputs, read_raw, profile, max_batch_size)
        if boxes:
            boxes = with_limits(boxes, options, golden, path)
        tolerance = tolerance_of(golden, model.precision)
        check_repeatable(runner, golden, tolerance, max_batch_size, path)
        # Requests never share a run of an INT8 tier, because dynamic quantization depends on the whole run.
        if max_batch_size > 1 and model.precision != "int8":
            check_rows_independent(runner, golden, tolerance, path)
    runtime = "onnxruntime" if model.operators.only_onnxruntime else "any"
    given = Artifact(
        file="model.onnx", runtime=runtime, precision=model.precision, opset=model.opset, tolerance=tolerance
    )
    source = options.inputs.name if options.inputs else SAMPLES if texts else RANDOM
    held_out = not options.int8 or options.calibration is not None
    place = f"golden inputs: {source}" + ("" if held_out else ", which calibrated INT8")
    variants: list[Variant] = []
    calibration_items: int | None = None
    if options.fp16:
        begin("FP16")
        checks = Checks(golden, max_batch_size, f"golden inputs: {source}", options.absent("inputs"))
        variants.append(fp16_variant(model, checks))
    if options.int8:
        begin("INT8")
        if texts:
            runs = texts.read_alone(options.calibration or options.inputs, golden=options.calibration is None)
        elif options.calibration is None:
            runs = in_runs(golden.inputs, max_batch_size)
        elif image:
            runs = in_runs(read_images("--calibration", options.calibration, image)[1], max_batch_size)
        else:
            runs = read_items("--calibration", options.calibration, specs[0], profile, max_batch_size)
        calibration_items = sum(len(next(iter(run.values()))) if max_batch_size else 1 for run in runs)
        checks = Checks(golden, max_batch_size, place, options.absent("inputs", "calibration"))
        variants += int8_variants(model, runs, checks)
    tiers = {FULL: [given]}
    for variant in variants:
        tiers.setdefault(variant.tier, []).append(variant.artifact)
    # Its files in other precisions approximate the same values.
    is_embedding = texts and not labels and specs[1][0].name in EMBEDDINGS
    space = sha256(model.data)[:16] if is_embedding else None
    manifest = Manifest(
        name=name,
        version=1,
        description=f"{path.name}, as given to 'fewheads pack'",
        inputs=specs[0],
        outputs=specs[1],
        max_batch_size=max_batch_size,
        profile=profile,
        tiers=tuple(Tier(name=tier, artifacts=tuple(files), space=space) for tier, files in tiers.items()),
        golden="golden.npz",
        files={},
        preprocess=texts.step if texts else image,
        postprocess=boxes or labels,
        serving=serving,
        provenance=_provenance(model, source, SEED if source == RANDOM else None),
        measures=tuple(measure for variant in variants for measure in variant.measures),
    )
    begin("writing")
    files: dict[str, File] = {given.file: model.data, manifest.golden: golden}
    files |= {variant.artifact.file: variant.data for variant in variants}
    files |= {texts.step.file: texts.definition} if texts else {}
    contents = Contents(manifest, files, predicted="never" if model.operators.control_flow else "countable")
    write_contents(contents, target, version=version, replace=replace)
    packed = [
        _file(FULL, given, model.data),
        *(_file(one.tier, one.artifact, one.data, one.errors) for one in variants),
    ]
    reason = model.operators.only_onnxruntime
    return Packed(str(target), max_batch_size, source, golden.rows, reason, packed, calibration_items)


def _file(tier: str, artifact: Artifact, data: bytes, errors: Sequence[OutputError] = ()) -> PackedFile:
    rms, largest = (max(values, default=None) for values in ([e.rms for e in errors], [e.largest for e in errors]))
    return PackedFile(tier, artifact.file, artifact.runtime, artifact.precision, len(data), rms, largest)


def _golden(
    runner: OnnxRuntimeRunner,
    path: Path,
    given: Path | None,
    read_raw: Callable[[str, Path | None], tuple[Arrays, Arrays]] | None,
    profile: dict[str, Profile],
    max_batch_size: int,
) -> Golden:
    raw: dict[str, Array] = {}
    if read_raw:
        raw, inputs = read_raw("--inputs", given)
    elif given:
        inputs = read_inputs("--inputs", given, runner.inputs, profile, max_batch_size)
    else:
        inputs = random_inputs(runner.inputs, profile, max_batch_size)
    return Golden(inputs, golden_outputs(runner, inputs, max_batch_size, path, given=given is not None), raw)


def _max_batch_size(runner: OnnxRuntimeRunner, path: Path, given: int | None) -> int:
    fixed = [spec for spec in (*runner.inputs, *runner.outputs) if spec.shape[0] != -1]
    if given and fixed:
        expected = f"0, because {fixed[0].name!r} of {path} has the fixed shape {list(fixed[0].shape)}"
        fix = "Leave the option out, or export the model again with a symbolic first dimension of all tensors."
        raise UsageError("--max-batch-size", given=given, expected=expected, fix=fix)
    if given is not None:
        return given
    return 0 if fixed else DEFAULT_MAX_BATCH_SIZE


def _provenance(model: OnnxModel, golden: str, seed: int | None) -> Provenance:
    return Provenance(
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        trainer=f"the owner of {model.path.name}, which was written by {model.producer}"[:4096],
        data=f"data that the file does not name; golden inputs: {golden}"[:4096],
        seed=seed,
        versions={"fewheads": __version__, **{package: importlib.metadata.version(package) for package in _PACKAGES}},
    )
