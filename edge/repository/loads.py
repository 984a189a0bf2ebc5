"""The loads in progress, one for each entry; nothing waits for one that takes too long, and it goes on by itself."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from edge.bundles.bundle import Bundle
from edge.errors import FewheadsError, LoadFailed, Overloaded, Raw
from edge.repository.entry import Entry
from edge.repository.load import Load, on_thread
from edge.repository.loader import load_limit_seconds
from edge.repository.model import Model
from edge.repository.repository import Repository, load_error
from edge.repository.room import Room
from edge.runtimes.build_child import stopped

log = logging.getLogger(__name__)

#: Between two looks at a load.
_LOOK_SECONDS = 0.25


class Loads:
    """Loads bundles into their entries. For the event loop only.

    Args:
        watchdog_seconds: the least limit for a load (:func:`edge.repository.loader.load_limit_seconds`).
        room: makes room for a model before its load; None where nothing is evicted.
    """

    def __init__(self, repository: Repository, watchdog_seconds: float, room: Room | None) -> None:
        self._repository, self._watchdog_seconds, self._room = repository, watchdog_seconds, room
        self._current: dict[Entry, Load] = {}

    def begin(self, entry: Entry, bundle: Bundle, *, for_requests: bool = False) -> Load:
        """Begin to load a bundle into an entry that is LOADING or READY; return it, or the same load in progress.

        A load of other files into the entry is stopped. One that is not only ``for_requests`` any more does not depend
        on them.
        """
        load = self._current.get(entry)
        if load and load.bundle.manifest == bundle.manifest:
            load.for_requests = load.for_requests and for_requests
            return load
        if load:
            load.stop()
        load = self._current[entry] = Load(entry, bundle, for_requests=for_requests)
        load.task = asyncio.create_task(self._load(load))
        return load

    async def end_of(self, load: Load) -> FewheadsError | None:
        """Return when a load has ended, or takes too long: its error, also one that says that there was no room."""
        assert load.task
        limit_seconds = load_limit_seconds(load.bundle, self._watchdog_seconds)
        while not load.is_late(limit_seconds):
            await asyncio.wait({load.task}, timeout=_LOOK_SECONDS)
            if load.task.done():
                return load.task.result()  # or raise what interrupted it
        subject, expected = f"bundle {load.bundle.path}", f"one within {limit_seconds:.1f} s"
        given, fix = Raw("no end of its load yet"), "It goes on. If it never ends, look at its golden inputs."
        late = LoadFailed(subject, given=given, expected=expected, fix=fix)
        if self._room:
            self._room.end_turn(load)
        late = stopped(subject) if load.unwanted.is_set() else late
        if self._is_current(load) and load.entry.state in ("LOADING", "READY"):  # not while its model is evicted
            load.entry.failed(late)
        return late

    def stop(self, name: str | None = None) -> None:
        """Stop the loads of a name, or all of them."""
        for entry, load in self._current.items():
            if name in (None, entry.name):
                load.stop()

    def drop(self, entry: Entry) -> None:
        """Stop the load of an entry, if there is one; its model will not serve."""
        if load := self._current.pop(entry, None):
            load.stop()

    async def close(self, model: Model) -> None:
        """Close a model after its last request."""
        model.use.end()
        await model.use.wait_unused()
        try:
            await asyncio.to_thread(self._repository.loader.close, model)
        except Exception:  # whatever it still holds, the next load must go on
            log.exception("%s %s cannot be closed", model.name, model.version)

    def _is_current(self, load: Load) -> bool:
        """Return whether its entry is there, and was neither unloaded nor loaded again meanwhile."""
        return self._current.get(load.entry) is load and load.entry in self._repository

    async def _load(self, load: Load) -> FewheadsError | None:
        entry, model, failure = load.entry, None, None
        try:
            model = await self._loaded(load)
        except Exception as error:
            failure = load_error(load.bundle.path, error)
        while self._is_current(load) and entry.state == "UNLOADING":  # its earlier model is being evicted
            await asyncio.sleep(_LOOK_SECONDS)
        if not self._is_current(load):
            if model:
                await self.close(model)
            return failure
        del self._current[entry]
        entry.loading(load.bundle.path)  # it is not, if this took too long
        if entry.on_demand and not entry.model and (isinstance(failure, Overloaded) or not (failure or model)):
            entry.unloaded(str(failure or "not loaded"))  # the bundle may be sound
        elif failure:
            entry.failed(failure)
        elif model and (replaced := entry.loaded(model)):
            await self.close(replaced)
        return failure

    async def _loaded(self, load: Load) -> Model | None:
        loop, loader = asyncio.get_running_loop(), self._repository.loader

        def building(progress: str) -> None:
            load.building(progress)
            if self._current.get(load.entry) is load and load.entry.state in ("LOADING", "READY"):
                load.entry.building(progress)

        def report(progress: str) -> None:
            loop.call_soon_threadsafe(building, progress)

        work = partial(loader.load_model, load.bundle, report, load.unwanted)
        if not self._room:
            return await on_thread(work)
        prepare = on_thread(partial(loader.prepare, load.bundle, report, load.unwanted))
        return await self._room.load_model(
            load, prepare, lambda evicts: on_thread(partial(work, evicts=evicts)), building
        )
