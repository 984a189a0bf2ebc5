"""Version 1 of ``manifest.json``: its own strict schema, and the upgrade to the types of version 2 in memory.

The schema never changes; ``tests/data/version_1/manifest.schema.json`` pins it. Version 1 has no roles and no tensors
of artifacts, and calls the program ``router``.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from edge.bundles import manifest as current
from edge.bundles.fields import FileName, ModelName, Positive, Struct, Text
from edge.bundles.manifest import (
    ExpressionPreprocess,
    FileRecord,
    LabelPostprocess,
    Measure,
    Profile,
    Provenance,
    ScorePostprocess,
    Serving,
    TokenizerPreprocess,
    Tolerance,
)
from edge.bundles.programs import CascadeProgram
from edge.datatypes import TensorName, TensorSpec


class Artifact(Struct, frozen=True):
    """One ONNX file of a tier."""

    file: FileName
    runtime: Annotated[str, msgspec.Meta(pattern=r"^(any|onnxruntime|tensorrt)$")]
    precision: Annotated[str, msgspec.Meta(pattern=r"^(fp32|fp16|int8)$")]
    opset: Annotated[int, msgspec.Meta(ge=13, le=20)]
    tolerance: Tolerance


class Tier(Struct, frozen=True):
    """One size of the model."""

    name: ModelName
    artifacts: Annotated[tuple[Artifact, ...], msgspec.Meta(min_length=1, max_length=8)]
    golden: FileName | None = None


class Manifest(Struct, frozen=True, tag=1, tag_field="format_version"):
    """``manifest.json`` of version 1."""

    name: ModelName
    version: Positive
    description: Text
    inputs: Annotated[tuple[TensorSpec, ...], msgspec.Meta(min_length=1, max_length=16)]
    outputs: Annotated[tuple[TensorSpec, ...], msgspec.Meta(min_length=1, max_length=16)]
    max_batch_size: Annotated[int, msgspec.Meta(ge=0, le=4096)]
    profile: dict[TensorName, Profile]
    tiers: Annotated[tuple[Tier, ...], msgspec.Meta(min_length=1, max_length=8)]
    golden: FileName
    files: Annotated[dict[FileName, FileRecord], msgspec.Meta(max_length=64)]
    provenance: Provenance
    preprocess: ExpressionPreprocess | TokenizerPreprocess | None = None
    postprocess: LabelPostprocess | ScorePostprocess | None = None
    router: CascadeProgram | None = None
    serving: Serving | None = None
    measures: Annotated[tuple[Measure, ...], msgspec.Meta(max_length=256)] = ()


def upgrade(old: Manifest) -> current.Manifest:
    """Return the same manifest in version 2: every artifact is a ``model``, and the router is the program."""
    fields = msgspec.structs.asdict(old)
    fields["program"] = fields.pop("router")
    fields["tiers"] = tuple(
        current.Tier(
            name=tier.name,
            artifacts=tuple(current.Artifact(**msgspec.structs.asdict(artifact)) for artifact in tier.artifacts),
            golden=tier.golden,
        )
        for tier in old.tiers
    )
    return current.Manifest(**fields)
