"""``manifest.json``: from bytes to a manifest that has passed every rule, and back."""

from __future__ import annotations

from pathlib import Path

import msgspec

from edge.bundles.manifest import FORMAT_VERSION, MANIFEST_NAME, Manifest
from edge.bundles.rules import EXPORT_AGAIN, check
from edge.errors import BundleError, Literally
from edge.files import read_regular

_MAX_BYTES = 256 * 1024


def read(directory: Path, subject: str) -> Manifest:
    """Return the manifest of a bundle.

    Args:
        directory: of the bundle.
        subject: how errors call what it says.

    Raises:
        BundleError: there is none, or as :func:`decode`.
    """
    return decode(read_regular(directory / MANIFEST_NAME, _MAX_BYTES), subject)


def decode(data: bytes, subject: str) -> Manifest:
    """Return the manifest in ``data``, which has passed every rule.

    Args:
        data: the bytes of ``manifest.json``.
        subject: how errors call it, usually its path.

    Raises:
        BundleError: it is not JSON, of another format version, or breaks a rule; the message names the field.
    """
    try:
        found = msgspec.json.decode(data, type=_VersionOnly).format_version
        # Before the strict decode: a future version must be called that, not "unknown field".
        if found != FORMAT_VERSION:
            raise BundleError(
                f"{subject} field format_version",
                given=found,
                expected=str(FORMAT_VERSION),
                fix="Export the bundle again with this release, or install the release that wrote it.",
            )
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:  # ValidationError is a DecodeError
        raise BundleError(
            subject, given=Literally(error), expected="the manifest schema of version 1", fix=EXPORT_AGAIN
        ) from None
    check(manifest, subject)
    return manifest


def encode(manifest: Manifest) -> bytes:
    """Return the manifest as JSON that people can read, ending in a newline."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"


class _VersionOnly(msgspec.Struct):
    format_version: int
