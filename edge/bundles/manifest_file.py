"""``manifest.json``: from bytes of any version that this release reads to a checked manifest, and back."""

from __future__ import annotations

from pathlib import Path

import msgspec

from edge import __version__
from edge.bundles import manifest_v1
from edge.bundles.fields import EXPORT_AGAIN
from edge.bundles.manifest import FORMAT_VERSION, MANIFEST_NAME, Manifest
from edge.bundles.rules import check
from edge.errors import BundleError, Literally
from edge.files import read_regular

_MAX_BYTES = 256 * 1024
_SCHEMAS: dict[int, type[manifest_v1.Manifest | Manifest]] = {1: manifest_v1.Manifest, FORMAT_VERSION: Manifest}
_READABLE = " or ".join(map(str, _SCHEMAS))


def read(directory: Path, subject: str) -> Manifest:
    """Return the manifest of a bundle.

    Args:
        directory: of the bundle.
        subject: what errors call the manifest.

    Raises:
        BundleError: there is none, or as :func:`decode`.
    """
    return decode(read_regular(directory / MANIFEST_NAME, _MAX_BYTES), subject)


def decode(data: bytes, subject: str) -> Manifest:
    """Return the manifest in ``data`` after checking every rule; an older version is upgraded in memory.

    Args:
        data: the bytes of ``manifest.json``.
        subject: what errors call it, usually its path.

    Raises:
        BundleError: it is not JSON, has a version that this release does not read, or breaks a rule; the message names
            the field.
    """
    expected = f"JSON with a format_version of {_READABLE}"
    try:
        found = msgspec.json.decode(data, type=_Head).format_version
        # Before the strict decode: a newer manifest is to be reported as newer, not as one with an unknown field.
        if found not in _SCHEMAS:
            raise _unreadable(subject, found)
        expected = f"the manifest schema of version {found}"
        decoded = msgspec.json.decode(data, type=_SCHEMAS[found])
        if isinstance(decoded, Manifest):
            msgspec.json.decode(data, type=_Typed)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:  # ValidationError is a DecodeError
        raise BundleError(subject, given=Literally(error), expected=expected, fix=EXPORT_AGAIN) from None
    manifest = decoded if isinstance(decoded, Manifest) else manifest_v1.upgrade(decoded)
    check(manifest, subject)
    return manifest


def encode(manifest: Manifest) -> bytes:
    """Return the manifest as indented JSON of version 2, ending in a newline.

    Equal manifests give equal bytes, and so does a bundle of version 1 in every release: caches hash them.
    """
    return msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"


def _unreadable(subject: str, found: int) -> BundleError:
    return BundleError(
        f"{subject} field format_version",
        given=found,
        expected=f"{_READABLE}, the versions that fewheads {__version__} reads",
        fix="Upgrade fewheads on this machine (pip install -U fewheads), or export the bundle again with this release."
        if found > FORMAT_VERSION
        else "No release writes this version. Export the bundle again.",
    )


class _Head(msgspec.Struct):
    format_version: int


class _Tagged(msgspec.Struct):
    type: str


class _Typed(msgspec.Struct):
    """Demands the ``type`` of a program, which msgspec leaves optional while the union has a single member."""

    program: _Tagged | None = None
