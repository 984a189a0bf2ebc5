"""A bundle: the directory that carries one model from the workstation to the device, and nothing else crosses.

Reading checks everything before anything is used; writing is all or nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from edge.bundles import golden as golden_set
from edge.bundles import manifest_file, rules
from edge.bundles.golden import Golden
from edge.bundles.manifest import MANIFEST_NAME, Artifact, FileRecord, Manifest, Tier
from edge.bundles.programs import Role
from edge.errors import BundleError, Literally
from edge.files import check_size, read_recorded, replaced_directory, sha256, write_durably

_FIX = "Copy the bundle again from where it was exported, or export it again."


class Bundle:
    """A bundle on disk whose files have been checked against its manifest.

    Attributes:
        path: the directory.
        manifest: its checked contents, upgraded to version 2.
        goldens: the golden set of each tier, by its name.
    """

    def __init__(self, path: Path, manifest: Manifest, goldens: dict[str, Golden]) -> None:
        self.path = path
        self.manifest = manifest
        self.goldens = goldens

    @property
    def golden(self) -> Golden:
        """The golden set of the full tier."""
        return self.goldens[self.manifest.tiers[0].name]

    @classmethod
    def open(cls, path: str | Path, *, models: bool = True) -> Bundle:
        """Read and check a bundle: the schema, every size and hash, no stray file, no link, the golden set.

        Args:
            path: the directory.
            models: whether to hash the models already. Otherwise each is when :meth:`read` reads it, and those that
                are not used here never are.

        Raises:
            BundleError: the first rule that is broken. Nothing of the model has been executed by then.
        """
        path = Path(path)
        if not path.is_dir():
            given = "a file" if path.exists() else "nothing there"
            fix = "Give the directory that holds manifest.json."
            raise BundleError(f"bundle {path}", given=Literally(given), expected="a bundle directory", fix=fix)
        if inside := _bundles_in(path):
            fix = f"Give one of its bundles, such as {inside[0]}."
            raise BundleError(f"bundle {path}", given=Literally("a directory of bundles"), expected="a bundle", fix=fix)
        manifest = manifest_file.read(path, f"{path / MANIFEST_NAME}")
        stray = sorted(_names(path) - {MANIFEST_NAME, *manifest.files})
        if stray:
            expected = "only files that the manifest lists"
            raise BundleError(f"bundle {path}", given=stray[0], expected=expected, fix="Remove it, or export again.")
        sets = {tier.name: tier.golden or manifest.golden for tier in manifest.tiers}
        later = set() if models else {artifact.file for tier in manifest.tiers for artifact in tier.artifacts}
        decoded = {}
        for name, record in manifest.files.items():
            if name in later:
                check_size(path / name, record.size_bytes)
                continue
            data = read_recorded(path / name, record.size_bytes, record.sha256)
            if name in (manifest.golden, *sets.values()):
                decoded[name] = golden_set.decode(data, manifest, str(path / name))
        return cls(path, manifest, {tier: decoded[name] for tier, name in sets.items()})

    def artifact(self, runtime: str, tier: str | None = None, role: Role = "model") -> Artifact:
        """Return the ONNX file of a role for a runtime: the one made for it, else the one made for any.

        :meth:`Manifest.tensors` gives the inputs and outputs that the file must have.

        Args:
            runtime: ``onnxruntime`` or ``tensorrt``.
            tier: a tier's name; None is the full one.
            role: the part that the file plays in the tier.

        Raises:
            BundleError: there is no such tier, or it has no file of that role for that runtime.
        """
        chosen = self.tier(tier)
        for wanted in (runtime, "any"):
            for artifact in chosen.artifacts:
                if (artifact.runtime, artifact.role) == (wanted, role):
                    return artifact
        raise BundleError(
            f"bundle {self.path} tier {chosen.name!r}",
            given=[f"{artifact.role} for {artifact.runtime}" for artifact in chosen.artifacts],
            expected=f"{role} for {runtime}",
            fix="Export the bundle with that artifact too.",
        )

    def tier(self, name: str | None = None) -> Tier:
        """Return a tier by name, or the full one.

        Raises:
            BundleError: there is no such tier.
        """
        if name is None:
            return self.manifest.tiers[0]
        for tier in self.manifest.tiers:
            if tier.name == name:
                return tier
        known = ", ".join(tier.name for tier in self.manifest.tiers)
        raise BundleError(
            f"bundle {self.path} tier", given=name, expected=f"one of {known}", fix="Choose one of these."
        )

    def read(self, name: str) -> bytes:
        """Return the bytes of a listed file, hashed again as they are read: what was checked is what is used.

        Raises:
            BundleError: the file has changed since.
        """
        record = self.manifest.files[name]
        return read_recorded(self.path / name, record.size_bytes, record.sha256)


def write_bundle(
    directory: str | Path, manifest: Manifest, files: Mapping[str, bytes], *, replace: bool = False
) -> Bundle:
    """Write a bundle so that it appears whole or not at all.

    Args:
        directory: the bundle's; its parent is made when missing.
        manifest: of the bundle; its ``files`` are ignored and computed here.
        files: name to contents.
        replace: whether a bundle that stands there may be replaced.

    Returns:
        The bundle, read back and checked.

    Raises:
        BundleError: something stands there, the disk refuses, or what was written breaks the format.
    """
    directory = Path(directory)
    if directory.exists() and not replace:
        fix = "Choose another place, or replace it with --replace."
        raise BundleError(f"bundle {directory}", given=Literally("something there"), expected="a free path", fix=fix)
    records = {name: FileRecord(size_bytes=len(data), sha256=sha256(data)) for name, data in files.items()}
    manifest = msgspec.structs.replace(manifest, files=records)
    rules.check(manifest, str(directory / MANIFEST_NAME))
    try:
        with replaced_directory(directory) as new:
            for name, data in {**files, MANIFEST_NAME: manifest_file.encode(manifest)}.items():
                write_durably(new / name, data)
            Bundle.open(new)
    except OSError as error:
        fix = "Free space, or choose another place."
        expected = "a place with room to write it"
        raise BundleError(f"bundle {directory}", given=Literally(error), expected=expected, fix=fix) from None
    return Bundle.open(directory)


def _bundles_in(path: Path) -> list[Path]:
    """Return the bundles of a directory that is none itself."""
    if (path / MANIFEST_NAME).exists():
        return []
    try:
        return sorted(manifest.parent for manifest in path.glob(f"*/{MANIFEST_NAME}"))
    except OSError:  # it is being replaced
        return []


def _names(directory: Path) -> set[str]:
    try:
        return set(os.listdir(directory))
    except OSError as error:  # it has been removed or replaced since the manifest was read
        given = Literally(error.strerror)
        raise BundleError(f"bundle {directory}", given=given, expected="a bundle directory", fix=_FIX) from None
