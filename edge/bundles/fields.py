"""Types of the fields of ``manifest.json`` that several of its parts share, and the check of a rule."""

from __future__ import annotations

from typing import Annotated

import msgspec

from edge.errors import BundleError

EXPORT_AGAIN = "Export the bundle again; do not edit it by hand."

FileName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$")]
ModelName = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]
Sha256 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$")]
#: Of embeddings that can be compared with one another: the start of a SHA-256.
Space = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}$")]
#: Of a text in a manifest, such as a label.
MOST_CHARACTERS = 4096
Text = Annotated[str, msgspec.Meta(max_length=MOST_CHARACTERS)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
NonNegativeInteger = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
#: The most blocks of a decoder.
MOST_BLOCKS = 32
#: The part that an artifact plays in its tier. A ``model`` computes the manifest's outputs from its inputs alone, and
#: ``backbone-1``, ``backbone-2`` and so on are the blocks of a decoder.
Role = Annotated[str, msgspec.Meta(pattern=r"^(model|embed|step|backbone(-[1-9][0-9]?)?|head)$")]


def require(holds: object, subject: str, field: str, given: object, expected: str) -> None:
    """Raise a BundleError for a field of the manifest ``subject`` unless its rule holds."""
    if not holds:
        raise BundleError(f"{subject} {field}", given=given, expected=expected, fix=EXPORT_AGAIN)


class Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Base of every part of a manifest: immutable, and an unknown field is an error."""
