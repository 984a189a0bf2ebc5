"""Which models are loaded: all at the start, or on request, or as the repository's directory changes.

Runs on the event loop, which is the only place where a model takes another's place or goes: what takes long is done on
other threads before. A request has found its model in one go on the same loop, so it has either the old one, which is
closed after it, or the new one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from edge.bundles.bundle import Bundle
from edge.errors import FewheadsError, Literally, LoadFailed, ModelNotReady, Unsupported
from edge.repository.model import Model
from edge.repository.repository import Entry, Key, Repository

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Who replaces a directory by renaming leaves the place empty for a moment.
_RENAME_SECONDS = 0.2

#: What distinguishes two states of a bundle's directory: names, sizes, times and places on disk of its files.
Stamp = frozenset[tuple[str, int, int, int]]


class ModelControl:
    """Loads, reloads and unloads models without losing a request.

    Args:
        repository: the models.
        mode: ``none``, ``poll`` or ``explicit``, in Triton's words.
        changed: awaited after a model's state has changed.

    Attributes:
        stopping: once it is set, :meth:`start` begins with no further model.
    """

    def __init__(self, repository: Repository, mode: str, changed: Callable[[Entry], Awaitable[None]]) -> None:
        self.mode = mode
        self._repository = repository
        self._changed = changed
        # A name's operations wait for each other; a lock lives as long as somebody waits for it.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._operations: set[asyncio.Task[Any]] = set()
        self._started = asyncio.Event()
        self._closing = asyncio.Event()
        self.stopping = False
        self._stamps: dict[Path, Stamp] = {}

    async def start(self, only: Collection[str] | None = None) -> None:
        """Load the models that are there.

        Args:
            only: their names; None is all of them.
        """
        loop = asyncio.get_running_loop()

        def changed(entry: Entry) -> None:
            async def tell() -> None:
                await self._changed(entry)

            asyncio.run_coroutine_threadsafe(tell(), loop).result()

        self._stamps = await asyncio.to_thread(self._read_stamps)
        await asyncio.to_thread(self._repository.load_all, changed, only, lambda: self.stopping)
        self._started.set()

    def check_explicit(self, method: str) -> None:
        """Check that models are loaded and unloaded on request.

        Raises:
            Unsupported: they are not.
        """
        if self.mode != "explicit":
            given = Literally(f"a server with --model-control {self.mode}")
            fix = "Start it with `fewheads serve --model-control explicit`."
            raise Unsupported(method, given=given, expected="--model-control explicit", fix=fix)

    async def load_model(self, name: str) -> None:
        """Load every version of a model from what lies in the directory now, or load it again.

        Each version is replaced when its successor has been loaded and checked; those that lie there no longer are
        unloaded if everything else went well. Cancelling this leaves the operation to end by itself.

        Raises:
            NotFound: no bundle has that name.
            LoadFailed: a bundle cannot be served. What was served is served still.
            ModelNotReady: the server is going down.
        """
        await self._run(self._load(name))

    async def unload_model(self, name: str) -> None:
        """Let no further request to a model in, and close it when the last one is answered; an unknown one is no error.

        Raises:
            ModelNotReady: the server is going down.
        """
        await self._run(self._unload(name))

    async def list_unloaded(self) -> None:
        """Note what has come into the directory, or gone from it, without having been loaded."""
        if self.mode == "explicit" and self._started.is_set():
            self._repository.list_unloaded(await asyncio.to_thread(self._repository.scan))

    async def poll(self, seconds: float) -> None:
        """Follow the directory until :meth:`close`: load what is new or has changed, unload what has gone.

        A bundle's manifest knows the hash of each of its files, so one that is copied half cannot be loaded; it is
        tried again when it changes again.

        Args:
            seconds: between two looks.
        """
        while True:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._closing.wait(), seconds)
                return
            with suppress(FewheadsError, OSError):  # which are in the log
                await self._run(self._follow())

    async def close(self) -> None:
        """Begin nothing more, and wait for what has begun."""
        self._closing.set()
        await asyncio.gather(*self._operations, return_exceptions=True)

    async def _run(self, operation: Coroutine[Any, Any, T]) -> T:
        """Await an operation that goes on if the one who waits for it is cancelled: a client may hang up."""
        if self._closing.is_set():
            operation.close()
            given = Literally("one that is going down")
            raise ModelNotReady("server", given=given, expected="READY", fix="Ask another one.")
        task = asyncio.create_task(operation)
        self._operations.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._operations.discard(task)
        # Asked for, because asyncio complains about what nobody has asked for.
        error = None if task.cancelled() else task.exception()
        if error:
            log.error("the control of models: %s", error, exc_info=None if isinstance(error, FewheadsError) else error)

    async def _load(self, name: str) -> None:
        await self._started.wait()
        async with self._lock(name):
            paths = await asyncio.to_thread(self._paths_of, name)
            if not paths:
                raise self._repository.unknown(name, fix="Put its bundle into the repository first.")
            failures = await self._synchronise(name, paths, paths)
        if failures:
            given = Literally("; ".join(f"{directory}: {reason}" for directory, reason in failures.items()))
            fix = "RepositoryIndex tells the reason. What was served before is served still."
            raise LoadFailed(f"model {name!r}", given=given, expected="bundles that can be served", fix=fix)

    async def _unload(self, name: str) -> None:
        await self._started.wait()
        async with self._lock(name):
            for entry in [entry for entry in self._repository if entry.name == name]:
                await self._close(entry, "unloaded")

    async def _follow(self) -> None:
        stamps = await asyncio.to_thread(self._read_stamps)
        if stamps.keys() < self._stamps.keys():
            await asyncio.sleep(_RENAME_SECONDS)
            stamps = await asyncio.to_thread(self._read_stamps)
        paths = {path for path in {*stamps, *self._stamps} if stamps.get(path) != self._stamps.get(path)}
        self._stamps = stamps
        names = {entry.name for entry in self._repository if entry.path in paths}
        if paths:
            scan = await asyncio.to_thread(self._repository.scan)
            known = {entry.path for entry in self._repository}
            for path in paths & scan.keys():
                key = scan[path]
                if not isinstance(key, Exception):
                    names.add(key[0])
                elif path not in known:
                    names.add(path.name)
        for name in sorted(names):
            async with self._lock(name):
                found = await asyncio.to_thread(self._paths_of, name)
                await self._synchronise(name, found, paths)

    async def _synchronise(self, name: str, paths: Collection[Path], changed: Collection[Path]) -> dict[str, str]:
        """Make the loaded versions of a model those of its directories; return why some directories failed."""
        failures: dict[str, str] = {}
        present: list[Entry] = []
        taken: dict[Key, Path] = {}
        for path in paths:
            found = await asyncio.to_thread(self._repository.read, path)
            entry, bundle = self._repository.enter(path, found, taken)
            present.append(entry)
            if bundle and (path in changed or not entry.model):
                await self._replace(entry, bundle)
            if entry.reason:
                failures[path.name] = entry.reason
            await self._changed(entry)
        if not failures:
            for entry in [entry for entry in self._repository if entry.name == name and entry not in present]:
                await self._close(entry, "removed")
                self._repository.forget(entry)
        return failures

    async def _replace(self, entry: Entry, bundle: Bundle) -> None:
        if not entry.model:
            entry.state, entry.reason = "LOADING", ""
            await self._changed(entry)
        try:
            model = await asyncio.to_thread(self._repository.loader.load_model, bundle)
        except FewheadsError as error:
            entry.failed(error)
            return
        old = entry.loaded(model)
        await self._changed(entry)
        if old:
            await self._drain(old)

    async def _close(self, entry: Entry, reason: str) -> None:
        model, entry.model = entry.model, None
        if model:
            entry.state, entry.reason = "UNLOADING", reason
            await self._changed(entry)
            await self._drain(model)
            log.info("%s %s is %s", entry.name, entry.version, reason)
        entry.state, entry.reason, entry.wanted = "UNAVAILABLE", reason, False
        await self._changed(entry)

    async def _drain(self, model: Model) -> None:
        while model.lease.users:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(self._repository.loader.close, model)

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())

    def _paths_of(self, name: str) -> list[Path]:
        """Return the directories of a model: those that say so, and the unreadable ones that are known by its name."""
        entries = [entry for entry in self._repository if entry.name == name]
        if not all(entry.path.is_dir() for entry in entries if entry.model):
            time.sleep(_RENAME_SECONDS)
        places = {entry.path for entry in entries}
        unread = {entry.path for entry in entries if not entry.version}
        return [
            path
            for path, key in self._repository.scan().items()
            if (path in places or path.name == name if isinstance(key, Exception) else key[0] == name or path in unread)
        ]

    def _read_stamps(self) -> dict[Path, Stamp]:
        return {path: _stamp(path) for path in self._repository.directories()} if self.mode == "poll" else {}


def _stamp(path: Path) -> Stamp:
    try:
        with os.scandir(path) as files:
            return frozenset(
                (file.name, status.st_size, status.st_mtime_ns, status.st_ino)
                for file in files
                for status in [file.stat()]
            )
    except OSError:  # it is being replaced; the next look will see more
        return frozenset()
