"""The repository's directory: which bundles are in it, and which have changed since the last look."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from pathlib import Path

from edge.bundles import manifest_file
from edge.bundles.bundle import Bundle
from edge.bundles.manifest import MANIFEST_NAME
from edge.errors import BundleError, FewheadsError, Literally

#: Name and version of a model.
Key = tuple[str, str]

#: A directory that is replaced by renaming is missing for a moment.
_RENAME_SECONDS = 0.2

#: Name, size, time of modification and inode of each file of a bundle.
_Stamp = frozenset[tuple[str, int, int, int]]


class Directory:
    """Finds bundles on disk. Every method reads files, and so belongs on a thread beside the event loop.

    Args:
        path: every subdirectory whose name does not start with a dot is a bundle, unless this is a bundle itself.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamps: dict[Path, _Stamp] = {}

    def bundles(self) -> list[Path]:
        """Return the directories of the bundles, sorted."""
        if (self.path / MANIFEST_NAME).is_file():
            return [self.path]
        return sorted(path for path in self.path.iterdir() if path.is_dir() and not path.name.startswith("."))

    def keys(self, expected: Collection[Path] = ()) -> dict[Path, Key | FewheadsError]:
        """Return the model that each bundle's manifest names, or why the manifest cannot be read.

        Args:
            expected: directories that should be there; if one is missing, this waits a moment for its replacement.
        """
        if not all(path.is_dir() for path in expected):
            time.sleep(_RENAME_SECONDS)
        return {path: _key(path) for path in self.bundles()}

    @staticmethod
    def read(path: Path, name: str) -> Bundle | FewheadsError:
        """Return the bundle in a directory, or why there is none. Its models are hashed when they are loaded.

        Args:
            path: the directory.
            name: of the model, as :meth:`keys` gave it.
        """
        try:
            bundle = Bundle.open(path, models=False)
        except FewheadsError as error:
            return error
        if bundle.manifest.name != name:
            given, expected = Literally(f"the model {bundle.manifest.name!r}"), f"the model {name!r}"
            fix = "It was replaced while it was read. Load it again."
            return BundleError(f"bundle {path}", given=given, expected=expected, fix=fix)
        return bundle

    def changes(self) -> set[Path]:
        """Return the bundles that have appeared, changed or gone since the last call; all of them at the first."""
        stamps = self._look()
        if self._stamps.keys() - stamps.keys():
            time.sleep(_RENAME_SECONDS)
            stamps = self._look()
        before, self._stamps = self._stamps, stamps
        return {path for path in {*before, *stamps} if before.get(path) != stamps.get(path)}

    def _look(self) -> dict[Path, _Stamp]:
        return {path: _stamp(path) for path in self.bundles()}


def name_of(path: Path, key: Key | FewheadsError) -> str:
    """Return the name of the model in a directory, which is that of the directory if the manifest cannot be read."""
    return path.name if isinstance(key, FewheadsError) else key[0]


def _key(path: Path) -> Key | FewheadsError:
    try:
        manifest = manifest_file.read(path, f"bundle {path}")
    except FewheadsError as error:
        return error
    return manifest.name, str(manifest.version)


def _stamp(path: Path) -> _Stamp:
    try:
        with os.scandir(path) as files:
            return frozenset(
                (file.name, status.st_size, status.st_mtime_ns, status.st_ino)
                for file in files
                for status in [file.stat()]
            )
    except OSError:  # it is being replaced; the next look will see more
        return frozenset()
