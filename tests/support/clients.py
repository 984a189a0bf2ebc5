"""The asyncio client with blocking methods, so that the same tests run on both clients."""

import asyncio
import inspect
import threading

from edge.client import AsyncClient, Client


class Awaited:
    """An :class:`AsyncClient` in an event loop of its own; methods await its coroutines and iterate its generators."""

    def __init__(self, *arguments, **options):
        async def make():
            return AsyncClient(*arguments, **options)

        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._client = self._run(make())

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._run(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __getattr__(self, name):
        def call(*arguments, **options):
            made = getattr(self._client, name)(*arguments, **options)
            return self._iterate(made) if inspect.isasyncgen(made) else self._run(made)

        return call

    def _run(self, work):
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def _iterate(self, items):
        async def step():
            return await anext(items, _END)

        try:
            yield from iter(lambda: self._run(step()), _END)
        finally:
            self._run(items.aclose())


_END = object()


#: Both clients, to be called alike.
CLIENTS = {"blocking": Client, "asyncio": Awaited}
