"""Operations that outlive their callers, such as a load whose client disconnects."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from edge.errors import FewheadsError, Literally, ModelNotReady

log = logging.getLogger(__name__)

T = TypeVar("T")


class Operations:
    """Runs operations on the event loop until :meth:`close`."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closing = asyncio.Event()

    async def run(self, operation: Coroutine[Any, Any, T]) -> T:
        """Await an operation. Cancelling this leaves the operation to end by itself.

        Raises:
            ModelNotReady: the server is going down, and the operation has not begun.
        """
        if self._closing.is_set():
            operation.close()
            given = Literally("one that is going down")
            raise ModelNotReady("server", given=given, expected="READY", fix="Ask another one.")
        task = asyncio.create_task(operation)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    async def closed_within(self, seconds: float) -> bool:
        """Wait for :meth:`close`, at most so long; return whether it has been called."""
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._closing.wait(), seconds)
        return self._closing.is_set()

    async def close(self) -> None:
        """Begin no more operations, and wait for those that have begun."""
        self._closing.set()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        # Read even if the caller has gone, because asyncio complains about exceptions that nobody reads.
        error = None if task.cancelled() else task.exception()
        if error:
            log.error("model control: %s", error, exc_info=None if isinstance(error, FewheadsError) else error)
