"""A directory of shapes: a bundle for each shape of the reduction grid, written with torch and timed without it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from edge.bundles.bundle import Bundle
from edge.errors import Literally, UsageError
from edge.profiling.table import Shape
from edge.runtimes.runtime import Runtime

SHAPES_NAME = "shapes.json"
FLOOR, REST = "floor", "rest"
_FIX = "Write the directory again with 'fewheads shapes'."


class ShapeSet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The ``shapes.json`` of the directory.

    Beside it stands a bundle for each shape, under :attr:`edge.profiling.table.Shape.name`; ``floor``, which only
    copies a layer's input; and ``rest``, embeddings and task head of the model.

    Attributes:
        model: what the times depend on in the model: its architecture, width, dense layer and embeddings.
        dense: the layer of the original model.
        shapes: all that are timed, the dense one included.
        lengths: tokens of the inputs; runtimes tune for the range that they span.
        format_version: of the file.
    """

    model: dict[str, str]
    dense: Shape
    shapes: tuple[Shape, ...]
    lengths: tuple[int, ...]
    format_version: Literal[1] = 1

    @classmethod
    def read(cls, directory: Path) -> ShapeSet:
        """Read the file of a directory.

        Raises:
            UsageError: there is none, or it is malformed.
        """
        expected = f"a directory with {SHAPES_NAME}"
        try:
            return msgspec.json.decode((directory / SHAPES_NAME).read_bytes(), type=cls)
        except OSError as error:
            given = Literally(f"{SHAPES_NAME}: {error.strerror}")
            raise UsageError(f"shapes {directory}", given=given, expected=expected, fix=_FIX) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            given = Literally(error)
            raise UsageError(f"shapes {directory}", given=given, expected=expected, fix=_FIX) from None

    def check_lengths(self, lengths: tuple[int, ...]) -> tuple[int, ...]:
        """Return the lengths to time, which are all of the directory's if none are given.

        Raises:
            UsageError: a length is outside of what the bundles were written for.
        """
        for tokens in lengths:
            if not min(self.lengths) <= tokens <= max(self.lengths):
                raise UsageError(
                    "--lengths",
                    given=tokens,
                    expected=f"{min(self.lengths)} to {max(self.lengths)}, the range of the bundles",
                    fix="Give a length in this range, or write the shapes again with 'fewheads shapes --lengths'.",
                )
        return tuple(dict.fromkeys(lengths)) or self.lengths


def open_bundle(directory: Path, name: str) -> Bundle:
    """Open the bundle of a shape, ``floor`` or ``rest``.

    Raises:
        BundleError: it is missing or broken.
    """
    return Bundle.open(directory / name)


def tier_of(bundle: Bundle, runtime: Runtime, precision: str | None) -> tuple[str, str]:
    """Return the tier that a precision has in a bundle of a shape, and the precision.

    Args:
        bundle: of a shape.
        runtime: the runtime that computes it.
        precision: such as ``fp16``; None is that of the first tier.

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
