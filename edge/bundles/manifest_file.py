"""``manifest.json`` as bytes: decodes and checks every version that this release reads, and encodes version 2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from edge import __version__
from edge.bundles.fields import EXPORT_AGAIN
from edge.bundles.manifest import FORMAT_VERSION, MANIFEST_NAME, Manifest
from edge.bundles.rules import check
from edge.errors import BundleError, Raw
from edge.files import read_regular

_MAX_BYTES = 1024 * 1024
_UPGRADE = "Upgrade fewheads on this machine (pip install -U fewheads), or export the bundle again with this release."
_VERSIONS = (1, FORMAT_VERSION)
_READABLE = " or ".join(map(str, _VERSIONS))


class _Head(msgspec.Struct):
    format_version: int


def read(directory: Path, subject: str) -> Manifest:
    """Return the manifest of a bundle; ``subject`` is its name in errors. Raise as :func:`decode`."""
    return decode(read_regular(directory / MANIFEST_NAME, _MAX_BYTES), subject)


def decode(data: bytes, subject: str) -> Manifest:
    """Return the manifest in ``data`` after checking every rule; an older version is upgraded in memory.

    Raise a BundleError with the field's name if it breaks one, is not JSON or of another version.
    """
    expected = f"JSON with a format_version of {_READABLE}"
    try:
        version = msgspec.json.decode(data, type=_Head).format_version
        # Before the strict decode: a newer manifest must be reported as newer, not as one with an unknown field.
        if version not in _VERSIONS:
            expected = f"{_READABLE}, the versions that fewheads {__version__} reads"
            fix = _UPGRADE if version > FORMAT_VERSION else "No release writes this version. Export the bundle again."
            raise BundleError(f"{subject} field format_version", given=version, expected=expected, fix=fix)
        expected = f"the manifest schema of version {version}"
        manifest = _upgraded(data) if version == 1 else msgspec.json.decode(data, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:  # ValidationError is a DecodeError
        raise BundleError(subject, given=Raw(error), expected=expected, fix=EXPORT_AGAIN) from None
    check(manifest, subject)
    return manifest


def _upgraded(data: bytes) -> Manifest:
    """Return a manifest of version 1, which calls its program, a cascade, ``router``."""
    fields = msgspec.json.decode(data, type=dict[str, Any]) | {"format_version": FORMAT_VERSION}
    if "router" in fields:
        router = fields.pop("router")
        fields["program"] = {"type": "cascade", **router} if isinstance(router, dict) else router
    return msgspec.convert(fields, Manifest)


def encode(manifest: Manifest) -> bytes:
    """Return the manifest as indented JSON of version 2, ending in a newline.

    Equal manifests give equal bytes, and a bundle of version 1 gives the same bytes in every release: caches hash them.
    """
    return msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"
