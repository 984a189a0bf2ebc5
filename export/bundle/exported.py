"""Results of an export, and how they are printed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from edge.bundles.manifest import Latency, Measure
from edge.cli.info import print_latencies, print_measures
from edge.cli.output import print_json, print_table, remark

if TYPE_CHECKING:
    from edge.bundles.bundle import Bundle

#: Runtimes for which a tier of fine-tuned runs has files.
RUNTIMES = ("onnxruntime", "tensorrt")
#: Name of the tier with the full model.
FULL = "x1"


def int8_tier(name: str) -> str:
    """Return the name of the tier in INT8 beside a tier."""
    return f"{name}-int8"


class ExportedFile(msgspec.Struct, frozen=True):
    """An ONNX file, its bytes, and the largest absolute difference of its outputs to torch's."""

    file: str
    size_bytes: int
    largest_difference: float


class Exported(msgspec.Struct, frozen=True):
    """A bundle's directory, its ONNX files, the latencies of its tiers by their names, and its measures.

    Attributes:
        without_space: the tiers that state no space of their embeddings, where others do.
    """

    bundle: str
    files: tuple[ExportedFile, ...]
    latencies: dict[str, tuple[Latency, ...]]
    without_space: tuple[str, ...] = ()
    measures: tuple[Measure, ...] = ()

    @classmethod
    def of(cls, bundle: Bundle, differences: Mapping[str, float]) -> Exported:
        """Return the result of an export from the bundle that it has written, and the difference of each ONNX file."""
        records = bundle.manifest.files
        files = (ExportedFile(name, records[name].size_bytes, value) for name, value in differences.items())
        tiers = bundle.manifest.tiers
        unknown = tuple(tier.name for tier in tiers if not tier.space) if any(tier.space for tier in tiers) else ()
        latencies = {tier.name: tier.latencies for tier in tiers}
        return cls(str(bundle.path), tuple(files), latencies, unknown, bundle.manifest.measures)


def print_exported(results: Sequence[tuple[Exported, float]], *, as_json: bool) -> None:
    """Print bundles, each with the seconds that it took and a row for each file, its latencies and measures."""
    for exported, _ in results:
        if exported.without_space:
            remark(
                f"{exported.bundle}: nothing says that the embeddings of {', '.join(exported.without_space)} can be "
                "compared with those of the other tiers, because an earlier version made their runs. Reduce or "
                "distil them again."
            )
    if as_json:
        print_json([{**msgspec.to_builtins(exported), "seconds": seconds} for exported, seconds in results])
        return
    rows = [
        (*((exported.bundle, seconds) if place == 0 else ("", None)), *msgspec.structs.astuple(one))
        for exported, seconds in results
        for place, one in enumerate(exported.files)
    ]
    print_table("Exported", ("bundle", "seconds", "file", "bytes", "largest difference to torch"), rows)
    for exported, _ in results:
        print_latencies(exported.bundle, exported.latencies)
        print_measures(exported.bundle, exported.measures)
