"""The models of one server, found by name and version."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from edge.bundles.bundle import Bundle
from edge.errors import BundleError, FewheadsError, InvalidRequest, Literally, ModelNotReady, NotFound
from edge.repository.budget import MemoryBudget
from edge.repository.directory import Directory, Key, name_of
from edge.repository.entry import Entry
from edge.repository.loader import Loader
from edge.repository.model import Model
from edge.scheduling.scheduler import Scheduler
from edge.scheduling.tier_executor import ServingOptions

#: 18 digits fit into 64 bits; Python refuses to convert thousands of them.
_VERSION_DIGITS = 18


class Repository:
    """The entries of all bundles in a directory. The event loop changes them, any thread may read them.

    Args:
        directory: every subdirectory whose name does not start with a dot is a bundle, unless this is a bundle itself.
        device: where models are loaded and run.
        target: the runtime, as ``fewheads build --target`` takes it.
        cache: directory of the models that have been built.
        options: what all models have in common.
        budget: refuses models for which the memory has no room; None refuses none.
        build: whether to build what the runtime needs and the cache lacks.

    Attributes:
        directory: the bundles on disk.
        loader: loads and closes models.
        on_change: called on the event loop after every change of an entry or of the set of entries.
        generation: the number of these changes.
    """

    def __init__(
        self,
        directory: Path,
        device: Scheduler,
        *,
        target: str = "auto",
        cache: Path | None = None,
        options: ServingOptions = ServingOptions(),  # noqa: B008 - it is frozen
        budget: MemoryBudget | None = None,
        build: bool = True,
    ) -> None:
        self.directory = Directory(directory)
        self.loader = Loader(device, target, cache, options, budget, build)
        self.on_change: Callable[[], None] = lambda: None
        self.generation = 0
        # Sorted by name, and by version in numeric order. Replaced, never changed: other threads read it.
        self._entries: tuple[Entry, ...] = ()

    def __iter__(self) -> Iterator[Entry]:
        """Iterate over the entries by name, and by version in numeric order."""
        return iter(self._entries)

    def named(self, name: str) -> list[Entry]:
        """Return the entries of a model in the order of their versions."""
        return [entry for entry in self._entries if entry.name == name]

    def find(self, name: str, version: str) -> Entry:
        """Return the entry of a version of a model; without a version, the highest READY one, or else the highest.

        Raises:
            InvalidRequest: the version is not a positive integer.
            NotFound: there is none.
        """
        fix = "Leave the version out for the highest one."
        digits = version.isascii() and version.isdigit() and len(version) <= _VERSION_DIGITS
        if version and not (digits and int(version)):
            expected = f"a positive integer of at most {_VERSION_DIGITS} digits"
            raise InvalidRequest(f"version of model {name!r}", given=version, expected=expected, fix=fix)
        readable = [entry for entry in self.named(name) if entry.version]
        if not readable:
            # Clients of Triton look for these words.
            raise self.unknown(f"Request for unknown model {name!r}", fix="RepositoryIndex lists what there is.")
        found = [entry for entry in readable if entry.version == str(int(version))] if version else readable
        if not found:
            expected = f"one of: {', '.join(entry.version for entry in readable)}"
            raise NotFound(f"version of model {name!r}", given=version, expected=expected, fix=fix)
        ready = [entry for entry in found if entry.state == "READY"]
        return (ready or found)[-1]

    def ready(self, name: str, version: str) -> tuple[Entry, Model]:
        """Return an entry and its model.

        Raises:
            InvalidRequest: the version is not a positive integer.
            NotFound: there is none, or it has not been loaded.
            ModelNotReady: it is loading or unloading, or it could not be loaded.
        """
        entry = self.find(name, version)
        if not entry.wanted:
            fix = "RepositoryModelLoad loads it."
            given = Literally("one that is not loaded")
            raise NotFound(f"model {name!r}", given=given, expected="a loaded one", fix=fix)
        model = entry.model
        if model is None:
            fix = "RepositoryIndex gives the reason."
            raise ModelNotReady(f"model {name!r}", given=entry.state, expected="READY", fix=fix)
        return entry, model

    def unknown(self, subject: str, *, fix: str) -> NotFound:
        """Return the error for a name that no bundle has."""
        known = ", ".join(sorted({entry.name for entry in self})) or "none at all"
        given = Literally("a name that no bundle has")
        return NotFound(subject, given=given, expected=f"one of: {known}", fix=fix)

    def paths_of(self, name: str, keys: Mapping[Path, Key | FewheadsError]) -> list[Path]:
        """Return the directories of a model.

        A directory that cannot be read belongs to the models that were read from it before, or else to the model of
        its own name.

        Args:
            name: of the model.
            keys: what :meth:`Directory.keys` returned.
        """
        names: dict[Path, set[str]] = {}
        for entry in self._entries:
            names.setdefault(entry.path, set()).add(entry.name)
        return [
            path
            for path, key in keys.items()
            if (name in names.get(path, {path.name}) if isinstance(key, FewheadsError) else name == key[0])
        ]

    def enter(
        self, name: str, path: Path, found: Bundle | FewheadsError, taken: dict[Key, Path]
    ) -> tuple[Entry, Bundle | None]:
        """Enter what was read from a directory, as wanted: LOADING, or READY while an earlier model answers.

        Args:
            name: of the model that the directory belongs to.
            path: the directory.
            found: what :meth:`Directory.read` returned. An error makes the entry UNAVAILABLE, or leaves it READY.
            taken: the directories of the versions that have been entered from elsewhere; this one is added.

        Returns:
            The entry, and the bundle if it can be loaded.
        """
        if isinstance(found, Bundle):
            key = (found.manifest.name, str(found.manifest.version))
            first = taken.setdefault(key, path)
            if first == path:
                entry = self._entry(path, key)
                entry.loading(path)
                return entry, found
            expected = f"each name and version once; {first.name} has it too"
            fix = "Remove one of the two, or raise its version."
            found = BundleError(f"bundle {path}", given=" ".join(key), expected=expected, fix=fix)
        same = sorted((entry for entry in self.named(name) if entry.path == path), key=lambda entry: not entry.model)
        entry = same[0] if same else self._entry(path, (path.name, ""))
        entry.loading(path)
        entry.failed(found)
        return entry, None

    def _entry(self, path: Path, key: Key) -> Entry:
        """Return the entry of a version, a new one if there is none, in place of what failed in that directory."""
        same = [entry for entry in self._entries if (entry.name, entry.version) == key]
        entry = same[0] if same else Entry(path, *key, on_change=self._changed)
        gone = [other for other in self._entries if other.path == path and other.state == "UNAVAILABLE"]
        self._set([*(other for other in self._entries if other not in (*gone, entry)), entry])
        return entry

    def list_unloaded(self, keys: Mapping[Path, Key | FewheadsError]) -> None:
        """Enter the bundles that nobody has loaded, and forget those that are gone.

        Args:
            keys: what :meth:`Directory.keys` returned.
        """
        entries = [entry for entry in self._entries if entry.wanted or entry.path in keys]
        known = {entry.path for entry in entries}
        for path, key in keys.items():
            if path not in known:
                version, reason = ("", str(key)) if isinstance(key, FewheadsError) else (key[1], "not loaded")
                entries.append(Entry(path, name_of(path, key), version, reason, on_change=self._changed))
        self._set(entries)

    def forget(self, entry: Entry) -> None:
        """Remove an entry without a model."""
        self._set([other for other in self._entries if other is not entry])

    def _set(self, entries: list[Entry]) -> None:
        before = self._entries
        self._entries = tuple(sorted(entries, key=lambda entry: (entry.name, len(entry.version), entry.version)))
        if self._entries != before:
            self._changed()

    def _changed(self) -> None:
        self.generation += 1
        self.on_change()
