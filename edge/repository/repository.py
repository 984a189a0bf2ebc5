"""The models of one server by name and version, and the directory of their bundles."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

from edge.bundles import manifest_file
from edge.bundles.bundle import Bundle
from edge.bundles.manifest import MANIFEST_NAME, Manifest
from edge.errors import (
    BundleError,
    FewheadsError,
    InvalidRequest,
    ModelNotReady,
    NotFound,
    Raw,
    UsageError,
    printable,
)
from edge.repository.entry import Entry
from edge.repository.loader import Loader
from edge.repository.model import Model

log = logging.getLogger(__name__)

#: Name and version of a model.
Key = tuple[str, str]
#: What a directory of a bundle has: its manifest, or the error of one that cannot be read.
Found = Manifest | FewheadsError

#: A directory that is replaced by renaming is missing for a moment.
_RENAME_SECONDS = 0.2

#: Name, size, time of modification and inode of each file of a bundle.
_Stamp = frozenset[tuple[str, int, int, int]]
#: 18 digits fit into 64 bits; Python refuses to convert thousands of them.
_VERSION_DIGITS = 18


class Directory:
    """Finds bundles on disk. Call its methods on a thread beside the event loop, because they read files.

    ``path`` is either a bundle, or the parent of bundles; subdirectories whose names start with a dot are skipped.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamps: dict[Path, _Stamp] = {}

    def bundles(self) -> list[Path]:
        """Return the directories of the bundles, sorted; raise a UsageError if the directory cannot be read."""
        try:
            if (self.path / MANIFEST_NAME).is_file():
                return [self.path]
            return sorted(path for path in self.path.iterdir() if path.is_dir() and not path.name.startswith("."))
        except OSError as error:
            given, expected = Raw(error.strerror), "a directory that this process's user may read"
            fix = "Mount it, or change its mode."
            raise UsageError(f"repository {self.path}", given=given, expected=expected, fix=fix) from None

    def manifests(self, expected: Collection[Path] = ()) -> dict[Path, Found]:
        """Return the manifest of each bundle, or the error of one that cannot be read.

        If one of the directories ``expected`` is missing, this waits a moment for its replacement.
        """
        if not all(path.is_dir() for path in expected):
            time.sleep(_RENAME_SECONDS)
        return {path: _manifest(path) for path in self.bundles()}

    @staticmethod
    def read(path: Path, name: str) -> Bundle | FewheadsError:
        """Return the bundle of the model ``name`` in a directory, or the error. Its models are hashed when loaded."""
        try:
            bundle = Bundle.open(path, models=False)
        except Exception as error:
            return load_error(path, error)
        if bundle.manifest.name != name:
            given, expected = Raw(f"the model {bundle.manifest.name!r}"), f"the model {name!r}"
            fix = "It was replaced while it was read. Load it again."
            return BundleError(f"bundle {path}", given=given, expected=expected, fix=fix)
        return bundle

    def changes(self) -> set[Path]:
        """Return the bundles that have appeared, changed or gone since the last call; all of them at the first."""
        stamps = {path: _stamp(path) for path in self.bundles()}
        if self._stamps.keys() - stamps.keys():
            time.sleep(_RENAME_SECONDS)
            stamps = {path: _stamp(path) for path in self.bundles()}
        before, self._stamps = self._stamps, stamps
        return {path for path in {*before, *stamps} if before.get(path) != stamps.get(path)}


def load_error(path: Path, error: Exception) -> FewheadsError:
    """Return the error of a bundle, whatever one raised: the other bundles are served in spite of it."""
    if isinstance(error, FewheadsError):
        return error
    log.error("bundle %s fails in an unexpected way", path, exc_info=error)
    given, expected = Raw(f"{type(error).__name__}: {error}"), "a bundle that can be loaded"
    return BundleError(f"bundle {path}", given=given, expected=expected, fix="The server's log has the traceback.")


