"""The models of one server: every bundle of a directory, loaded or with the reason why not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from edge.bundles import manifest_file
from edge.bundles.bundle import Bundle
from edge.bundles.manifest import MANIFEST_NAME
from edge.errors import BundleError, FewheadsError, InvalidRequest, Literally, ModelNotReady, NotFound
from edge.instruments.statistics import ModelStatistics
from edge.repository.budget import MemoryBudget
from edge.repository.loader import Loader
from edge.repository.model import Model
from edge.scheduling.lane import ServingOptions
from edge.scheduling.scheduler import Scheduler

log = logging.getLogger(__name__)

#: As many as 64 bits always hold; Python refuses to read thousands of them.
_VERSION_DIGITS = 18

State = Literal["LOADING", "READY", "UNAVAILABLE", "UNLOADING"]


@dataclass(eq=False)
class Entry:
    """One bundle of the repository.

    Attributes:
        path: its directory.
        name: of the model; of the directory where the bundle cannot be read.
        version: as the protocol writes it; empty where the bundle cannot be read.
        state: as the protocol calls it.
        reason: why it is not ready, or why it is not the bundle that now lies at ``path``.
        model: what answers, if it is ready.
        statistics: of all models that have answered under this name and version.
        wanted: whether it should be ready; not after it was unloaded, nor before somebody asked for it to be loaded.
    """

    path: Path
    name: str
    version: str
    state: State = "LOADING"
    reason: str = ""
    model: Model | None = None
    statistics: ModelStatistics = field(default_factory=ModelStatistics)
    wanted: bool = True

    def failed(self, error: FewheadsError) -> None:
        """Note why a load failed. A model that was there before stays."""
        log.error("%s cannot be served: %s", self.path.name, error)
        self.state, self.reason = "READY" if self.model else "UNAVAILABLE", str(error)

    def loaded(self, model: Model) -> Model | None:
        """Let a model answer from now on, and return the one that did so before."""
        old, self.model, self.state, self.reason = self.model, model, "READY", ""
        log.info(
            "%s %s is ready on %s; its golden outputs differ by %.3g at most",
            self.name,
            self.version,
            model.runner.platform,
            model.golden_max_abs_diff,
        )
        return old


#: Name and version of a model.
Key = tuple[str, str]


class Repository:
    """Loads bundles on the device thread and finds them by name and version.

    Args:
        directory: every subdirectory whose name does not start with a dot is a bundle, or else it is one itself.
        device: where models are loaded and run.
        target: the backend, as ``fewheads build --target`` takes it.
        cache: where built models lie.
        options: what holds for all models.
        budget: refuses models that the memory has no room for; None refuses none.
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
    ) -> None:
        self.directory = directory
        self.loader = Loader(device, target, cache, options, budget)
        # Replaced, never changed: other threads read it.
        self._entries: tuple[Entry, ...] = ()

    def __iter__(self) -> Iterator[Entry]:
        return iter(sorted(self._entries, key=lambda entry: (entry.name, len(entry.version), entry.version)))

    @property
    def generation(self) -> int:
        """A number that changes with what a name and version stand for."""
        return hash(tuple([(id(entry.model), entry.state, entry.wanted) for entry in self._entries]))

    def load_all(
        self,
        changed: Callable[[Entry], None] = lambda entry: None,
        only: Collection[str] | None = None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Load the bundles of the directory. One that fails stays behind with its reason and stops no other.

        Args:
            changed: called after each bundle, ready or not.
            only: the names of the models to load; the others are only listed. None loads all of them.
            stopped: says whether to load no further model.
        """
        taken: dict[Key, Path] = {}
        # All of them are known, as loading, before the first is loaded: nobody is told "no such model" meanwhile.
        pending = [
            self.enter(path, self.read(path), taken)
            for path in self.directories()
            if only is None or _name(path, _key_at(path)) in only
        ]
        self.list_unloaded(self.scan())
        for entry, bundle in pending:
            if stopped():
                return
            if bundle:
                try:
                    entry.loaded(self.loader.load_model(bundle))
                except FewheadsError as error:
                    entry.failed(error)
            changed(entry)

    def directories(self) -> list[Path]:
        """Return where bundles are: in subdirectories, unless the directory is a bundle itself."""
        if (self.directory / MANIFEST_NAME).is_file():
            return [self.directory]
        return sorted(path for path in self.directory.iterdir() if path.is_dir() and not path.name.startswith("."))

    @staticmethod
    def read(path: Path) -> Bundle | FewheadsError:
        """Return the bundle in a directory, or why there is none. Its models are hashed when they are loaded."""
        try:
            return Bundle.open(path, models=False)
        except FewheadsError as error:
            return error

    def enter(self, path: Path, found: Bundle | FewheadsError, taken: dict[Key, Path]) -> tuple[Entry, Bundle | None]:
        """Note what was found in a directory.

        Args:
            path: the directory.
            found: what :meth:`read` returned.
            taken: the models that were found elsewhere; what is found here is added.

        Returns:
            Its entry, and the bundle if it shall be loaded.
        """
        if isinstance(found, Bundle):
            key = (found.manifest.name, str(found.manifest.version))
            first = taken.setdefault(key, path)
            if first == path:
                return self._entry(path, key), found
            expected = f"each name and version once; {first.name} has it too"
            fix = "Remove one of the two, or raise its version."
            found = BundleError(f"bundle {path}", given=" ".join(key), expected=expected, fix=fix)
        # What was served from here is served still, with the reason why it is not what lies here now.
        same = [entry for entry in self._entries if entry.path == path]
        entry = next((entry for entry in same if entry.model), same[0] if same else self._entry(path, (path.name, "")))
        entry.wanted = True
        entry.failed(found)
        return entry, None

    def _entry(self, path: Path, key: Key) -> Entry:
        """Return the entry of a model, a new one if there is none, in place of what could not be served from there."""
        same = [entry for entry in self._entries if (entry.name, entry.version) == key]
        entry = same[0] if same else Entry(path, *key)
        entry.path, entry.wanted = path, True
        others = [other for other in self._entries if other is not entry and (other.path != path or other.model)]
        self._entries = (*others, entry)
        return entry

    def list_unloaded(self, scan: Mapping[Path, Key | FewheadsError]) -> None:
        """Note the bundles that nobody has asked for, and forget those that are gone.

        Args:
            scan: what :meth:`scan` returned.
        """
        entries = [entry for entry in self._entries if entry.wanted or entry.model or entry.path in scan]
        known = {entry.path for entry in entries}
        for path, key in scan.items():
            if path not in known:
                name, version = (path.name, "") if isinstance(key, FewheadsError) else key
                reason = str(key) if isinstance(key, FewheadsError) else "not loaded"
                entries.append(Entry(path, name, version, "UNAVAILABLE", reason, wanted=False))
        self._entries = tuple(entries)

    def forget(self, entry: Entry) -> None:
        """Drop an entry whose model is closed."""
        self._entries = tuple(other for other in self._entries if other is not entry)

    def scan(self) -> dict[Path, Key | FewheadsError]:
        """Return which model each directory says it holds, or why it cannot be read; only manifests are read."""
        return {path: _key_at(path) for path in self.directories()}

    def find(self, name: str, version: str) -> Entry:
        """Return the bundle of a name and version; an empty version is the highest.

        Raises:
            InvalidRequest: the version is not a positive integer.
            NotFound: there is none.
        """
        digits = version.isascii() and version.isdigit() and len(version) <= _VERSION_DIGITS
        if version and not (digits and int(version)):
            fix = "Leave the version out for the highest one."
            expected = f"a positive integer of at most {_VERSION_DIGITS} digits"
            raise InvalidRequest(f"version of model {name!r}", given=version, expected=expected, fix=fix)
        named = [entry for entry in self if entry.name == name and entry.version]
        if not named:
            raise self.unknown(name, fix="RepositoryIndex lists what there is.")
        # A version that is ready is preferred to a higher one that is not.
        chosen = [entry for entry in named if entry.version == str(int(version))] if version else self._best(named)
        if not chosen:
            versions = ", ".join(entry.version for entry in named)
            fix = "Leave the version out for the highest one."
            raise NotFound(f"version of model {name!r}", given=version, expected=f"one of: {versions}", fix=fix)
        return chosen[-1]

    def unknown(self, name: str, *, fix: str) -> NotFound:
        """Return the error for a name that no bundle has."""
        known = ", ".join(sorted({entry.name for entry in self})) or "none at all"
        return NotFound(f"model {name!r}", given="an unknown name", expected=f"one of: {known}", fix=fix)

    @staticmethod
    def _best(named: list[Entry]) -> list[Entry]:
        return [entry for entry in named if entry.state == "READY"] or named

    def ready(self, name: str, version: str) -> tuple[Entry, Model]:
        """Return a bundle and its model.

        Raises:
            InvalidRequest: the version is not a positive integer.
            NotFound: there is none, or it is not loaded because nobody asked for it.
            ModelNotReady: it is loading, or it could not be loaded.
        """
        entry = self.find(name, version)
        if not entry.wanted:
            fix = "RepositoryModelLoad loads it."
            given = Literally("one that is not loaded")
            raise NotFound(f"model {name!r}", given=given, expected="a loaded one", fix=fix)
        if entry.model is None or entry.state != "READY":
            fix = "RepositoryIndex tells the reason."
            raise ModelNotReady(f"model {name!r}", given=entry.state, expected="READY", fix=fix)
        return entry, entry.model

    def close(self) -> None:
        """Close every runner, on the device thread."""
        for entry in self._entries:
            if entry.model:
                entry.state = "UNLOADING"
                self.loader.close(entry.model)
                entry.model = None


def _key_at(path: Path) -> Key | FewheadsError:
    try:
        manifest = manifest_file.read(path, f"bundle {path}")
    except FewheadsError as error:
        return error
    return manifest.name, str(manifest.version)


def _name(path: Path, key: Key | FewheadsError) -> str:
    return path.name if isinstance(key, FewheadsError) else key[0]
