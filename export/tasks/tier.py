"""The files of a tier of a bundle and of its twin in INT8, with the golden set of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
from torch import nn

from edge.bundles.golden import Golden
from edge.bundles.manifest import Artifact, Tier
from edge.datatypes import Array
from export.bundle.exported import int8_tier
from export.bundle.tier_files import ExportedArtifact, export_tier, files_of
from export.models.convert import golden_of
from export.quantize.ranges import Feeds, InputRange


class TierFiles(NamedTuple):
    """A tier and its twin in INT8.

    Attributes:
        exported: the ONNX files for the chosen runtimes.
        files: these and the golden sets, by name.
        tiers: the tier, and ``NAME-int8``.
        golden: the model's own outputs.
        differences: largest absolute one of each file's outputs to these.
    """

    exported: list[ExportedArtifact]
    files: dict[str, bytes]
    tiers: list[Tier]
    golden: Golden
    differences: dict[str, float]


def tier_files(
    model: nn.Module,
    inputs: Mapping[str, Array],
    calibration: Sequence[Feeds],
    outputs: Sequence[str],
    *,
    raw: dict[str, Array],
    name: str,
    artifacts: Sequence[str],
    trained: Mapping[str, InputRange] | None = None,
) -> TierFiles:
    """Export a model as the files of a tier.

    Args:
        inputs, outputs: of the golden set, see :func:`export.models.convert.golden_of`.
        calibration, trained: see :func:`export.bundle.tier_files.export_tier`.
        raw: the golden rows as clients send them.
        artifacts: of :data:`export.bundle.exported.RUNTIMES`.

    Raises:
        GoldenError: the outputs of a file differ from torch's.
    """
    golden, golden_file = golden_of(model, inputs, outputs), f"{name}.golden.npz"
    exported = export_tier(model, golden, calibration, name=name, runtimes=artifacts, trained=trained)
    return TierFiles(
        exported,
        {golden_file: msgspec.structs.replace(golden, raw=raw).encode(), **files_of(exported)},
        _tiers(name, exported, golden_file),
        golden,
        {one.artifact.file: one.largest_difference for one in exported},
    )


def _tiers(name: str, exported: Sequence[ExportedArtifact], golden: str) -> list[Tier]:
    """Return the tier and its INT8 twin: a runtime reads one file of a tier, so precision is a choice of tier."""
    by_precision: dict[bool, list[Artifact]] = {False: [], True: []}
    for one in exported:
        by_precision[one.artifact.precision == "int8"].append(one.artifact)
    return [
        Tier(name=name, artifacts=tuple(by_precision[False]), golden=golden),
        Tier(name=int8_tier(name), artifacts=tuple(by_precision[True]), golden=golden),
    ]