def name_of(path: Path, found: Found) -> str:
    """Return the name of the model in a directory, which is that of the directory if the manifest cannot be read."""
    return printable(path.name) if isinstance(found, FewheadsError) else found.name


def _manifest(path: Path) -> Found:
    try:
        return manifest_file.read(path, f"bundle {path}")
    except Exception as error:
        return load_error(path, error)


def _stamp(path: Path) -> _Stamp:
    try:
        with os.scandir(path) as files:
            stats = ((file.name, file.stat()) for file in files)
            return frozenset((name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in stats)
    except OSError:  # it is being replaced; the next call sees the result
        return frozenset()


class NotLoaded(Exception):
    """A request needs a model that is loaded on demand, and is not."""

    def __init__(self, entry: Entry) -> None:
        super().__init__(entry.name)
        self.entry = entry


class Repository:
    """The entries of all bundles in a :class:`Directory`. The event loop changes them, any thread may read them.

    With ``on_demand``, requests load the models, but those named in ``pinned``.
    """

    def __init__(
        self, directory: Path, loader: Loader, *, on_demand: bool = False, pinned: Collection[str] = ()
    ) -> None:
        self._on_demand, self._pinned = on_demand, pinned
        self.directory = Directory(directory)
        self.loader = loader
        #: Called on the event loop after every change of an entry or of the set of entries.
        self.on_change: Callable[[], None] = lambda: None
        self.generation = 0  # number of these changes
        self.listed = False  # whether it has every bundle of the directory; until then, an unknown name may appear
        # Sorted by name, and by version in numeric order. Replaced, never changed: other threads read it.
        self._entries: tuple[Entry, ...] = ()

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    def named(self, name: str) -> list[Entry]:
        """Return the entries of a model in the order of their versions."""
        return [entry for entry in self._entries if entry.name == name]

    def find(self, name: str, version: str) -> Entry:
        """Return the entry of a version of a model; without a version, the highest that answers, or else the highest.

        Raises:
            InvalidRequest: the version is not a positive integer.
            NotFound: there is no such model or version.
            ModelNotReady: there is no such model yet; the server still reads its directory.
        """
        fix = "Leave the version out for the highest one."
        digits = version.isascii() and version.isdigit() and len(version) <= _VERSION_DIGITS
        if version and not (digits and int(version)):
            expected = f"a positive integer of at most {_VERSION_DIGITS} digits"
            raise InvalidRequest(f"version of model {name!r}", given=version, expected=expected, fix=fix)
        readable = [entry for entry in self.named(name) if entry.version]
        if not readable and not self.listed:
            given, again = Raw("a server that still lists its models"), "Send the request again."
            raise ModelNotReady(f"model {name!r}", given=given, expected="READY", fix=again)
        if not readable:
            # Clients of Triton look for these words.
            raise self.unknown(f"Request for unknown model {name!r}", fix="RepositoryIndex lists all models.")
        entries = [entry for entry in readable if entry.version == str(int(version))] if version else readable
        if not entries:
            expected = f"one of: {', '.join(entry.version for entry in readable)}"
            raise NotFound(f"version of model {name!r}", given=version, expected=expected, fix=fix)
        # The first comparison is the only one that a request to a loaded model needs.
        return ([entry for entry in entries if entry.state == "READY" or entry.answers] or entries)[-1]

    def ready(self, name: str, version: str) -> tuple[Entry, Model]:
        """Return an entry and its model; raise as :meth:`find`, and for a model that is not loaded or not READY.

        Raise NotLoaded for one that the request may load.
        """
        entry = self.find(name, version)
        if entry.on_demand and not entry.withdrawn and not entry.model:
            if refusal := entry.refusal():
                raise refusal
            raise NotLoaded(entry)
        if not entry.wanted:
            given, fix = Raw("one that is not loaded"), "RepositoryModelLoad loads it."
            raise NotFound(f"model {name!r}", given=given, expected="a loaded one", fix=fix)
        model = entry.model
        if model is None:
            fix = "RepositoryIndex gives the reason."
            raise ModelNotReady(f"model {name!r}", given=entry.state, expected="READY", fix=fix)
        return entry, model

    def unknown(self, subject: str, *, fix: str) -> NotFound:
        """Return the error for a name that no bundle has."""
        known = ", ".join(sorted({entry.name for entry in self})) or "none at all"
        given = Raw("a name that no bundle has")
        return NotFound(subject, given=given, expected=f"one of: {known}", fix=fix)

    def paths_of(self, name: str, manifests: Mapping[Path, Found]) -> list[Path]:
        """Return the directories of a model; ``manifests`` is the result of :meth:`Directory.manifests`.

        A directory that cannot be read belongs to the models that were read from it before, or else to the model of
        its own name.
        """
        names = {(entry.path, entry.name) for entry in self._entries}
        unread = {entry.path for entry in self._entries if isinstance(manifests.get(entry.path), FewheadsError)}
        return [
            path
            for path, found in manifests.items()
            if ((path, name) in names if path in unread else name == name_of(path, found))
        ]

    def enter(
        self, name: str, path: Path, content: Bundle | FewheadsError, taken: dict[Key, Path]
    ) -> tuple[Entry, Bundle | None]:
        """Enter what :meth:`Directory.read` found as LOADING, or READY while an earlier model serves.

        Return the entry, and the bundle if it can be loaded. An error makes the entry UNAVAILABLE, or leaves it READY.
        ``taken`` are the directories of the versions that have been entered from elsewhere; this one is added.
        """
        if isinstance(content, Bundle):
            key = (content.manifest.name, str(content.manifest.version))
            first = taken.setdefault(key, path)
            if first == path:
                entry = self._entry(path, key)
                entry.manifest = content.manifest
                entry.loading(path)
                return entry, content
            expected = f"each name and version once; {first.name} has it too"
            fix = "Remove one of the two, or raise its version."
            content = BundleError(f"bundle {path}", given=" ".join(key), expected=expected, fix=fix)
        same = sorted((entry for entry in self.named(name) if entry.path == path), key=lambda entry: not entry.model)
        entry = same[0] if same else self._entry(path, (printable(path.name), ""))
        entry.loading(path)
        entry.failed(content)
        return entry, None

    def _entry(self, path: Path, key: Key) -> Entry:
        same = [entry for entry in self._entries if (entry.name, entry.version) == key]
        entry = same[0] if same else self._new(path, *key)
        gone = [other for other in self._entries if other.path == path and other.state == "UNAVAILABLE"]
        self._set([*(other for other in self._entries if other not in (*gone, entry)), entry])
        return entry

    def list_unloaded(self, manifests: Mapping[Path, Found]) -> None:
        """Enter the bundles that are not loaded, and forget those that are gone; the argument is as in
        :meth:`paths_of`.
        """
        entries = [entry for entry in self._entries if entry.wanted or entry.path in manifests]
        known = {entry.path for entry in entries}
        for path, found in manifests.items():
            if path in known:
                continue
            if isinstance(found, FewheadsError):
                entries.append(self._new(path, name_of(path, found), "", str(found)))
            else:
                entries.append(self._new(path, found.name, str(found.version), "not loaded"))
                entries[-1].manifest = found
        self._set(entries)
        self.listed = True

    def forget(self, entry: Entry) -> None:
        """Remove an entry without a model."""
        self._set([other for other in self._entries if other is not entry])

    def _new(self, path: Path, name: str, version: str, reason: str = "") -> Entry:
        on_demand = self._on_demand and name not in self._pinned
        return Entry(path, name, version, reason, on_demand=on_demand, on_change=self._changed)

    def _set(self, entries: list[Entry]) -> None:
        before = self._entries
        self._entries = tuple(sorted(entries, key=lambda entry: (entry.name, len(entry.version), entry.version)))
        if self._entries != before:
            self._changed()

    def _changed(self) -> None:
        self.generation += 1
        self.on_change()
