"""Valid manifests of every kind and of both format versions, for Hypothesis."""

from __future__ import annotations

import json
from math import isfinite

import msgspec
from hypothesis import strategies as st

from edge.bundles.manifest import (
    Artifact,
    CascadeProgram,
    ExpressionPreprocess,
    FileRecord,
    Manifest,
    Measure,
    Profile,
    Provenance,
    Tier,
    TokenizerPreprocess,
    Tolerance,
)
from edge.bundles.manifest_file import encode
from edge.datatypes import NUMPY_TYPES, TensorSpec

_LARGEST = 2**31 - 1
FURTHER_ROLES = ("embed", "step", "backbone", "head")

texts = st.text(max_size=20)
model_names = st.from_regex(r"[a-z0-9][a-z0-9._-]{0,20}", fullmatch=True)
file_names = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,20}", fullmatch=True).filter(
    lambda name: name != "manifest.json"
)
tensor_names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.:/-]{0,20}", fullmatch=True).filter(lambda name: "//" not in name)
non_negative = st.floats(0, 1e30)
positive = st.integers(1, _LARGEST)
records = st.builds(FileRecord, size_bytes=st.integers(1, 2**40), sha256=st.from_regex(r"[0-9a-f]{64}", fullmatch=True))
measures = st.builds(
    Measure,
    metric=texts,
    split=texts,
    value=st.floats(allow_nan=False, allow_infinity=False),
    n=positive,
    seeds=positive,
    interval=st.none() | st.tuples(non_negative, non_negative),
)
provenances = st.builds(
    Provenance,
    created=texts,
    trainer=texts,
    data=texts,
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    git_commit=st.none() | texts,
    versions=st.dictionaries(texts, texts, max_size=3),
)


def as_version_1(manifest: Manifest) -> bytes:
    """Return what version 1 wrote of a manifest without further roles."""
    fields = json.loads(encode(manifest))
    if "program" in fields:
        fields["router"] = fields.pop("program")
    return json.dumps({**fields, "format_version": 1}).encode()


@st.composite
def valid_manifests(draw: st.DrawFn, *, roles: bool = True) -> Manifest:
    """Return manifests that pass every rule; with ``roles``, tiers may hold more than a model."""
    batch = draw(st.integers(0, 4096))
    names = draw(st.lists(tensor_names, min_size=3, max_size=6, unique=True))
    inputs, outputs = (
        tuple(draw(_specs(name, batch)) for name in part)
        for part in (names[1 : len(names) // 2 + 1], names[len(names) // 2 + 1 :])
    )
    tier_names = draw(st.lists(model_names.filter(lambda name: name != "auto"), min_size=1, max_size=3, unique=True))
    further = [
        draw(st.lists(st.sampled_from(FURTHER_ROLES), max_size=2, unique=True)) if roles else [] for _ in tier_names
    ]
    needed = 1 + sum(1 + len(own) for own in further)
    files = draw(st.lists(file_names, min_size=needed, max_size=needed + 2, unique=True))
    unused = iter(files[1:])
    tiers = tuple(
        Tier(
            name=name,
            artifacts=(draw(_artifacts(next(unused))), *(draw(_with_role(next(unused), role, batch)) for role in own)),
        )
        for name, own in zip(tier_names, further, strict=True)
    )
    program = None
    if batch and len(tiers) > 1 and draw(st.booleans()):
        logits = TensorSpec(outputs[0].name, "FP32", (-1, draw(st.integers(2, 64) | st.just(-1))))
        outputs = (logits, *outputs[1:])
        margin, default = draw(st.floats(0, 1)), draw(st.booleans())
        lean, full = tier_names[1], tier_names[0]
        program = CascadeProgram(lean=lean, full=full, logits=logits.name, margin=margin, default=default)
    return Manifest(
        name=draw(model_names),
        version=draw(positive),
        description=draw(texts),
        inputs=inputs,
        outputs=outputs,
        max_batch_size=batch,
        profile={spec.name: draw(_profiles(spec, batch)) for spec in inputs if -1 in spec.shape},
        tiers=tiers,
        golden=files[0],
        files={name: draw(records) for name in files},
        provenance=draw(provenances),
        preprocess=draw(st.none() | _preprocess(names[0], inputs[0].name)),
        program=program,
        measures=tuple(draw(st.lists(measures, max_size=2))),
    )


@st.composite
def _specs(draw: st.DrawFn, name: str, batch: int) -> TensorSpec:
    shape = draw(st.lists(st.integers(-1, 64), min_size=1, max_size=4).filter(lambda sizes: 0 not in sizes))
    return TensorSpec(name, draw(st.sampled_from(sorted(NUMPY_TYPES))), tuple([-1, *shape[1:]] if batch else shape))


@st.composite
def _profiles(draw: st.DrawFn, spec: TensorSpec, batch: int) -> Profile:
    ranges = [
        sorted(draw(st.tuples(positive, positive, positive))) if size == -1 else [size] * 3 for size in spec.shape
    ]
    if batch:
        ranges[0] = [*sorted(draw(st.tuples(st.integers(1, batch), st.integers(1, batch)))), batch]
    low, middle, high = zip(*ranges, strict=True)
    return Profile(min=low, opt=middle, max=high)


def _artifacts(file: str) -> st.SearchStrategy[Artifact]:
    return st.builds(
        Artifact,
        file=st.just(file),
        runtime=st.sampled_from(["any", "onnxruntime", "tensorrt"]),
        precision=st.sampled_from(["fp32", "fp16", "int8"]),
        opset=st.integers(13, 20),
        tolerance=st.builds(Tolerance, atol=non_negative, rtol=non_negative),
    )


@st.composite
def _with_role(draw: st.DrawFn, file: str, role: str, batch: int) -> Artifact:
    """Return an artifact with the manifest's tensors, or with inputs of its own, or with both of its own."""
    artifact = msgspec.structs.replace(draw(_artifacts(file)), role=role)
    own = draw(st.integers(0, 2))
    # No manifest has a name with two slashes, so an own input never meets an output of the manifest.
    inputs = (draw(_specs("own//input", batch)),) if own else None
    return msgspec.structs.replace(
        artifact,
        inputs=inputs,
        outputs=(draw(_specs("own//output", batch)),) if own == 2 else None,
        profile={spec.name: draw(_profiles(spec, batch)) for spec in inputs or () if -1 in spec.shape},
    )


def _preprocess(name: str, output: str) -> st.SearchStrategy[ExpressionPreprocess]:
    limits = st.floats(0, exclude_min=True).filter(isfinite)
    return st.builds(ExpressionPreprocess, input=st.just(name), output=st.just(output), max_abs_operand=limits)


def with_files(manifest: Manifest) -> Manifest:
    """Return a manifest with a record of every file that it names, so that its other rules can be checked."""
    names = [artifact.file for tier in manifest.tiers for artifact in tier.artifacts]
    names += [manifest.golden, *(tier.golden for tier in manifest.tiers if tier.golden)]
    names += [manifest.preprocess.file] if isinstance(manifest.preprocess, TokenizerPreprocess) else []
    return msgspec.structs.replace(manifest, files=dict.fromkeys(names, FileRecord(size_bytes=1, sha256="0" * 64)))
