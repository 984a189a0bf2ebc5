"""Export of a head of backward attention to a bundle of its own, beside the bundle of its base."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from edge.bundles.bundle import Bundle, write_bundle
from edge.bundles.golden import Golden
from edge.bundles.manifest import Artifact, Manifest, Measure, Profile, Provenance, Tier
from edge.bundles.npz import encode_npz
from edge.bundles.programs import GenerateProgram, HeadBase, HeadProgram
from edge.datatypes import Array, TensorSpec
from edge.errors import Raw, UsageError
from edge.programs.head import Head, HeadLayer
from edge.programs.program import Options
from edge.runtimes.onnxruntime_runner import OnnxRuntimeRunner
from export.bundle.exported import FULL, Exported
from export.bundle.latencies import with_latencies
from export.bundle.tier_files import allowed_tolerance, worst_tolerance
from export.generate.base import BaseIdentity
from export.generate.bundle import is_origin, origin_of
from export.models.convert import OPSET, golden_of, largest_difference, to_onnx
from export.papers.backward.bundle import Folded, FoldedHead

_LOGITS, _KEYS, _VALUES, _TEMPERATURES, _ALPHA, _MOVED = "logits", "keys", "values", "temperatures", "alpha", "moved"
_FILE, _TENSORS, _GOLDEN, _PART_GOLDEN = "head.onnx", "tensors.npz", "golden.npz", "head.golden.npz"
_INPUTS: Mapping[str, Mapping[int, str]] = {
    _LOGITS: {0: "batch", 1: "vocabulary"},
    _KEYS: {0: "groups", 1: "width", 2: "vocabulary"},
    _VALUES: {0: "groups", 1: "vocabulary", 2: "width"},
    _TEMPERATURES: {0: "groups"},
    _ALPHA: {0: "batch"},
}
#: The largest widths and numbers of groups that an engine is built for.
_MOST_GROUPS, _MOST_WIDTH = 16, 1024


def export_head(
    layers: Sequence[Folded],
    base: Path,
    repository: str | Path,
    name: str,
    *,
    identity: BaseIdentity,
    provenance: Provenance,
    measures: Sequence[Measure] = (),
    version: int = 1,
    replace: bool = False,
) -> Exported:
    """Write the bundle ``repository/<name>-<version>`` of a head.

    Args:
        layers: of :func:`export.papers.backward.bundle.fold`.
        base: bundle of the language model that the head was trained on.
        identity: of that model.

    Raises:
        UsageError: the base generates no text, or was made from another model.
        GoldenError: ONNX Runtime's logits differ from torch's.
    """
    vocabulary = layers[0].keys.shape[2]
    manifest = _base_manifest(base, identity, vocabulary)
    model = manifest.files[manifest.tiers[0].artifacts[0].file]
    data = to_onnx(FoldedHead(), dict(zip(_INPUTS, map(torch.from_numpy, _example()), strict=True)), [_MOVED], _INPUTS)
    part = golden_of(FoldedHead(), dict(zip(_INPUTS, _example(), strict=True)), [_MOVED])
    difference = largest_difference(data, part, worst_tolerance(part, "fp32"), _FILE)
    most = manifest.max_batch_size
    tensors = (TensorSpec(_LOGITS, "FP32", (-1, vocabulary)), TensorSpec(_ALPHA, "FP32", (-1, 1)))
    program = HeadProgram(
        base=HeadBase(name=manifest.name, version=manifest.version, sha256=model.sha256),
        tensors=_TENSORS, logits=_LOGITS, alpha=_ALPHA, moved=_MOVED, keys=_KEYS, values=_VALUES,
        temperatures=_TEMPERATURES, layers=len(layers),
    )  # fmt: skip
    artifact = Artifact(
        file=_FILE, runtime="any", precision="fp32", opset=OPSET, role="head", golden=_PART_GOLDEN,
        tolerance=allowed_tolerance(part, "fp32", difference), inputs=_specs(), profile=_profiles(most, vocabulary),
        outputs=(TensorSpec(_MOVED, "FP32", (-1, -1)),),
    )  # fmt: skip
    made = Manifest(
        name=name,
        version=version,
        description=f"Head of backward attention for {manifest.name} {manifest.version}",
        inputs=tensors,
        outputs=(TensorSpec(_MOVED, "FP32", (-1, vocabulary)),),
        max_batch_size=most,
        profile={
            spec.name: Profile(min=(1, spec.shape[1]), opt=(1, spec.shape[1]), max=(most, spec.shape[1]))
            for spec in tensors
        },
        tiers=(Tier(name=FULL, artifacts=(artifact,)),),
        golden=_GOLDEN,
        files={},
        provenance=provenance,
        program=program,
        measures=tuple(measures),
    )
    files = {
        _FILE: data,
        _TENSORS: encode_npz(_arrays(layers)),
        _GOLDEN: _golden(program, data, layers, vocabulary).encode(),
        _PART_GOLDEN: part.encode(),
    }
    path = Path(repository) / f"{name}-{version}"
    written = write_bundle(path, with_latencies(made, files), files, replace=replace)
    return Exported.of(written, {_FILE: difference})


def _base_manifest(base: Path, identity: BaseIdentity, vocabulary: int) -> Manifest:
    """Return the manifest of a base that a head fits to."""
    manifest = Bundle.open(base, models=False).manifest
    if not isinstance(manifest.program, GenerateProgram):
        given, fix = Raw("no such model"), "Export it with 'fewheads language export'."
        raise UsageError(f"base {base}", given=given, expected="a bundle that generates text", fix=fix)
    outputs = manifest.tensors(manifest.tiers[0].artifacts[0]).outputs
    logits = next(spec for spec in outputs if spec.name == manifest.program.logits)
    if not is_origin(manifest.provenance.trainer, identity) or logits.shape[1] != vocabulary:
        given, fix = Raw(manifest.provenance.trainer), "Give a bundle of the head's own model."
        expected = f"a bundle of {origin_of(identity)} and {vocabulary} tokens"
        raise UsageError(f"base {base}", given=given, expected=expected, fix=fix)
    return manifest


def _example() -> list[Array]:
    """Return random inputs of a layer of two groups."""
    random = np.random.default_rng(0)
    rows, groups, width, vocabulary = 3, 2, 5, 64
    shapes = ((rows, vocabulary), (groups, width, vocabulary), (groups, vocabulary, width), (groups,), (rows, 1))
    logits, keys, values, temperatures, alpha = (random.standard_normal(shape).astype(np.float32) for shape in shapes)
    return [3 * logits, keys, values, np.exp(temperatures), alpha]


def _specs() -> tuple[TensorSpec, ...]:
    shapes = {_LOGITS: (-1, -1), _KEYS: (-1, -1, -1), _VALUES: (-1, -1, -1), _TEMPERATURES: (-1,), _ALPHA: (-1, 1)}
    return tuple(TensorSpec(name, "FP32", shape) for name, shape in shapes.items())


def _profiles(rows: int, vocabulary: int) -> dict[str, Profile]:
    groups, width = (1, 1, _MOST_GROUPS), (1, 32, _MOST_WIDTH)
    tokens, rows_of = (1, vocabulary, vocabulary), (1, 1, rows)
    axes = {
        _LOGITS: (rows_of, tokens),
        _KEYS: (groups, width, tokens),
        _VALUES: (groups, tokens, width),
        _TEMPERATURES: (groups,),
        _ALPHA: (rows_of, (1, 1, 1)),
    }
    return {name: Profile(*zip(*of, strict=True)) for name, of in axes.items()}


def _arrays(layers: Sequence[Folded]) -> dict[str, Array]:
    return {
        f"{number}/{field}": array for number, layer in enumerate(layers) for field, array in layer._asdict().items()
    }


def _golden(program: HeadProgram, data: bytes, layers: Sequence[Folded], vocabulary: int) -> Golden:
    """Return random logits with several alphas, and what the head makes of them."""
    logits = 3 * np.random.default_rng(0).standard_normal((3, vocabulary)).astype(np.float32)
    inputs = {_LOGITS: logits, _ALPHA: np.array([[0.0], [1.0], [0.5]], np.float32)}
    runner = OnnxRuntimeRunner(data, subject=_FILE)
    head = Head(program, {FULL: runner}, [HeadLayer(*layer) for layer in layers])
    try:
        return Golden(inputs, dict(head.compute(inputs, Options(FULL)).outputs))
    finally:
        head.close()
        runner.close()
