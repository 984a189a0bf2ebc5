"""Directory of layer shapes: a bundle for each shape of the reduction grid, which can be timed without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from edge.bench.layer_latencies import Shape, read_json
from edge.bundles.bundle import Bundle
from edge.errors import UsageError
from edge.runtimes.runtime import Runtime

SHAPES_NAME = "shapes.json"
FLOOR, REST = "floor", "rest"


class ShapeSet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The ``shapes.json`` of the directory.

    The directory has a bundle for each shape, under :attr:`edge.bench.layer_latencies.Shape.name`; ``floor``, which only
    copies a layer's input; and ``rest``, embeddings and task head of the model.
    """

    model: dict[str, str]  # what determines the times: architecture, width, dense layer and embeddings
    dense: Shape
    shapes: tuple[Shape, ...]  # with the dense one
    lengths: tuple[int, ...]  # tokens of the inputs; runtimes tune for their range
    format_version: Literal[1] = 1

    @classmethod
    def read(cls, directory: Path) -> ShapeSet:
        """Read the file of a directory; raise a UsageError if it is missing or malformed."""
        path, fix = directory / SHAPES_NAME, "Write the directory again with 'fewheads shapes'."
        subject, expected, prefix = f"shapes {directory}", f"a directory with {SHAPES_NAME}", f"{SHAPES_NAME}: "
        return read_json(path, cls, subject=subject, expected=expected, fix=fix, prefix=prefix)

    def check_lengths(self, lengths: tuple[int, ...]) -> tuple[int, ...]:
        """Return the given lengths, or all of the directory's if none are given.

        Raises:
            UsageError: a length is outside the range of the bundles.
        """
        least, most = min(self.lengths), max(self.lengths)
        for tokens in lengths:
            if not least <= tokens <= most:
                expected = f"{least} to {most}, the range of the bundles"
                fix = "Give a length in this range, or write the shapes again with 'fewheads shapes --lengths'."
                raise UsageError("--lengths", given=tokens, expected=expected, fix=fix)
        return tuple(dict.fromkeys(lengths)) or self.lengths


def tier_of(bundle: Bundle, runtime: Runtime, precision: str | None) -> tuple[str, str]:
    """Return the tier of a shape's bundle that has a precision, and the precision; None takes the first tier's.

    Raises:
        BundleError: the bundle has no file for this runtime.
        UsageError: the bundle has no file of this precision for this runtime.
    """
    found: dict[str, str] = {}
    for tier in bundle.manifest.tiers:
        found.setdefault(bundle.artifact(runtime.artifact_runtime, tier.name).precision, tier.name)
    chosen = precision or next(iter(found))
    if chosen not in found:
        subject, expected = f"--precision for {runtime.name}", f"one of {', '.join(found)}"
        raise UsageError(subject, given=chosen, expected=expected, fix="Give one of these, or another --target.")
    return found[chosen], chosen
