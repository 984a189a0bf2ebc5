"""A bundle: the directory that carries one model from the workstation to the device, written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from edge.bundles import golden as golden_set
from edge.bundles import manifest_file, rules
from edge.bundles.fields import Role
from edge.bundles.golden import Golden
from edge.bundles.manifest import MANIFEST_NAME, Artifact, FileRecord, Manifest, Tier
from edge.errors import BundleError, Raw
from edge.files import COPY_AGAIN, check_recorded, check_size, read_recorded, replaced_directory, sha256, write_durably


@dataclass(eq=False)
class Bundle:
    """A bundle on disk whose files match its manifest."""

    path: Path
    manifest: Manifest  # upgraded to version 2
    goldens: dict[str, Golden]  # of each tier, by name
    parts: dict[str, Golden] = field(default_factory=dict)  # of each file with a golden set of its own

    @property
    def golden(self) -> Golden:
        """The golden set of the full tier."""
        return self.goldens[self.manifest.tiers[0].name]

    @property
    def size_bytes(self) -> int:
        return sum(record.size_bytes for record in self.manifest.files.values())

    @classmethod
    def open(cls, path: str | Path, *, models: bool = True) -> Bundle:
        """Read a bundle; raise a BundleError for the first rule that it breaks, before any model is executed.

        With ``models`` False, only the sizes of ONNX files are checked here, and :meth:`read` hashes a file later.
        """
        path = Path(path)
        if not path.is_dir():
            given = "a file" if path.exists() else "nothing there"
            fix = "Give the directory that holds manifest.json."
            raise BundleError(f"bundle {path}", given=Raw(given), expected="a bundle directory", fix=fix)
        if inside := _bundles_in(path):
            fix = f"Give one of its bundles, such as {inside[0]}."
            raise BundleError(f"bundle {path}", given=Raw("a directory of bundles"), expected="a bundle", fix=fix)
        manifest = manifest_file.read(path, f"{path / MANIFEST_NAME}")
        if stray := sorted(_names(path) - {MANIFEST_NAME, *manifest.files}):
            expected = "only files that the manifest lists"
            raise BundleError(f"bundle {path}", given=stray[0], expected=expected, fix="Remove it, or export again.")
        sets = {tier.name: tier.golden or manifest.golden for tier in manifest.tiers}
        later = set() if models else {artifact.file for tier in manifest.tiers for artifact in tier.artifacts}
        parts = {artifact.golden: artifact for tier in manifest.tiers for artifact in tier.artifacts if artifact.golden}
        decoded = {}
        for name, record in manifest.files.items():
            if name in later:
                check_size(path / name, record.size_bytes)
                continue
            data = read_recorded(path / name, record.size_bytes, record.sha256)
            if name in (manifest.golden, *sets.values(), *parts):
                decoded[name] = golden_set.decode(data, manifest, str(path / name), parts.get(name))
        goldens = {tier: decoded[name] for tier, name in sets.items()}
        of_files = {
            artifact.file: decoded[artifact.golden]
            for tier in manifest.tiers
            for artifact in tier.artifacts
            if artifact.golden
        }
        return cls(path, manifest, goldens, of_files)

    def golden_of(self, tier: Tier, artifact: Artifact) -> Golden:
        """Return the golden set that a file must reproduce: its own, else the tier's."""
        return self.parts.get(artifact.file) or self.goldens[tier.name]

    def artifact(self, runtime: str, tier: str | None = None, role: Role = "model") -> Artifact:
        """Return the ONNX file of a role and tier for a runtime or for ``any``; raise a BundleError without one."""
        chosen = self.tier(tier)
        files = {(artifact.runtime, artifact.role): artifact for artifact in chosen.artifacts}
        if file := files.get((runtime, role)) or files.get(("any", role)):
            return file
        raise BundleError(
            f"bundle {self.path} tier {chosen.name!r}",
            given=[f"{artifact.role} for {artifact.runtime}" for artifact in chosen.artifacts],
            expected=f"{role} for {runtime}",
            fix="Take a --target that runs these, or export the bundle with that file too, if the model can have it.",
        )

    def tier(self, name: str | None = None) -> Tier:
        """Return a tier by name, or the full one; raise a BundleError if there is none of that name."""
        tiers = {tier.name: tier for tier in self.manifest.tiers}
        if name is None:
            return self.manifest.tiers[0]
        if name not in tiers:
            expected = f"one of {', '.join(tiers)}"
            raise BundleError(f"bundle {self.path} tier", given=name, expected=expected, fix="Choose one of these.")
        return tiers[name]

    def read(self, name: str) -> bytes:
        """Return the bytes of a listed file, hashed as they are read; raise a BundleError if it has changed."""
        record = self.manifest.files[name]
        return read_recorded(self.path / name, record.size_bytes, record.sha256)

    def check(self, name: str) -> None:
        """Hash a listed file; raise a BundleError if it has changed."""
        record = self.manifest.files[name]
        check_recorded(self.path / name, record.size_bytes, record.sha256)


def write_bundle(
    directory: str | Path, manifest: Manifest, files: Mapping[str, bytes], *, replace: bool = False
) -> Bundle:
    """Write a bundle atomically, with the records of ``files`` in its manifest; return it, read back and checked.

    Raise a BundleError if ``directory`` exists or cannot be written, or a rule is broken. An existing bundle stays.
    """
    directory = Path(directory)
    if directory.exists() and not replace:
        fix = "Choose another place, or replace it with --replace."
        raise BundleError(f"bundle {directory}", given=Raw("something there"), expected="a free path", fix=fix)
    records = {name: FileRecord(size_bytes=len(data), sha256=sha256(data)) for name, data in files.items()}
    manifest = msgspec.structs.replace(manifest, files=records)
    rules.check(manifest, str(directory / MANIFEST_NAME))
    try:
        with replaced_directory(directory) as new:
            for name, data in {**files, MANIFEST_NAME: manifest_file.encode(manifest)}.items():
                write_durably(new / name, data)
            Bundle.open(new)
    except OSError as error:
        fix, expected = "Free space, or choose another place.", "a place with room to write it"
        raise BundleError(f"bundle {directory}", given=Raw(error), expected=expected, fix=fix) from None
    return Bundle.open(directory)


def _bundles_in(path: Path) -> list[Path]:
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
        given, expected = Raw(error.strerror), "a bundle directory"
        raise BundleError(f"bundle {directory}", given=given, expected=expected, fix=COPY_AGAIN) from None
