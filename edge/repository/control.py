"""Model control: loads models at the start, on request, or as the repository's directory changes.

Everything here runs on the event loop, while other threads read, load and close. A request finds and takes its model in
one step on the same loop, so it gets either the old model, which is closed only after the request has given it back, or
the new one.

A load that takes too long, as with golden inputs for which the model computes without end, goes on by itself: nothing
waits for it, and its entry has the reason until it ends (:mod:`edge.repository.loads`).
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import AsyncIterator, Collection, Coroutine
from contextlib import asynccontextmanager, nullcontext, suppress
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, TypeVar
from weakref import WeakValueDictionary

from edge.bundles.bundle import Bundle
from edge.errors import FewheadsError, LoadFailed, ModelNotReady, Overloaded, Raw, Unsupported
from edge.repository.entry import Entry
from edge.repository.load import Load
from edge.repository.loads import Loads
from edge.repository.repository import Key, Repository, name_of
from edge.repository.room import Room

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Between two looks at a model that is being evicted.
_LOOK_SECONDS: Final = 0.02


class ModelControl:
    """Loads, reloads and unloads models without losing a request.

    Args:
        mode: ``none``, ``poll``, ``explicit`` or ``on-demand``.
        watchdog_seconds: the least limit for a load; nothing waits for one that takes longer
            (:func:`edge.repository.loader.load_limit_seconds`).
        max_loaded: the most models that are loaded at once, if they are loaded on demand; None is no limit.
    """

    def __init__(
        self, repository: Repository, mode: str, watchdog_seconds: float = math.inf, max_loaded: int | None = None
    ) -> None:
        self.mode, self.stopping = mode, False
        self._repository = repository
        self._directory = repository.directory
        # The operations on a name wait for each other; a lock exists as long as an operation holds it or waits for it.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        #: The number of operations on a name, those that wait included: a lock that was released is theirs, not free.
        self._busy: Counter[str] = Counter()
        self._operations: set[asyncio.Task[Any]] = set()
        self._closing = asyncio.Event()
        #: The number of unloads of a name that stop its loads and do not hold the name's lock yet.
        self._unwanted: Counter[str] = Counter()
        self._started = asyncio.Event()
        self.room: Room | None = None
        if mode == "on-demand":
            self.room = Room(repository, max_loaded, self._busy.__contains__, self._evict)
        self._loads = Loads(repository, watchdog_seconds, self.room)

    async def start(self, only: Collection[str] | None = None) -> None:
        """Load the models of the directory, those that must be built last. One that fails stops no other.

        With ``only``, other names are listed and not loaded.
        """
        await asyncio.to_thread(self._repository.loader.check_cache)
        if self.mode == "poll":
            await asyncio.to_thread(self._directory.changes)
        manifests = await asyncio.to_thread(self._directory.manifests)
        names = {path: name_of(path, found) for path, found in manifests.items()}
        bundles = {
            path: await asyncio.to_thread(self._directory.read, path, name)
            for path, name in names.items()
            if only is None or name in only
        }
        taken: dict[Key, Path] = {}
        # All of them are LOADING before the first is loaded, so that no client gets NOT_FOUND for a model to come.
        pending = [self._repository.enter(names[path], path, bundle, taken) for path, bundle in bundles.items()]
        self._repository.list_unloaded(manifests)
        unbuilt = self._repository.loader.needs_build
        readable = [(await asyncio.to_thread(unbuilt, bundle), entry, bundle) for entry, bundle in pending if bundle]
        for _, entry, bundle in sorted(readable, key=itemgetter(0)):
            if self.stopping:
                break
            await self._loads.end_of(self._begin(entry, bundle))
        self._started.set()

    def stop(self) -> None:
        """Load no further model, and stop the loads."""
        self.stopping = True
        self._loads.stop()

    def check_explicit(self, method: str) -> None:
        """Raise Unsupported unless clients may load and unload models."""
        if self.mode not in ("explicit", "on-demand"):
            given = Raw(f"a server with --model-control {self.mode}")
            fix = "Start it with `fewheads serve --model-control explicit`, or on-demand."
            expected = "--model-control explicit or on-demand"
            raise Unsupported(method, given=given, expected=expected, fix=fix)

    async def load_on_demand(self, entry: Entry) -> Overloaded | None:
        """Load one version of a model for requests, once there is room; return the error if none can be made.

        If the load fails, the entry has the reason. Nothing is loaded if no request waits when its turn comes, or if
        it was loaded or withdrawn meanwhile. Raise a ModelNotReady if the server is shutting down.
        """
        return await self._run(self._load_on_demand(entry))

    async def load_model(self, name: str) -> None:
        """Load, or load again, every version of a model that is in the directory now.

        A version is replaced after its successor has been loaded and checked; one that is no longer in the directory
        is unloaded if no load failed. This waits for a build that an earlier load has started, so that clients that
        retry do not restart it. Cancelling this call does not cancel the load.

        Raises:
            NotFound: no bundle has that name.
            LoadFailed: a bundle cannot be served. The models that served before still do.
            ModelNotReady: the server is shutting down.
        """
        await self._run(self._load(name))

    async def unload_model(self, name: str) -> None:
        """Reject further requests to a model, stop its load, and close it after its last request.

        An unknown name is no error. A model that is loaded on demand is not loaded again until :meth:`load_model`.
        Raise ModelNotReady if the server is shutting down.
        """
        self._unwanted[name] += 1
        self._loads.stop(name)
        await self._run(self._unload_all(name))

    async def list_unloaded(self) -> None:
        """Update the list of bundles in the directory that are not loaded."""
        if self.mode in ("explicit", "on-demand") and self._started.is_set():
            self._repository.list_unloaded(await asyncio.to_thread(self._directory.manifests))

    async def poll(self, seconds: float) -> None:
        """Load new and changed bundles and unload removed ones every ``seconds``, until :meth:`close`.

        A bundle that is still being copied does not match its hashes; it fails, and is loaded when it changes again.
        """
        while not self._closing.is_set():
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._closing.wait(), seconds)
                return
            with suppress(Exception):  # it is in the log
                await self._run(self._follow())

    async def close(self) -> None:
        """Start nothing more, wait for running operations, and close every model after its last user."""
        self.stop()
        self._closing.set()
        await asyncio.gather(*self._operations, return_exceptions=True)
        for entry in self._repository:
            if entry.model:
                await self._unload(entry, "the server is shutting down")

    async def _run(self, operation: Coroutine[Any, Any, T]) -> T:
        """Await an operation. If the caller is cancelled, as when its client disconnects, the operation goes on."""
        if self._closing.is_set():
            operation.close()
            raise _shutting_down()
        task = asyncio.create_task(operation)
        self._operations.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._operations.discard(task)
        # Read even if the caller has gone, because asyncio warns about exceptions that are never read.
        if error := None if task.cancelled() else task.exception():
            log.error("model control: %s", error, exc_info=None if isinstance(error, FewheadsError) else error)

    async def _load(self, name: str) -> None:
        await self._started.wait()
        failures: dict[str, str] = {}
        known = False
        for actual in await self._actual_names(name):
            async with self._alone(actual):
                if paths := await self._paths_of(actual):
                    known = True
                    failures |= await self._synchronise(actual, paths, paths)
        subject = f"failed to load {name!r}"  # clients of Triton look for these words
        if not known:
            raise self._repository.unknown(subject, fix="Put its bundle into the repository first.")
        if failures:
            given = Raw("; ".join(f"{directory}: {reason}" for directory, reason in failures.items()))
            fix = "RepositoryIndex gives the reason. The models that served before still do."
            raise LoadFailed(subject, given=given, expected="bundles that can be served", fix=fix)

    async def _load_on_demand(self, entry: Entry) -> Overloaded | None:
        await self._started.wait()
        async with self._alone(entry.name):
            if self.stopping:
                raise _shutting_down()
            if entry.model or entry.withdrawn:
                return None
            content = await asyncio.to_thread(self._directory.read, entry.path, entry.name)
            await self._settled(entry.name)
            if isinstance(content, FewheadsError):
                entry.loading(entry.path)
                entry.failed(content)
                return None
            entered, bundle = self._repository.enter(entry.name, entry.path, content, {})
            load = self._begin(entered, bundle, for_requests=True) if bundle else None
        # Without the lock: a build takes minutes, in which other versions are loaded and unloaded.
        failure = await self._loads.end_of(load) if load else None
        return failure if isinstance(failure, Overloaded) else None

    async def _actual_names(self, name: str) -> list[str]:
        """Return a name, and those of the bundles that could not be read before and were listed under it."""
        unread = {entry.path for entry in self._repository.named(name) if not entry.version}
        manifests = await asyncio.to_thread(self._directory.manifests) if unread else {}
        read = [found for path, found in manifests.items() if path in unread and not isinstance(found, FewheadsError)]
        return sorted({name, *(manifest.name for manifest in read)})

    async def _follow(self) -> None:
        if not (changed := await asyncio.to_thread(self._directory.changes)):
            return
        manifests = await asyncio.to_thread(self._directory.manifests)
        names = {entry.name for entry in self._repository if entry.path in changed}
        names |= {name_of(path, manifests[path]) for path in changed & manifests.keys()}
        for name in sorted(names):
            async with self._alone(name):
                await self._synchronise(name, await self._paths_of(name), changed)

    async def _paths_of(self, name: str) -> list[Path]:
        expected = [entry.path for entry in self._repository.named(name) if entry.model]
        return self._repository.paths_of(name, await asyncio.to_thread(self._directory.manifests, expected))

    async def _synchronise(self, name: str, paths: Collection[Path], changed: Collection[Path]) -> dict[str, str]:
        """Make the loaded versions of a model those of its directories; return the reason of each that failed.

        The caller holds the name's lock. Of ``paths``, those in ``changed`` are loaded again even if they have a model.
        """
        failures: dict[str, str] = {}
        present: list[Entry] = []
        taken: dict[Key, Path] = {}
        for path in paths:
            content = await asyncio.to_thread(self._directory.read, path, name)
            await self._settled(name)
            entry, bundle = self._repository.enter(name, path, content, taken)
            present.append(entry)
            # A reason may be outdated without a change: a bundle that was renamed while it was read, and back again.
            if bundle and (path in changed or not entry.model or entry.reason):
                await self._loads.end_of(self._begin(entry, bundle))
            if entry.reason:
                failures[path.name] = entry.reason
        if not failures:
            for entry in self._repository.named(name):
                if entry not in present:
                    await self._unload(entry, "removed")
                    self._repository.forget(entry)
        return failures

    def _begin(self, entry: Entry, bundle: Bundle, *, for_requests: bool = False) -> Load:
        load = self._loads.begin(entry, bundle, for_requests=for_requests)
        if self.stopping or entry.name in self._unwanted:
            load.stop()
        return load

    async def _settled(self, name: str) -> None:
        """Wait while a model of a name is being evicted, whose entry can be in no other state before that has ended."""
        while any(entry.state == "UNLOADING" for entry in self._repository.named(name)):
            await asyncio.sleep(_LOOK_SECONDS)

    async def _evict(self, entry: Entry, successor: Entry) -> None:
        reason = f"evicted for {successor.name}:{successor.version}; a request loads it again"
        # Whoever holds the lock is the load of the successor, or one that waits until this is done.
        async with nullcontext() if entry.name in self._busy else self._alone(entry.name):
            await self._loads.close(entry.unloading(reason))
            entry.unloaded(reason)
        entry.statistics.evicted()
        log.info("%s %s: %s", entry.name, entry.version, reason)

    async def _unload_all(self, name: str) -> None:
        await self._started.wait()
        async with self._alone(name):
            self._unwanted -= Counter((name,))
            for entry in self._repository.named(name):
                await self._unload(entry, "unloaded")
                entry.withdrawn = True

    async def _unload(self, entry: Entry, reason: str) -> None:
        self._loads.drop(entry)
        await self._settled(entry.name)
        if entry.model:
            await self._loads.close(entry.unloading(reason))
            log.info("%s %s: %s", entry.name, entry.version, reason)
        entry.unloaded(reason)

    @asynccontextmanager
    async def _alone(self, name: str) -> AsyncIterator[None]:
        self._busy[name] += 1
        try:
            async with self._locks.setdefault(name, asyncio.Lock()):
                yield
        finally:
            self._busy -= Counter((name,))


def _shutting_down() -> ModelNotReady:
    given = Raw("a server that is shutting down")
    return ModelNotReady("server", given=given, expected="READY", fix="Use another server.")
