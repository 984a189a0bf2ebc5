"""The one way from a model to a bundle, whatever its kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, TypeAlias

from msgspec.structs import replace as replaced

from edge.bundles.bundle import Bundle, write_bundle
from edge.bundles.golden import Golden
from edge.bundles.manifest import Manifest
from edge.errors import BundleError
from export.bundle.exported import Exported

#: Called with the file whose accuracy is measured, the rows that are done, and all rows.
OnRows: TypeAlias = Callable[[str, int, int], None]


class Contents(NamedTuple):
    """A bundle before its version and latencies are known.

    Attributes:
        manifest: all but the version, latencies, and sizes and hashes of files.
        files: those that the manifest names; golden sets are encoded as they are written.
        differences: the largest absolute difference of each ONNX file's outputs to torch's.
        loops: mean of a request to each tier of a looped model.
        predicted: whether latencies are predicted: ``countable`` leaves them out if the work of a graph cannot be
            counted from its nodes.
    """

    manifest: Manifest
    files: Mapping[str, bytes | Golden]
    differences: Mapping[str, float] = {}
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
    bundle = write_contents(contents, path, version=version, replace=replace, measure=on_rows is not None)
    return Exported.of(bundle, contents.differences)


def write_contents(
    contents: Contents, path: Path, *, version: int = 1, replace: bool = False, measure: bool = False
) -> Bundle:
    """Write a bundle and return it; ``measure`` is of :func:`export.bundle.latencies.with_latencies`."""
    from export.bundle.latencies import with_latencies  # it imports onnx, which no help needs

    files = {name: data if isinstance(data, bytes) else data.encode() for name, data in contents.files.items()}
    manifest = replaced(contents.manifest, version=version)
    if contents.predicted != "never":
        try:
            manifest = with_latencies(manifest, files, measure=measure, loops=contents.loops)
        except BundleError:
            if contents.predicted == "always":
                raise
    return write_bundle(path, manifest, files, replace=replace)
