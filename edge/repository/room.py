"""Room for models that are loaded on demand, where memory or a limit on their number has none for all.

The model that was used least recently is evicted. Models without requests come first; if each has some, the chosen one
takes no more of them and is closed after its last. After a load nothing is evicted for as long as it took, so that at
most about half of the time goes to loads, however many models requests are for.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final

from edge.errors import LoadFailed, Overloaded, Raw
from edge.repository.entry import Entry
from edge.repository.model import Model
from edge.repository.repository import Repository
from edge.runtimes.build_child import stopped

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
        self._loading: Entry | None = None  # has the turn
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
        self,
        entry: Entry,
        build: Awaitable[None],
        attempt: Callable[[], Awaitable[Model]],
        report: _Report,
        stop: threading.Event,
        for_requests: bool,
    ) -> Model | None:
        """Return the result of an ``attempt`` to load a model, once there is room; one that lacks memory is repeated.

        Others are loaded during its ``build``, which takes minutes. A load ``for_requests`` for which none waits any
        more is given up, and returns None.

        Raises:
            Overloaded: no model can be evicted for it.
            LoadFailed: ``stop`` is set, or there is too little memory for it alone.
        """
        async with self._its_turn(entry, build, report):
            if stop.is_set():
                raise stopped(f"load of bundle {entry.path}")
            if for_requests and not self._awaited[entry]:
                return None
            await self._make(entry, report, stop)
            while True:
                try:
                    return await attempt()
                except LoadFailed as error:
                    if not (error.lacks_memory and self._others(entry)):
                        raise
                    lacking = error
                await self._make_more(entry, lacking, report, stop)

    @asynccontextmanager
    async def _its_turn(self, entry: Entry, prepare: Awaitable[None], report: _Report) -> AsyncIterator[None]:
        """Prepare a load, wait for its turn, and hold that in this block, or until :meth:`end_turn`."""
        self._queued[entry.name] += 1
        try:
            await prepare
            report("waits for the load of another model")
            await self._turn.acquire()
        finally:
            self._queued[entry.name] -= 1
        self._loading = entry
        report("")
        try:
            yield
        finally:
            self.end_turn(entry)

    def end_turn(self, entry: Entry) -> None:
        """Let the next load begin, if this one has the turn."""
        if self._loading is entry:
            self._loading = None
            self._turn.release()

    async def _make(self, entry: Entry, report: _Report, stop: threading.Event) -> None:
        """Evict models until there may be one more; raise an Overloaded if none can be evicted."""
        while self._most and (loaded := len(self._others(entry))) >= self._most:
            given = Raw(f"{loaded} loaded models, none of which can be evicted")
            fix = "Raise --max-loaded, or pin fewer models."
            subject, expected = f"room for {entry.name}:{entry.version}", f"fewer than {self._most}"
            refusal = Overloaded(subject, given=given, expected=expected, fix=fix, cause="models")
            await self._evict_one(entry, refusal, report, stop)

    async def _make_more(self, entry: Entry, lacking: LoadFailed, report: _Report, stop: threading.Event) -> None:
        """Evict one model, or wait until one has gone, for a load that lacks memory; raise as :meth:`_make`."""
        fix = "No other model can be evicted; pin fewer, or free memory in other ways."
        subject, given, expected = lacking.subject, lacking.given, lacking.expected
        refusal = Overloaded(subject, given=given, expected=expected, fix=fix, cause="models")
        await self._evict_one(entry, refusal, report, stop)

    def _others(self, entry: Entry) -> list[Entry]:
        """Return what is in memory beside a model."""
        return [other for other in self._repository if other is not entry and (other.model or _is_closing(other))]

    async def _evict_one(self, entry: Entry, refusal: Overloaded, report: _Report, stop: threading.Event) -> None:
        before = len(self._others(entry))
        while len(others := self._others(entry)) >= before:
            if stop.is_set():
                raise stopped(f"load of bundle {entry.path}")
            evictable = [other for other in others if other.model and other.on_demand and not self._kept[other]]
            ready = [other for other in evictable if self._may_go(other, entry)] if _is_calm(others) else []
            if ready:
                await self._evict(min(ready, key=_last_use), entry)
                break
            # One that is kept closes only after the request that keeps it, which may wait for this load.
            if not evictable and not any(_is_closing(other) and not self._kept[other] for other in others):
                raise refusal
            report("waits until another model may be evicted")
            await asyncio.sleep(_LOOK_SECONDS)
        report("")

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
