"""Models that requests load."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from edge.errors import Overloaded
from edge.repository.control import ModelControl
from edge.repository.entry import Entry
from edge.repository.model import Model
from edge.repository.repository import NotLoaded, Repository


class OnDemand:
    """Finds models, and loads those that are loaded on demand; requests for one model share its load.

    For the event loop only. A load that has begun goes on if nobody waits for it any more.
    """

    def __init__(self, repository: Repository, control: ModelControl) -> None:
        self._repository, self._control = repository, control
        self._loads: dict[Entry, asyncio.Task[Overloaded | None]] = {}

    async def ready(self, name: str, version: str, base: Entry | None = None) -> tuple[Entry, Model]:
        """Return an entry and its model, of which the caller must take a use before it awaits anything else.

        The model ``base``, of which it has one, is not evicted for this.

        Raises:
            Overloaded: no model can be evicted for this one.
            RequestError: as :meth:`edge.repository.repository.Repository.ready`, and for a load that failed.
        """
        while True:
            try:
                return self._repository.ready(name, version)
            except NotLoaded as missing:
                entry = missing.entry
            assert self._control.room
            with self._control.room.awaited(entry, base), suppress(NotLoaded):
                await self._load(entry)
                # In this block, so that nothing evicts it before the caller has it. Found again, because a higher
                # version may have been listed meanwhile.
                return self._repository.ready(name, version)

    async def _load(self, entry: Entry) -> None:
        load = self._loads.get(entry)
        if not load:
            load = self._loads[entry] = asyncio.create_task(self._load_once(entry))
        if refusal := await asyncio.shield(load):
            # A new one for each request: the traceback of an error refers to frames that refer to the request.
            given, expected, fix = refusal.given, refusal.expected, refusal.fix
            raise Overloaded(refusal.subject, given=given, expected=expected, fix=fix, cause=refusal.cause)

    async def _load_once(self, entry: Entry) -> Overloaded | None:
        try:
            return await self._control.load_on_demand(entry)
        finally:
            # Not in a callback: a request could share a load that has just ended without a model, again and again.
            del self._loads[entry]
