"""``manifest.json`` as bytes: decodes and checks every version that this release reads, and encodes version 2."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from edge import __version__
from edge.bundles import manifest as v2
from edge.bundles.manifest import EXPORT_AGAIN, FORMAT_VERSION, MANIFEST_NAME, Manifest, Struct
from edge.bundles.rules import check
from edge.datatypes import TensorName
from edge.errors import BundleError, Literally
from edge.files import read_regular

_MAX_BYTES = 256 * 1024


class _ArtifactV1(Struct, frozen=True):
    file: v2.FileName
    runtime: v2.RuntimeName
    precision: v2.Precision
    opset: v2.Opset
    tolerance: v2.Tolerance


class _TierV1(Struct, frozen=True):
    name: v2.ModelName
    artifacts: Annotated[tuple[_ArtifactV1, ...], msgspec.Meta(min_length=1, max_length=8)]
    golden: v2.FileName | None = None


class ManifestV1(Struct, frozen=True, tag=1, tag_field="format_version"):
    """``manifest.json`` of version 1: no roles, no tensors of artifacts, and the program is called ``router``.

    This schema never changes; ``tests/data/version_1/manifest.schema.json`` pins it.
    """

    name: v2.ModelName
    version: v2.Positive
    description: v2.Text
    inputs: v2.TensorSpecs
    outputs: v2.TensorSpecs
    max_batch_size: v2.MaxBatchSize
    profile: dict[TensorName, v2.Profile]
    tiers: Annotated[tuple[_TierV1, ...], msgspec.Meta(min_length=1, max_length=8)]
    golden: v2.FileName
    files: v2.Files
    provenance: v2.Provenance
    preprocess: v2.ExpressionPreprocess | v2.TokenizerPreprocess | None = None
    postprocess: v2.LabelPostprocess | v2.ScorePostprocess | None = None
    router: v2.CascadeProgram | None = None
    serving: v2.Serving | None = None
    measures: v2.Measures = ()

    def upgraded(self) -> Manifest:
        """Return the same manifest in version 2: every artifact is a ``model``, and the router is the program."""
        fields = msgspec.to_builtins(self) | {"format_version": FORMAT_VERSION}
        if "router" in fields:
            fields["program"] = fields.pop("router")
        return msgspec.convert(fields, Manifest)


_SCHEMAS: dict[int, type[ManifestV1 | Manifest]] = {1: ManifestV1, FORMAT_VERSION: Manifest}
_READABLE = " or ".join(map(str, _SCHEMAS))


class _Tagged(msgspec.Struct):
    type: str


class _Head(msgspec.Struct):
    format_version: int


class _Typed(msgspec.Struct):
    """Requires the ``type`` of a program, which msgspec leaves optional while the union has a single member."""

    program: _Tagged | None = None


def read(directory: Path, subject: str) -> Manifest:
    """Return the manifest of a bundle; ``subject`` is its name in errors. Raise as :func:`decode`."""
    return decode(read_regular(directory / MANIFEST_NAME, _MAX_BYTES), subject)


def decode(data: bytes, subject: str) -> Manifest:
    """Return the manifest in ``data`` after checking every rule; an older version is upgraded in memory.

    Raises:
        BundleError: ``data`` is not JSON, has a version that this release does not read, or breaks a rule; the message
            names the field.
    """
    expected = f"JSON with a format_version of {_READABLE}"
    try:
        found = msgspec.json.decode(data, type=_Head).format_version
        # Before the strict decode: a newer manifest must be reported as newer, not as one with an unknown field.
        if found not in _SCHEMAS:
            raise _unreadable(subject, found)
        expected = f"the manifest schema of version {found}"
        decoded = msgspec.json.decode(data, type=_SCHEMAS[found])
        if isinstance(decoded, Manifest):
            msgspec.json.decode(data, type=_Typed)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:  # ValidationError is a DecodeError
        raise BundleError(subject, given=Literally(error), expected=expected, fix=EXPORT_AGAIN) from None
    manifest = decoded.upgraded() if isinstance(decoded, ManifestV1) else decoded
    check(manifest, subject)
    return manifest


def encode(manifest: Manifest) -> bytes:
    """Return the manifest as indented JSON of version 2, ending in a newline.

    Equal manifests give equal bytes, and a bundle of version 1 gives the same bytes in every release: caches hash them.
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
