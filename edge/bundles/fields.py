"""Constrained types of a manifest's fields, and the error for a field that breaks a rule."""

from __future__ import annotations

from typing import Annotated

import msgspec

from edge.errors import BundleError

EXPORT_AGAIN = "Export the bundle again; do not edit it by hand."

FileName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$")]
ModelName = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]
Text = Annotated[str, msgspec.Meta(max_length=4096)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Shape = Annotated[tuple[Positive, ...], msgspec.Meta(min_length=1, max_length=8)]
NonNegative = Annotated[float, msgspec.Meta(ge=0)]


class Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Base of every part of a manifest: immutable, and an unknown field is an error."""


def broken(subject: str, field: str, given: object, expected: str) -> BundleError:
    """Return the error for a field that breaks a rule.

    Args:
        subject: what errors call the manifest, usually its path.
        field: the field, or what is wrong with it.
        given: the value found.
        expected: the value that the rule demands.
    """
    return BundleError(f"{subject} {field}", given=given, expected=expected, fix=EXPORT_AGAIN)
