"""``manifest.json`` as bytes: decodes and checks every version that this release reads, and encodes version 2."""

from __future__ import annotations

from pathlib import Path

import msgspec

from edge import __version__
from edge.bundles.fields import EXPORT_AGAIN
from edge.bundles.manifest import FORMAT_VERSION, MANIFEST_NAME, Manifest, ManifestV1
from edge.bundles.rules import check
from edge.errors import BundleError, Raw
from edge.files import read_regular

_MAX_BYTES = 256 * 1024
_UPGRADE = "Upgrade fewheads on this machine (pip install -U fewheads), or export the bundle again with this release."
_SCHEMAS: dict[int, type[ManifestV1 | Manifest]] = {1: ManifestV1, FORMAT_VERSION: Manifest}
_READABLE = " or ".join(map(str, _SCHEMAS))


class _Head(msgspec.Struct):
    format_version: int


class _Tagged(msgspec.Struct):
    type: str


class _Typed(msgspec.Struct):
    """Requires the ``type`` of a program, which msgspec leaves optional while the union has a single member."""

    program: _Tagged | None = None


def read(directory: Path, subject: str) -> Manifest:
    """Return the manifest of a bundle; ``subject`` is its name in errors. Raise as :func:`decode`."""
    return decode(read_regular(directory / MANIFEST_NAME, _MAX_BYTES), subject)


def decode(data: bytes, subject: str) -> Manifest:
    """Return the manifest in ``data`` after checking every rule; an older version is upgraded in memory.

    Raise a BundleError with the field's name if it breaks one, is not JSON or of another version.
    """
    expected = f"JSON with a format_version of {_READABLE}"
    try:
        found = msgspec.json.decode(data, type=_Head).format_version
        # Before the strict decode: a newer manifest must be reported as newer, not as one with an unknown field.
        if found not in _SCHEMAS:
            raise BundleError(
                f"{subject} field format_version",
                given=found,
                expected=f"{_READABLE}, the versions that fewheads {__version__} reads",
                fix=_UPGRADE if found > FORMAT_VERSION else "No release writes this version. Export the bundle again.",
            )
        expected = f"the manifest schema of version {found}"
        decoded = msgspec.json.decode(data, type=_SCHEMAS[found])
        if isinstance(decoded, Manifest):
            msgspec.json.decode(data, type=_Typed)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:  # ValidationError is a DecodeError
        raise BundleError(subject, given=Raw(error), expected=expected, fix=EXPORT_AGAIN) from None
    manifest = decoded.upgraded() if isinstance(decoded, ManifestV1) else decoded
    check(manifest, subject)
    return manifest


def encode(manifest: Manifest) -> bytes:
    """Return the manifest as indented JSON of version 2, ending in a newline.

    Equal manifests give equal bytes, and a bundle of version 1 gives the same bytes in every release: caches hash them.
    """
    return msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"
