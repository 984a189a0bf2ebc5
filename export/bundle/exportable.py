"""The one way from a model to a bundle."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

from msgspec.structs import replace as replaced

from edge.bundles.bundle import write_bundle
from edge.bundles.manifest import Manifest
from export.bundle.exported import Exported
from export.bundle.latencies import with_latencies


class Contents(NamedTuple):
    """A bundle before its latencies are known.

    Attributes:
        manifest: inputs, outputs, tiers and measures of accuracy; its version is replaced.
        files: those that the manifest names, golden sets included.
        differences: the largest absolute difference of each ONNX file's outputs to torch's.
        loops: mean of a request to each tier of a looped model.
    """

    manifest: Manifest
    files: Mapping[str, bytes]
    differences: Mapping[str, float]
    loops: Mapping[str, float] | None = None


class Exportable(Protocol):
    """A model, or several of one task, that can become a bundle."""

    def contents(self) -> Contents:
        """Convert the model, check each file against torch, and measure the accuracy of what is not FP32.

        Raises:
            GoldenError: the outputs of a file differ from torch's by more than its precision may.
        """


def export_bundle(
    contents: Contents, repository: str | Path, *, version: int = 1, replace: bool = False, measure: bool = False
) -> Exported:
    """Write the bundle ``repository/NAME-VERSION``, with the latencies of its tiers.

    Args:
        contents: of an :class:`Exportable`.
        measure: whether the tiers are timed on this machine; see :func:`export.bundle.latencies.with_latencies`.
    """
    manifest = replaced(contents.manifest, version=version)
    manifest = with_latencies(manifest, contents.files, measure=measure, loops=contents.loops)
    path = Path(repository) / f"{manifest.name}-{version}"
    return Exported.of(write_bundle(path, manifest, contents.files, replace=replace), contents.differences)
