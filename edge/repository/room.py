"""Room for models that are loaded on demand, where memory or a limit on their number has none for all.

The model that was used least recently is evicted. Models without requests come first; if each has some, the chosen one
takes no more of them and is closed after its last. After a load nothing is evicted for as long as it took, so that at
most about half of the time goes to loads, however many models requests are for.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final

from edge.errors import LoadFailed, Overloaded, Raw
from edge.repository.entry import Entry
from edge.repository.load import Load
from edge.repository.model import Model
from edge.repository.repository import Repository

#: Between two looks for a model that may be evicted.
_LOOK_SECONDS: Final = 0.02
#: Reports what a load waits for, and nothing when it goes on.
_Report = Callable[[str], None]


class Room:
    """Lets one load at a time make room for its model. For the event loop only.

    Args:
        most: models, each version counted, that may be loaded at once; None is no limit.
        is_busy: whether an operation on the models of a name is in progress.
        evict: closes a model after its last request, in favour of the other one.
    """

    def __init__(
        self,
        repository: Repository,
        most: int | None,
        is_busy: Callable[[str], bool],
        evict: Callable[[Entry, Entry], Awaitable[None]],
    ) -> None:
        self._repository, self._most, self._is_busy, self._evict = repository, most, is_busy, evict
        self._turn = asyncio.Lock()
        self._queued: Counter[str] = Counter()  # names of models whose loads have not had their turn yet
        self._loading: Load | None = None  # has the turn
        self._awaited: Counter[Entry] = Counter()  # by requests
        self._kept: Counter[Entry] = Counter()  # by requests that wait for another model beside it

    @contextmanager
    def awaited(self, entry: Entry, base: Entry | None) -> Iterator[None]:
        """Note a request that waits for a model in this block, and uses the model ``base`` already."""
        counts = [(self._awaited, entry)] + ([(self._kept, base)] if base else [])
        for count, of in counts:
            count[of] += 1
        try:
            yield
        finally:
            for count, of in counts:
                count[of] -= 1
                if not count[of]:
                    del count[of]

    async def load_model(
        self, load: Load, prepare: Awaitable[None], attempt: Callable[[bool], Awaitable[Model]], report: _Report
    ) -> Model | None:
        """Return the result of an ``attempt`` to load a model, once there is room; one that lacks memory is repeated.

        Its argument says that another model may still be evicted for it. Others are loaded while this one is prepared,
        which takes minutes with a build. A load for requests, of which none waits any more, is given up, and returns
        None.

        Raises:
            Overloaded: no model can be evicted, and as many are loaded as may be.
            LoadFailed: it was stopped, or there is too little memory for it beside those that cannot be evicted.
        """
        async with self._its_turn(load, prepare, report):
            load.check_wanted()
            if load.for_requests and not self._awaited[load.entry]:
                return None
            await self._make(load, report)
            while True:
                load.check_wanted()  # an eviction waits for the requests to a model
                evicts = bool(self._leaving(load.entry))
                try:
                    return await attempt(evicts)
                except LoadFailed as error:
                    if not (error.lacks_memory and evicts):
                        raise
                await self._evict_one(load, report)  # if none can go any more, the next attempt is the last one

    @asynccontextmanager
    async def _its_turn(self, load: Load, prepare: Awaitable[None], report: _Report) -> AsyncIterator[None]:
        """Prepare a load, wait for its turn, and hold that in this block, or until :meth:`end_turn`."""
        self._queued[load.entry.name] += 1
        try:
            await prepare
            report("waits for the load of another model")
            await self._turn.acquire()
        finally:
            self._queued[load.entry.name] -= 1
        self._loading = load
        report("")
        try:
            yield
        finally:
            self.end_turn(load)

    def end_turn(self, load: Load) -> None:
        """Let the next load begin, if this one has the turn."""
        if self._loading is load:
            self._loading = None
            self._turn.release()

    async def _make(self, load: Load, report: _Report) -> None:
        """Evict models until there may be one more; raise an Overloaded if none can be evicted."""
        while self._most and len(self._others(load.entry)) >= self._most:
            if not await self._evict_one(load, report):
                subject = f"room for {load.entry.name}:{load.entry.version}"
                given = Raw("loaded models of which none can be evicted")
                expected, fix = f"one that can, or fewer than {self._most}", "Raise --max-loaded, or pin fewer models."
                raise Overloaded(subject, given=given, expected=expected, fix=fix, cause="models")

    def _others(self, entry: Entry) -> list[Entry]:
        """Return what is in memory beside a model."""
        return [other for other in self._repository if other is not entry and (other.model or _is_closing(other))]

    def _leaving(self, entry: Entry) -> list[Entry]:
        """Return what may leave memory in favour of a model, or does already.

        One that is kept closes only after the request that keeps it, which may wait for this load.
        """
        others = [other for other in self._others(entry) if not self._kept[other]]
        return [other for other in others if other.on_demand or _is_closing(other)]

    async def _evict_one(self, load: Load, report: _Report) -> bool:
        """Evict one model, or wait until one has gone; return False if none can go."""
        entry = load.entry
        before = len(self._others(entry))
        while len(others := self._others(entry)) >= before:
            load.check_wanted()
            leaving = self._leaving(entry)
            if not leaving:
                return False
            calm = _is_calm(others)
            ready = [other for other in leaving if calm and other.model and self._may_go(other, entry)]
            if ready:
                await self._evict(min(ready, key=_last_use), entry)
                break
            report("waits until another model may be evicted")
            await asyncio.sleep(_LOOK_SECONDS)
        report("")
        return True

    def _may_go(self, other: Entry, entry: Entry) -> bool:
        """Return whether nothing else is about to happen with a model.

        A load of the same name that has the turn, or waits for it until this model has gone, is no hindrance.
        """
        waits = other.name == entry.name or self._queued[other.name] > 0
        return not self._awaited[other] and (waits or not self._is_busy(other.name))


def _is_calm(entries: list[Entry]) -> bool:
    """Return whether each model has been loaded for as long as its load took."""
    now = time.monotonic()
    return all(now >= entry.loaded_at + entry.model.load_ns / 1e9 for entry in entries if entry.model)


def _is_closing(entry: Entry) -> bool:
    return entry.state == "UNLOADING"


def _last_use(entry: Entry) -> tuple[bool, float]:
    assert entry.model
    return entry.model.use.users > 0, entry.model.use.unused_since
