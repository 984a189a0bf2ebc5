"""The models of one server: every bundle of a directory, loaded or with the reason why not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from edge.build import Loaded, load_runner
from edge.bundle import Bundle
from edge.device import DeviceThread
from edge.errors import BundleError, FewheadsError, InvalidRequest, ModelNotFound, ModelNotReady
from edge.memory import MemorySampler
from edge.model import Model
from edge.statistics import ModelStatistics

log = logging.getLogger(__name__)

State = Literal["LOADING", "READY", "UNAVAILABLE", "UNLOADING"]


@dataclass
class Entry:
    """One bundle of the repository. ``reason`` says why it is not ready; ``model`` is there when it is."""

    path: Path
    name: str
    version: str
    state: State = "LOADING"
    reason: str = ""
    model: Model | None = None
    statistics: ModelStatistics = field(default_factory=ModelStatistics)


class Repository:
    """Loads bundles on the device thread and finds them by name and version.

    Args:
        directory: every subdirectory whose name does not start with a dot is a bundle.
        device: where models are loaded and run.
        target: the backend, as ``fewheads build --target`` takes it.
        cache: where built models lie.
    """

    def __init__(
        self, directory: Path, device: DeviceThread, *, target: str = "auto", cache: Path | None = None
    ) -> None:
        self.directory = directory
        self._device = device
        self._target = target
        self._cache = cache
        self._entries: list[Entry] = []

    def __iter__(self) -> Iterator[Entry]:
        return iter(sorted(self._entries, key=lambda entry: (entry.name, len(entry.version), entry.version)))

    @property
    def all_ready(self) -> bool:
        """Whether every bundle is ready; an empty repository is."""
        return all(entry.state == "READY" for entry in self._entries)

    def load_all(self, changed: Callable[[Entry], None] = lambda entry: None) -> None:
        """Load every bundle of the directory. One that fails stays behind with its reason and stops no other.

        Args:
            changed: called after each bundle, ready or not.
        """
        paths = sorted(path for path in self.directory.iterdir() if path.is_dir() and not path.name.startswith("."))
        # All of them are known, as loading, before the first is loaded: nobody is told "no such model" meanwhile.
        pending = [self._register(path) for path in paths]
        for entry, bundle in pending:
            if bundle:
                self._load(entry, bundle)
            changed(entry)

    def _register(self, path: Path) -> tuple[Entry, Bundle | None]:
        bundle: Bundle | None = None
        try:
            bundle = Bundle.open(path)
            entry = Entry(path, bundle.manifest.name, str(bundle.manifest.version))
            twin = self._twin(entry)
            if twin:
                expected = f"each name and version once; {twin.path.name} has it too"
                fix = "Remove one of the two, or raise its version."
                raise BundleError(f"bundle {path}", given=f"{entry.name} {entry.version}", expected=expected, fix=fix)
        except FewheadsError as error:
            log.error("%s cannot be served: %s", path.name, error)
            entry, bundle = Entry(path, path.name, "", "UNAVAILABLE", str(error)), None
        self._entries.append(entry)
        return entry, bundle

    def _twin(self, entry: Entry) -> Entry | None:
        same = [other for other in self._entries if (other.name, other.version) == (entry.name, entry.version)]
        return same[0] if same else None

    def _load(self, entry: Entry, bundle: Bundle) -> None:
        def load() -> Model:
            memory = MemorySampler()
            before = memory.process_rss_bytes()
            tiers: dict[str, Loaded] = {}
            try:
                for tier in bundle.manifest.tiers:
                    tiers[tier.name] = load_runner(bundle, self._target, self._cache, tier=tier.name)
                return Model(bundle, tiers, max(memory.process_rss_bytes() - before, 0))
            except FewheadsError:
                for loaded in tiers.values():
                    loaded.runner.close()
                raise

        try:
            entry.model = self._device.call(load)
            entry.state = "READY"
            log.info(
                "%s %s is ready on %s; its golden outputs differ by %.3g at most",
                entry.name,
                entry.version,
                entry.model.runner.platform,
                entry.model.golden_max_abs_diff,
            )
        except FewheadsError as error:
            entry.state, entry.reason = "UNAVAILABLE", str(error)
            log.error("%s cannot be served: %s", entry.path.name, error)

    def find(self, name: str, version: str) -> Entry:
        """Return the bundle of a name and version; an empty version is the highest.

        Raises:
            InvalidRequest: the version is not a positive integer.
            ModelNotFound: there is none.
        """
        if version and not (version.isascii() and version.isdigit() and int(version)):
            fix = "Leave the version out for the highest one."
            raise InvalidRequest(f"version of model {name!r}", given=version, expected="a positive integer", fix=fix)
        named = [entry for entry in self if entry.name == name and entry.version]
        if not named:
            known = ", ".join(sorted({entry.name for entry in self})) or "none at all"
            fix = "RepositoryIndex lists what there is."
            raise ModelNotFound(f"model {name!r}", given="an unknown name", expected=f"one of: {known}", fix=fix)
        # A version that is ready is preferred to a higher one that is not.
        chosen = [entry for entry in named if entry.version == str(int(version))] if version else self._best(named)
        if not chosen:
            versions = ", ".join(entry.version for entry in named)
            fix = "Leave the version out for the highest one."
            raise ModelNotFound(f"version of model {name!r}", given=version, expected=f"one of: {versions}", fix=fix)
        return chosen[-1]

    @staticmethod
    def _best(named: list[Entry]) -> list[Entry]:
        return [entry for entry in named if entry.state == "READY"] or named

    def ready(self, name: str, version: str) -> tuple[Entry, Model]:
        """Return a bundle and its model.

        Raises:
            InvalidRequest: the version is not a positive integer.
            ModelNotFound: there is none.
            ModelNotReady: it is loading, or it could not be loaded.
        """
        entry = self.find(name, version)
        if entry.model is None or entry.state != "READY":
            fix = "RepositoryIndex tells the reason."
            raise ModelNotReady(f"model {name!r}", given=entry.state, expected="READY", fix=fix)
        return entry, entry.model

    def close(self) -> None:
        """Close every runner, on the device thread."""
        for entry in self._entries:
            if entry.model:
                entry.state = "UNLOADING"
                self._device.call(entry.model.close)
                entry.model = None
