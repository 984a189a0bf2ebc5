"""The one way from a model to a bundle, whatever its kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, TypeAlias

from msgspec.structs import replace as replaced

from edge.bundles.bundle import write_bundle
from edge.bundles.golden import Golden
from edge.bundles.manifest import Artifact, Manifest
from edge.errors import BundleError
from export.bundle.exported import Exported
from export.report.card import bundle_card
from export.training.runs import CARD

#: Called with the file whose accuracy is measured, the rows that are done, and all rows.
OnRows: TypeAlias = Callable[[str, int, int], None]


class ExportedArtifact(NamedTuple):
    """One ONNX file.

    Attributes:
        largest_difference: absolute difference of its outputs to torch's over the given inputs.
        golden: a set of its own, under the name in the artifact; None where the tier's is to be reproduced.
    """

    artifact: Artifact
    data: bytes
    largest_difference: float
    golden: Golden | None = None


#: Contents of a file; golden sets are encoded as they are written.
File: TypeAlias = "bytes | Golden | ExportedArtifact"


class Contents(NamedTuple):
    """A bundle before its version and latencies are known.

    Attributes:
        manifest: all but the version, latencies, and sizes and hashes of files.
        files: those that the manifest names.
        loops: mean of a request to each tier of a looped model.
        predicted: whether latencies are predicted: ``countable`` leaves them out if the work of a graph cannot be
            counted from its nodes.
    """

    manifest: Manifest
    files: Mapping[str, File]
    loops: Mapping[str, float] | None = None
    predicted: Literal["always", "countable", "never"] = "always"


class Exportable(Protocol):
    """A model, or several of one task, that can become a bundle."""

    def contents(self, on_rows: OnRows | None) -> Contents:
        """Convert the model, and check each file against torch.

        Args:
            on_rows: called while the accuracy of files is measured; None measures none, so that the manifest has what
                the runs recorded.

        Raises:
            GoldenError: the outputs of a file differ from torch's by more than its precision may.
        """


def export_bundle(
    model: Exportable,
    repository: str | Path,
    *,
    version: int = 1,
    replace: bool = False,
    on_rows: OnRows | None = None,
) -> Exported:
    """Write the bundle ``repository/NAME-VERSION``; only with ``on_rows`` are its tiers timed on this machine."""
    contents = model.contents(on_rows)
    path = Path(repository) / f"{contents.manifest.name}-{version}"
    return write_contents(contents, path, version=version, replace=replace, measure=on_rows is not None)


def write_contents(
    contents: Contents, path: Path, *, version: int = 1, replace: bool = False, measure: bool = False
) -> Exported:
    """Write a bundle; ``measure`` is of :func:`export.bundle.latencies.with_latencies`."""
    from export.bundle.latencies import with_latencies  # it imports onnx, which no help needs

    exported = {name: file for name, file in contents.files.items() if isinstance(file, ExportedArtifact)}
    files = {name: _bytes_of(file) for name, file in contents.files.items()}
    manifest = replaced(contents.manifest, version=version)
    if contents.predicted != "never":
        try:
            manifest = with_latencies(manifest, files, measure=measure, loops=contents.loops)
        except BundleError:
            if contents.predicted == "always":
                raise
    files[CARD] = bundle_card(manifest).encode()
    bundle = write_bundle(path, manifest, files, replace=replace)
    return Exported.of(bundle, {name: file.largest_difference for name, file in exported.items()})


def _bytes_of(file: File) -> bytes:
    if isinstance(file, ExportedArtifact):
        return file.data
    return file.encode() if isinstance(file, Golden) else file
